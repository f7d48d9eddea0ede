from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from practicum import Sample
from practicum.config import LimitsConfig
from practicum.processes import Limits, ProcessPool
from practicum.reward.client import RewardClient, Target
from practicum.reward.executors import GradingWork, HttpExecutor, InlineExecutor, ProcessExecutor
from practicum.reward.graders.base import Grader, IsolatedGrader
from practicum.reward.graders.exact import Exact
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.probe import probe_function
from practicum.reward.graders.remote import Endpoint
from practicum.reward.limits import LimitClient, LimitKeeper
from practicum.types import Score
from tests.reward.builders import function, samples_of, target
from tests.reward.fakes import FakeService, run


def grader_of(name: str) -> UserFunction:
    return UserFunction(function=function(name), shape=probe_function(function(name)))


async def pool_for(grader: Grader, size: int = 2) -> ProcessPool:
    pool = ProcessPool(GradingWork({0: grader}), size=size, limits=Limits(256 << 20))
    await pool.start()
    return pool


@asynccontextmanager
async def executor_of(
    grader: UserFunction | IsolatedGrader, timeout_s: float = 5.0, size: int = 2, limits: LimitClient | None = None
) -> AsyncIterator[ProcessExecutor]:
    pool = await pool_for(grader, size)
    try:
        yield ProcessExecutor(pool, 0, grader, timeout_s, limits)
    finally:
        await pool.close()


def test_a_rule_that_raises_is_invalid() -> None:
    executor = InlineExecutor(Exact())

    async def test() -> None:
        good, bad = samples_of("4", "4", truth="4")
        bad.text = None  # type: ignore[assignment]  # whatever a grader does not expect
        assert (await executor.grade(good)).score == Score(1.0)
        score = (await executor.grade(bad)).score
        assert score.status == "invalid" and score.reason.startswith("raised ")

    run(test)


def test_what_becomes_of_a_job_is_a_status() -> None:
    async def test() -> None:
        grader = grader_of("misbehaves")
        pool = await pool_for(grader)
        executor = ProcessExecutor(pool, 0, grader, 5.0, None)  # room for what is slow where tests share the cores
        texts = ["fine", "raise", "exit", "segfault", "hang", "die", "allocate"]
        graded = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*texts)))
        assert [one.score.status for one in graded] == [
            "ok",
            "invalid",
            "invalid",
            "invalid",
            "timeout",
            "infra_error",
            "invalid",
        ]
        assert all(one.score.reason for one in graded[1:])
        await pool.close()
        assert (await executor.grade(samples_of("fine")[0])).score.status == "infra_error"

    run(test)


def test_samples_that_come_together_are_one_list() -> None:
    async def test() -> None:
        async with executor_of(grader_of("how_many_at_once")) as executor:
            first = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"abcde")))
            second = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"ab")))
            assert [one.score.value for one in (*first, *second)] == [5.0] * 5 + [2.0] * 2
            many = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"x" * 100)))
            assert max(one.score.value or 0.0 for one in many) == 32.0  # so that all processes have something to do

    run(test)


def test_one_sample_of_a_list_that_cannot_be_graded_costs_the_others_nothing() -> None:
    async def test() -> None:
        for name, status in (("raises_on_one_of_many", "invalid"), ("hangs_on_one_of_many", "timeout")):
            async with executor_of(grader_of(name), 0.5) as executor:
                graded = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"0123")))
                assert [one.score.status for one in graded] == ["ok", status, "ok", "ok"]

    run(test)


def test_a_wrong_number_of_scores_is_told_once_with_the_function_and_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with executor_of(grader_of("one_for_all")) as executor:
            for _ in range(2):
                graded = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"0123")))
                assert [one.score.value for one in graded] == [1.0] * 4  # of each alone

    run(test)
    (told,) = [record.getMessage() for record in caplog.records if "practicum.reward" in record.name]
    assert function("one_for_all") in told and "returned 1 scores for 4 samples" in told


