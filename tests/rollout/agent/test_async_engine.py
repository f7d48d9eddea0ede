from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from practicum.rollout.answers import sample_of
from practicum.rollout.runner import EngineRunner, Order

from practicum.errors import RolloutError
from practicum.rollout.agent.async_engine import AsyncEngine
from practicum.types import Prompt, RolloutRequest, SamplingParams
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
DEADLINE_S = 30.0


def request(num_answers: int = 1, most: int = 50) -> RolloutRequest:
    params = SamplingParams(most, num_answers=num_answers)
    return RolloutRequest(Prompt("p", text="?"), np.array([5, 6], np.int32), params, 0)


class HeldRunner:
    """Answers when it is told to, from another thread."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.cancelled: list[Order] = []

    def submit(self, *orders: Order) -> None:
        if any(len(order.request.prompt_ids) > 2 for order in orders):
            raise RolloutError("too long")
        self.orders += orders

    def cancel(self, order: Order) -> None:
        self.cancelled.append(order)

    def answer(self, order: int, answer: int, *ids: int) -> None:
        asked = self.orders[order]
        arrays = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
        self._elsewhere(asked.on_sample, answer, sample_of(asked.request, *arrays, 0, "stop", TOKENIZER))

    def fail(self, order: int) -> None:
        self._elsewhere(self.orders[order].on_failure, RuntimeError("on fire"))

    def _elsewhere(self, function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args)
        thread.start()
        thread.join()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))


def test_answers_come_one_by_one() -> None:
    async def test() -> None:
        runner = HeldRunner()
        writing = AsyncEngine(runner).begin(request(2))
        runner.answer(0, 1, 7)
        assert (await writing.answers[1]).token_ids.tolist() == [7]
        assert not writing.answers[0].done()
        runner.answer(0, 0, 8)
        assert (await writing.answers[0]).token_ids.tolist() == [8]

    run(test())


def test_requests_begun_together_are_submitted_together_or_not_at_all() -> None:
    async def test() -> None:
        runner = HeldRunner()
        long = RolloutRequest(Prompt("q", text="?"), np.arange(9, dtype=np.int32), SamplingParams(5), 0)
        with pytest.raises(RolloutError, match="too long"):
            AsyncEngine(runner).begin_all([(request(), None), (long, None)])
        assert not runner.orders
        assert len(AsyncEngine(runner).begin_all([(request(), None)] * 3)) == len(runner.orders) == 3

    run(test())


def test_what_the_engine_fails_with_comes_to_all_who_wait() -> None:
    async def test() -> None:
        runner = HeldRunner()
        writing = AsyncEngine(runner).begin(request(2))
        runner.answer(0, 0, 7)
        await writing.answers[0]
        runner.fail(0)
        with pytest.raises(RuntimeError, match="on fire"):
            await writing.answers[1]
        assert (await writing.answers[0]).token_ids.tolist() == [7]

    run(test())


def test_a_request_is_cancelled_when_nobody_waits_for_any_of_its_answers() -> None:
    async def test() -> None:
        runner = HeldRunner()
        task = asyncio.create_task(AsyncEngine(runner).write(request(2)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert runner.cancelled and set(map(id, runner.cancelled)) == {id(runner.orders[0])}
        runner.answer(0, 0, 7)  # too late: no harm
        writing = AsyncEngine(runner).begin(request(2))
        writing.answers[0].cancel()
        await asyncio.sleep(0)
        assert runner.orders[1] not in runner.cancelled  # somebody waits for the other

    run(test())


def test_broken_off_answers_come_with_what_there_is() -> None:
    async def test() -> None:
        engine = ScriptedEngine(TOKENIZER, lambda text: None, pause_s=0.001)
        runner = EngineRunner(engine)
        try:
            writing = AsyncEngine(runner).begin(request(1, most=1900))
            while not engine.num_tokens:
                await asyncio.sleep(0.001)
            writing.break_off()
            sample = await writing.answers[0]
            assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 1900
        finally:
            runner.close()

    run(test())


def test_answers_that_come_after_the_loop_has_closed_do_not_trouble_the_engine() -> None:
    runner = HeldRunner()

    async def leave() -> None:
        AsyncEngine(runner).begin(request())

    asyncio.run(leave())
    runner.answer(0, 0, 7)
    runner.fail(0)
