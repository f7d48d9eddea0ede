from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from practicum.rollout.runner import EngineRunner

from practicum.rollout.serving.answers import Answers, Done, Written
from practicum.rollout.serving.refusals import NotNow
from practicum.types import Prompt, RolloutRequest, SamplingParams
from tests.rollout.serving.fakes import WAIT_S, StepEngine


@pytest.fixture
def runner() -> Iterator[EngineRunner]:
    engine = StepEngine()
    engine.resume()
    runner = EngineRunner(engine)
    yield runner
    runner.close()


def engine_of(runner: EngineRunner) -> StepEngine:
    assert isinstance(runner.engine, StepEngine)
    return runner.engine


def request(num_tokens: int) -> RolloutRequest:
    return RolloutRequest(Prompt("p", text="1"), np.array([5], np.int32), SamplingParams(num_tokens), seed=0)


def test_news_come_as_they_are_written(runner: EngineRunner) -> None:
    async def run() -> list[tuple[str, int]]:
        seen = []
        with Answers(runner, [request(3), request(1)], wants_tokens=True) as answers:
            engine_of(runner).steps.release()
            async for news in answers:
                seen.append((type(news).__name__, news.request))
                if isinstance(news, Done) and news.request == 1:
                    engine_of(runner).steps.release(2)  # nobody wrote ahead of what was told
        return seen

    seen = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    first, last = seen[:3], seen[3:]
    assert sorted(first) == [("Done", 1), ("Written", 0), ("Written", 1)]
    assert last == [("Written", 0), ("Written", 0), ("Done", 0)]


def test_without_tokens_only_the_ends_are_told(runner: EngineRunner) -> None:
    async def run() -> list[type]:
        engine_of(runner).steps.release(5)
        with Answers(runner, [request(2), request(3)], wants_tokens=False) as answers:
            return [type(news) async for news in answers]

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == [Done, Done]


def test_who_leaves_takes_the_requests_along(runner: EngineRunner) -> None:
    async def run() -> None:
        with Answers(runner, [request(5), request(5)], wants_tokens=True) as answers:
            engine_of(runner).steps.release()
            assert isinstance(await anext(answers), Written)
        while runner.num_running or runner.num_waiting:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert engine_of(runner).num_aborted == 2


def test_a_failure_of_the_engine_is_told(runner: EngineRunner) -> None:
    async def run() -> None:
        engine_of(runner).error = RuntimeError("out of tokens")
        with pytest.raises(RuntimeError, match="out of tokens"), Answers(runner, [request(1)], wants_tokens=False) as a:
            await anext(a)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_an_engine_that_has_been_closed_takes_nothing(runner: EngineRunner) -> None:
    async def run() -> None:
        runner.close()
        with pytest.raises(NotNow, match="closed"), Answers(runner, [request(1)], wants_tokens=False):
            pass

    asyncio.run(run())