def test_a_list_goes_on_until_nobody_waits_for_any_of_it() -> None:
    async def test() -> None:
        async with executor_of(grader_of("how_many_at_once")) as executor:
            one, two = (asyncio.create_task(executor.grade(sample)) for sample in samples_of("a", "b"))
            await asyncio.sleep(0)
            one.cancel()
            assert (await two).score.value == 2.0
            both = [asyncio.create_task(executor.grade(sample)) for sample in samples_of("a", "b")]
            for _ in range(3):
                await asyncio.sleep(0)
            for task in both:
                task.cancel()
            await asyncio.wait(both)

    run(test)


class FailsOn(IsolatedGrader):
    """Fails as the answer or the ground truth says."""

    def grade(self, sample: Sample) -> Score:
        what = f"{sample.text} {sample.prompt.answer}"
        if "hang" in what:
            time.sleep(60)
        if "crash" in what:
            os._exit(3)
        if "raise" in what:
            raise RecursionError
        if "die" in what:
            os.kill(os.getpid(), signal.SIGKILL)
        return Score(1.0)


@pytest.mark.parametrize(
    ("what", "status"), [("hang", "timeout"), ("crash", "invalid"), ("raise", "invalid"), ("die", "infra_error")]
)
def test_an_answer_on_which_a_grader_of_ours_fails_is_a_zero_unless_its_prompt_is_to_blame(
    what: str, status: str
) -> None:
    async def test() -> None:
        async with executor_of(FailsOn(), 0.5) as executor:
            assert (await executor.grade(samples_of(what)[0])).score == Score(0.0)
            assert (await executor.grade(samples_of("fine")[0])).score == Score(1.0)
            assert (await executor.grade(samples_of("fine", truth=what)[0])).score.status == status

    run(test)


def test_limits_hold_for_functions_and_a_lost_keeper_is_an_infra_error(tmp_path: Path) -> None:
    from tests.rewards import most_at_a_time

    async def test() -> None:
        grader = grader_of("records_overlap")
        pool = await pool_for(grader, size=6)
        file = tmp_path / "overlap"
        async with LimitKeeper(LimitsConfig(concurrency=2), "secret") as keeper:
            limits = await LimitClient.connect(keeper.address, "secret")
            executor = ProcessExecutor(pool, 0, grader, 5.0, limits)
            samples = samples_of(*"x" * 12, file=str(file))
            graded = await asyncio.gather(*(executor.grade(sample) for sample in samples))
            assert {one.score.status for one in graded} == {"ok"}
            assert graded[-1].waited_s > graded[0].waited_s
        assert most_at_a_time(file) == 2
        assert (await executor.grade(samples[0])).score.status == "infra_error"
        await pool.close()

    run(test)


def test_no_more_questions_are_out_than_the_window_holds_and_waiting_is_not_held_against_them() -> None:
    at_a_time = most = 0

    async def slowly(request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal at_a_time, most
        at_a_time += 1
        most = max(most, at_a_time)
        await asyncio.sleep(0.1)
        at_a_time -= 1
        return web.json_response(1.0)

    async def test() -> None:
        grader = Endpoint(urls=("http://grader",))
        client = RewardClient({grader.target: Target(service.url, window=3, timeout_s=0.5)})
        executor = HttpExecutor(grader, client, None)
        graded = await asyncio.gather(*(executor.grade(sample) for sample in samples_of(*"x" * 30)))
        assert [one.score.value for one in graded] == [1.0] * 30  # a second in all, half a second each
        assert graded[-1].waited_s > 0.5 > graded[-1].ran_s
        await client.close()

    with FakeService(slowly) as service:
        run(test)
    assert most == 3


def test_tokens_are_counted_as_the_server_says() -> None:
    async def test() -> None:
        grader = Endpoint(urls=("http://grader",))
        async with LimitKeeper(LimitsConfig(tokens_per_minute=20), "secret") as keeper:
            limits = await LimitClient.connect(keeper.address, "secret")
            client = RewardClient({grader.target: target(service.url)})
            executor = HttpExecutor(grader, client, limits)
            for sample in samples_of(*"x" * 6):  # five tokens each, of which the server uses one
                assert (await executor.grade(sample)).score.value == 1.0
            await client.close()
            limits.close()

    with FakeService({"score": 1, "usage": {"total_tokens": 1}}) as service:
        run(test)
