from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum import Sample
from practicum.controller import Controller, LocalWorkerGroup, RayClassWithInitArgs, open_controller
from practicum.controller.loop import run_sync
from practicum.errors import DeadlineError, RewardError, WorkerDied
from practicum.reward import RewardLoopManager, RewardLoopWorker
from practicum.reward.executors import Graded
from practicum.reward.report import GradingReport, Progress
from practicum.reward.worker import Finished
from practicum.types import PromptGroup, Score
from tests.reward.builders import function, groups_for, groups_of, reward_settings, samples_of, scores_of
from tests.reward.fakes import run
from tests.samples import make_sample

WAIT_S = 20.0


@asynccontextmanager
async def open_manager(
    config: dict[str, Any],
    timeout_s: float = 10.0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    **settings: Any,
) -> AsyncIterator[RewardLoopManager]:
    """Two workers in this process."""
    packed = RayClassWithInitArgs(RewardLoopWorker, reward_settings(config, timeout_s=timeout_s, num_processes=2))
    workers = LocalWorkerGroup(packed, name="graders", world_size=2)
    try:
        manager = RewardLoopManager(workers, **settings, on_progress=on_progress)
        await manager.start()
        yield manager
    finally:
        await asyncio.to_thread(workers.shutdown)


def grade(config: dict[str, Any], groups: Sequence[PromptGroup], **settings: Any) -> tuple[list[Score], GradingReport]:
    found: list[GradingReport] = []

    async def test() -> None:
        async with open_manager(config, **settings) as manager:
            found.append(await manager.grade(groups))

    run(test)
    return scores_of(groups), found[0]


def values(scores: Sequence[Score]) -> list[float | None]:
    return [score.value for score in scores]


def statuses(scores: Sequence[Score]) -> list[str]:
    return [score.status for score in scores]


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.005)


def test_every_trajectory_has_its_own_score() -> None:
    groups = groups_for("4", "5", " 4 ", "44", truth="4", per_group=2)
    scores, _ = grade({"grader": "exact"}, groups, max_failure_share=0.0)
    assert values(scores) == [1.0, 0.0, 1.0, 0.0]
    lengths = [str(i % 7) * (1 + i * 37 % 50) for i in range(200)]
    scores, report = grade({"function": function("length")}, groups_for(*lengths))
    assert values(scores) == [float(len(text)) for text in lengths]
    assert report.num_samples == 200 and report.failures == {}


def test_no_samples_are_no_scores() -> None:
    for config in ({"grader": "exact"}, {"function": function("length")}):
        assert grade(config, [])[1].num_samples == 0


def test_the_last_context_of_a_trajectory_is_graded() -> None:
    (group,) = groups_for("4", truth="4")
    group.trajectories[0].samples.insert(0, samples_of("5", truth="4")[0])
    assert values(grade({"grader": "exact"}, [group])[0]) == [1.0]


def test_failures_within_the_allowed_share_stay_failures() -> None:
    config = {"function": function("raises_on_one")}
    scores, report = grade(config, groups_for("0", "1", "2", "3"), max_failure_share=0.25)
    assert statuses(scores) == ["ok", "invalid", "ok", "ok"]
    assert report.failures == {"invalid": 1}


def test_a_conversation_whose_tools_failed_is_not_graded_and_counts_as_a_failure() -> None:
    groups = groups_for("4", "4", truth="4")
    failed = groups[0].trajectories[0]
    failed.samples[0] = replace(failed.last, finish_reason="error")
    failed.score = Score.failed("infra_error", "World.step raised OSError: gone")
    scores, report = grade({"grader": "exact"}, groups, max_failure_share=0.5, retries=3)
    assert values(scores) == [None, 1.0] and scores[0] is failed.score
    assert report.failures == {"infra_error": 1} and report.num_retried == 0
    with pytest.raises(RewardError, match=r"1 of 2 .*\(1 infra_error\).*The first: World.step raised OSError: gone"):
        grade({"grader": "exact"}, groups, max_failure_share=0.1)


def test_too_many_failures_stop_the_run_with_the_first_reason() -> None:
    async def test() -> None:
        async with open_manager({"function": function("raises_on_one")}, max_failure_share=0.2) as manager:
            with pytest.raises(RewardError, match=r"1 of 4 samples could not be graded \(1 invalid\).*no such thing"):
                await manager.grade(groups_for("0", "1", "2", "3"))
            # The next round has nothing to do with it.
            groups = groups_for("0", "2")
            await manager.grade(groups)
            assert statuses(scores_of(groups)) == ["ok", "ok"]

    run(test)


def test_a_share_that_fails_first_is_judged_when_all_are_there() -> None:
    async def test() -> None:
        config = {"function": function("raises_on_one")}
        async with open_manager(config, max_failure_share=0.3) as manager, manager.round() as grading:
            (failing,) = groups_for("1")
            grading.add([failing])
            await until(lambda: failing.trajectories[0].score is not None, "the first was graded")
            grading.add(groups_for("0", "2", "3"))
            assert (await grading.result()).failures == {"invalid": 1}

    run(test)


def test_a_missing_ground_truth_is_invalid_not_wrong() -> None:
    with pytest.raises(RewardError, match="ground truth"):
        grade({"grader": "exact"}, groups_for("4"), max_failure_share=0.0)


def test_a_function_that_always_hangs_does_not_take_its_time_for_every_sample() -> None:
    # Of 100 the 11th is one too many, with four at a time; of 600 the 61st, with 256 at a time.
    for name, text, num_samples, most in (("always_hangs", "x", 100, 30), ("will_not_be_cancelled", "1", 600, 400)):
        told = rf"(\d+) of {num_samples} samples could not be graded \(\1 timeout\)"
        with pytest.raises(RewardError, match=told) as caught:
            grade({"function": function(name)}, groups_for(*text * num_samples), timeout_s=0.5)
        assert int(str(caught.value).split()[0]) <= most


def test_all_kinds_of_failure_have_their_status_and_the_rest_its_score() -> None:
    expected = {"raise": "invalid", "exit": "invalid", "segfault": "invalid", "hang": "timeout", "die": "infra_error"}
    texts = ["fine"] * 195
    for position, text in zip((3, 50, 99, 120, 170), expected, strict=True):
        texts.insert(position, text)
    scores, report = grade({"function": function("misbehaves")}, groups_for(*texts), timeout_s=1.0)
    assert statuses(scores) == [expected.get(text, "ok") for text in texts]
    assert report.failures == {"invalid": 3, "timeout": 1, "infra_error": 1}


def test_timeouts_are_tried_again_and_what_is_the_samples_fault_is_not(tmp_path: Path) -> None:
    groups = [*groups_for("x", file=str(tmp_path / "late")), *groups_for("y", file=str(tmp_path))]
    scores, report = grade({"function": function("hangs_the_first_time")}, groups, timeout_s=0.7, retries=1)
    assert statuses(scores) == ["ok", "ok"]
    assert report.num_retried == 1 and report.failures == {}
    groups = groups_for("hang", "raise", "fine")
    config = {"function": function("misbehaves")}
    scores, report = grade(config, groups, timeout_s=0.3, retries=2, max_failure_share=1.0)
    assert statuses(scores) == ["timeout", "invalid", "ok"]
    assert report.num_retried == 2  # both of the one that hangs


def test_answers_are_graded_while_others_are_still_being_written(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    file.touch()

    async def test() -> None:
        async with open_manager({"function": function("counts_calls")}) as manager, manager.round() as grading:
            groups = groups_for("a", "bb", "ccc", file=str(file))
            grading.add(groups[:2])
            await until(lambda: len(file.read_text().split()) == 2, "the first two were graded")
            grading.add(groups[2:])
            await until(lambda: len(file.read_text().split()) == 3, "the third was graded")
            grading.add([])
            await grading.result()
            assert values(scores_of(groups)) == [1.0, 2.0, 3.0]

    run(test)


def test_the_time_before_the_first_sample_is_not_the_graders() -> None:
    async def test() -> None:
        async with open_manager({"grader": "exact"}) as manager, manager.round() as grading:
            await asyncio.sleep(0.5)
            grading.add(groups_for("4", truth="4"))
            assert (await grading.result()).seconds < 0.5

    run(test)


def test_a_round_left_by_an_exception_stops_what_it_began() -> None:
    async def test() -> None:
        async with open_manager({"function": function("naps")}) as manager:
            with pytest.raises(KeyError):
                async with manager.round() as grading:
                    grading.add(groups_for(*["60"] * 10))
                    await asyncio.sleep(0.1)
                    raise KeyError("somewhere else")
            assert (await manager.grade(groups_for("0"))).failures == {}

    run(test)


def test_a_round_that_is_cancelled_ends_at_once() -> None:
    async def test() -> None:
        async with open_manager({"function": function("naps")}) as manager:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await manager.grade(groups_for("60"))

    run(test)


def test_progress_is_told_about_once_a_second() -> None:
    told: list[Progress] = []
    groups = groups_for(*["0.2"] * 48)  # four at a time: 2.4 s
    grade({"function": function("naps")}, groups, on_progress=told.append)
    assert 1 <= len(told) <= 8
    assert all(progress.num_samples == 48 for progress in told)
    assert 0 < told[0].num_done < 48 and told[0].seconds >= 0.9
    assert [progress.num_done for progress in told] == sorted(progress.num_done for progress in told)


def test_the_report_tells_waiting_from_running() -> None:
    _, report = grade({"function": function("naps")}, groups_for(*["0.1"] * 12))
    assert report.ran_s >= 0.1 and report.longest_wait_s > 0.1
    assert report.metrics()["time/graded_per_s"] == pytest.approx(12 / report.seconds)


def test_rounds_that_are_open_at_once_have_each_their_own_scores() -> None:
    async def test() -> None:
        async with (
            open_manager({"function": function("naps")}) as manager,
            manager.round() as first,
            manager.round() as second,
        ):
            first.add(groups_for("0.3", "0.3"))
            second.add(groups_for("0", "0", "0"))
            assert (await second.result()).num_samples == 3
            assert (await first.result()).num_samples == 2
            with pytest.raises(ValueError, match="out of here"):
                async with manager.round() as third:
                    third.add(groups_for("60"))
                    raise ValueError("out of here")
            first.add(groups_for("0.1"))
            assert (await first.result()).num_samples == 3

    run(test)


class FakeGroup:
    """Two workers that grade everything with 1, a list at a time, and write down what they were called with."""

    name, world_size = "graders", 2

    def __init__(self) -> None:
        self.lists: list[list[Sample]] = []
        self.num_restarts = 0

    def with_timeout(self, timeout_s: float) -> FakeGroup:
        return self

    def stream(self, rank: int, method: Any, samples: list[Sample]) -> AsyncIterator[Finished]:
        assert method is RewardLoopWorker.grade
        self.lists.append(samples)
        return self.graded(len(self.lists) - 1, samples)

    async def graded(self, call: int, samples: list[Sample]) -> AsyncIterator[Finished]:
        await asyncio.sleep(0)
        yield [(index, Graded(Score(1.0), ran_s=1e-3)) for index in range(len(samples))]

    def restart(self) -> None:
        self.num_restarts += 1


def manager_of(group: FakeGroup, **settings: Any) -> RewardLoopManager:
    return RewardLoopManager(cast(Any, group), **settings)


class Mortal(FakeGroup):
    """Workers that die when their turn comes, so many times; `half` of their list is graded by then."""

    def __init__(self, num_deaths: float, half: bool = False) -> None:
        super().__init__()
        self.num_deaths = num_deaths
        self.half = half

    async def graded(self, call: int, samples: list[Sample]) -> AsyncIterator[Finished]:
        await asyncio.sleep(0)
        if self.num_deaths > 0:
            self.num_deaths -= 1
            if self.half:
                yield [(index, Graded(Score(1.0))) for index in range(0, len(samples), 2)]
            raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
        yield [(index, Graded(Score(1.0))) for index in range(len(samples))]


@pytest.mark.parametrize("half", [False, True])
def test_workers_that_die_are_started_anew_and_what_they_had_is_graded_again(half: bool) -> None:
    async def test() -> None:
        group, groups = Mortal(num_deaths=2, half=half), groups_for(*"abcdefgh", per_group=8)
        report = await manager_of(group).grade(groups)
        assert statuses(scores_of(groups)) == ["ok"] * 8
        assert group.num_restarts == report.num_restarts
        assert 1 <= report.num_restarts <= 2

    run(test)


def test_workers_that_die_again_and_again_are_an_infra_error_not_a_hang() -> None:
    async def test() -> None:
        groups, group = groups_for(*"abc"), Mortal(num_deaths=9)
        await manager_of(group, max_failure_share=1.0).grade(groups)
        assert statuses(scores_of(groups)) == ["infra_error"] * 3
        assert "ended 3 times in this round: rank 1 is gone" in scores_of(groups)[0].reason
        assert group.num_restarts == 2
        with pytest.raises(RewardError, match="of 3 samples could not be graded"):
            await manager_of(Mortal(num_deaths=9)).grade(groups_for(*"abc"))

    run(test)


class DiesUnderAll(FakeGroup):
    """Workers that hold what they are given until somebody `dies`; all they held before a restart is lost with it."""

    def __init__(self) -> None:
        super().__init__()
        self.dies = asyncio.Event()

    async def graded(self, call: int, samples: list[Sample]) -> AsyncIterator[Finished]:
        if not self.num_restarts:
            yield []
            await self.dies.wait()
            raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
        yield [(index, Graded(Score(1.0))) for index in range(len(samples))]


def test_workers_that_die_under_two_rounds_are_started_anew_once() -> None:
    async def test() -> None:
        group = DiesUnderAll()
        manager = manager_of(group)
        async with manager.round() as first, manager.round() as second:
            first.add(groups_for(*"ab"))
            second.add(groups_for(*"abc"))
            await until(lambda: len(group.lists) >= 2, "both have begun")
            group.dies.set()
            reports = await asyncio.gather(first.result(), second.result())
            assert [report.num_restarts for report in reports] == [1, 1]
            assert [report.num_samples for report in reports] == [2, 3]
        assert group.num_restarts == 1

    run(test)


class CannotRestart(Mortal):
    def restart(self) -> None:
        super().restart()
        raise RewardError("there is no room")


def test_workers_that_cannot_be_started_anew_end_the_round() -> None:
    async def test() -> None:
        with pytest.raises(RewardError, match="there is no room"):
            await manager_of(CannotRestart(1)).grade(groups_for(*"abc"))

    run(test)


def test_what_cannot_be_graded_is_told_while_answers_are_still_being_written() -> None:
    async def test() -> None:
        group = CannotRestart(1)
        async with manager_of(group).round() as grading:
            grading.add(groups_for(*"abc"))
            await until(lambda: group.num_restarts == 1, "the restart failed")
            with pytest.raises(RewardError, match="there is no room"):
                while True:  # until the round has heard of it
                    await asyncio.sleep(0)
                    grading.add(groups_for("d"))

    run(test)


class CannotBeCancelled(FakeGroup):
    """Workers whose call, cancelled, ends with something else, or not before it is `let_go`."""

    def __init__(self, let_go: asyncio.Event | None = None) -> None:
        super().__init__()
        self.let_go = let_go

    async def graded(self, call: int, samples: list[Sample]) -> AsyncIterator[Finished]:
        yield []
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            if self.let_go is not None:
                await self.let_go.wait()
            raise DeadlineError("the end of grade, cancelled, passed its deadline", group=self.name, ranks=[0])


def test_a_round_that_was_left_begins_nothing_anew() -> None:
    async def test() -> None:
        group, tasks = CannotBeCancelled(), asyncio.all_tasks()
        async with manager_of(group).round() as grading:
            grading.add(groups_for("a"))
            await until(lambda: bool(group.lists), "a worker has begun")
        assert asyncio.all_tasks() == tasks
        assert (len(group.lists), group.num_restarts) == (1, 0)

    run(test)


def test_leaving_a_round_has_a_deadline_and_names_who_is_late(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        group, tasks = CannotBeCancelled(let_go=asyncio.Event()), asyncio.all_tasks()
        with pytest.raises(KeyError):
            async with manager_of(group, close_s=0.1).round() as grading:
                grading.add(groups_for("a"))
                await until(lambda: bool(group.lists), "a worker has begun")
                raise KeyError("somewhere else")
        assert "grading by reward worker 0 has not ended 0.1 s after it was cancelled" in caplog.text
        assert group.let_go is not None
        group.let_go.set()
        await until(lambda: asyncio.all_tasks() == tasks, "the call has ended after all")
        assert (len(group.lists), group.num_restarts) == (1, 0)

    run(test)


def test_the_dearest_samples_are_spread_over_the_workers() -> None:
    async def test() -> None:
        group = FakeGroup()
        long = [
            replace(
                sample,
                token_ids=np.zeros(4000, np.int32),
                log_probs=np.zeros(4000, np.float32),
                loss_mask=np.ones(4000, np.bool_),
                versions=np.zeros(4000, np.int32),
            )
            for sample in samples_of("a", "b")
        ]
        short = samples_of(*"c" * 20)
        await manager_of(group).grade(groups_of([*short[:5], *long, *short[5:]]))
        assert sorted(len(samples) for samples in group.lists) == [11, 11]
        assert [len(samples[0].token_ids) for samples in group.lists] == [4000, 4000]  # one each, and first

    run(test)


def test_groups_that_come_close_together_go_in_one_call_to_each_worker() -> None:
    async def test() -> None:
        group = FakeGroup()
        async with manager_of(group).round() as grading:
            for one in groups_for(*"a" * 64, per_group=8):
                grading.add([one])
            await grading.result()
        assert [len(samples) for samples in group.lists] == [32, 32]

    run(test)


def test_what_is_known_to_be_cheap_is_not_worth_a_call_to_everyone() -> None:
    async def test() -> None:
        group = FakeGroup()
        manager = manager_of(group)
        await manager.grade(groups_for("a"))
        for _ in range(400):
            manager.learn_cost(samples_of("a")[0], 1e-5)
        group.lists.clear()
        await manager.grade(groups_for(*"a" * 64))
        assert [len(samples) for samples in group.lists] == [64]

    run(test)


def test_what_costs_less_to_grade_than_to_send_is_graded_here() -> None:
    async def test() -> None:
        group, rubric = FakeGroup(), reward_settings({"grader": "exact"}).rubric
        manager = RewardLoopManager(cast(Any, group), inline=rubric)
        groups = groups_for("4", "5", truth="4")
        await manager.grade(groups)  # nothing is known of it yet
        assert group.lists and values(scores_of(groups)) == [1.0, 1.0]
        for _ in range(400):
            manager.learn_cost(samples_of("4")[0], 1e-6)
        group.lists.clear()
        await manager.grade(groups)
        assert not group.lists and values(scores_of(groups)) == [1.0, 0.0]

    run(test)


def test_answers_to_one_prompt_stay_side_by_side() -> None:
    async def test() -> None:
        group = FakeGroup()
        samples = [sample for sample in samples_of(*"abcdefghijklmnop") for _ in range(4)]
        await manager_of(group).grade(groups_of(samples, per_group=4))
        assert [len(samples) for samples in group.lists] == [32, 32]
        for samples in group.lists:
            ids = [sample.prompt.id for sample in samples]
            assert all(ids.count(one) == 4 and ids[ids.index(one) :][:4] == [one] * 4 for one in ids)

    run(test)


def test_routes_are_not_sent_to_graders() -> None:
    async def test() -> None:
        group = FakeGroup()
        (sample,) = samples_of("a")
        sample = replace(sample, routes=cast(Any, range(sample.num_tokens)))
        await manager_of(group).grade(groups_of([sample]))
        assert group.lists[0][0].routes is None and sample.routes is not None

    run(test)


class Chaotic(FakeGroup):
    """Workers that give their scores bit by bit, fail now and then, and die now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.seen = Counter[str]()

    async def graded(self, call: int, samples: list[Sample]) -> AsyncIterator[Finished]:
        left = list(range(len(samples)))
        self.chance.shuffle(left)
        while left:
            await asyncio.sleep(0)
            if self.chance.random() < 0.05:
                raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
            part, left = left[:3], left[3:]
            finished = []
            for index in part:
                text = samples[index].text
                self.seen[text] += 1
                fails = self.chance.random() < 0.1
                score = Score.failed("timeout", "late") if fails else Score(float(len(text)))
                finished.append((index, Graded(score)))
            yield finished


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 9), max_size=12))
def test_whatever_happens_every_trajectory_is_settled_once_and_with_its_own_score(seed: int, sizes: list[int]) -> None:
    async def test() -> None:
        group = Chaotic(seed)
        manager = manager_of(group, retries=1, max_failure_share=1.0)
        groups = [groups_for(*["x" * (n + k) for k in range(n)], per_group=n)[0] for n in sizes]
        async with manager.round() as grading:
            for one in groups:
                grading.add([one])
                if group.chance.random() < 0.5:
                    await asyncio.sleep(0)
            report = await grading.result()
        trajectories = [trajectory for one in groups for trajectory in one.trajectories]
        assert report.num_samples == len(trajectories)
        for trajectory in trajectories:
            assert trajectory.score is not None
            assert trajectory.score.status != "ok" or trajectory.score.value == len(trajectory.last.text)
        failed = Counter(t.score.status for t in trajectories if t.score is not None and t.score.status != "ok")
        assert report.failures == dict(failed)
        assert max(manager.load, default=0.0) == pytest.approx(0.0, abs=1e-9)

    run(test)


def sample_of(answer: int, source: str = "") -> Sample:
    made = make_sample(answer=answer)
    return replace(made, prompt=replace(made.prompt, data_source=source))


def test_longer_answers_of_a_source_are_expected_to_cost_more() -> None:
    manager = manager_of(FakeGroup())
    assert 0 < manager.expected_s(sample_of(1)) < manager.expected_s(sample_of(100))
    manager.learn_cost(sample_of(100, "code"), 2.0)
    assert manager.expected_s(sample_of(100, "code")) == 2.0
    assert manager.expected_s(sample_of(1, "code")) < manager.expected_s(sample_of(9, "code")) < 2.0


# On Ray


@pytest.fixture(scope="module")
def two_processes(ray_session: None) -> Iterator[Controller]:
    with open_controller("ray", num_workers=2, use_gpu=False, max_colocate_count=2) as controller:
        yield controller


def fork_servers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "practicum.processes.server" in child.cmdline()]


def test_a_worker_killed_in_the_middle_costs_no_score(two_processes: Controller, tmp_path: Path) -> None:
    worker_settings = reward_settings({"function": function("kills_its_worker_the_first_time")})
    packed = RayClassWithInitArgs(RewardLoopWorker, worker_settings)

    async def test(workers: Any) -> None:
        manager = RewardLoopManager(workers, max_failure_share=0.0)
        await manager.start()
        servers = fork_servers()
        assert len(servers) >= 2
        for num_restarts in (1, 0):
            groups = groups_for(*map(str, range(40)), file=str(tmp_path / "once"))
            report = await manager.grade(groups)
            assert values(scores_of(groups)) == [float(i) for i in range(40)]
            assert report.num_restarts == num_restarts
        assert not psutil.wait_procs(servers, timeout=10)[1]  # those of the group started anew are others

    with run_sync(two_processes.group(packed, name="mortal graders")) as group:
        run(lambda: test(group))


def test_a_round_that_is_left_stops_what_workers_on_ray_began(two_processes: Controller, tmp_path: Path) -> None:
    packed = RayClassWithInitArgs(RewardLoopWorker, reward_settings({"function": function("counts_calls_and_naps")}))
    file = tmp_path / "calls"
    file.touch()

    async def test(workers: Any) -> None:
        manager = RewardLoopManager(workers)
        with pytest.raises(KeyError):
            async with manager.round() as grading:
                grading.add(groups_for(*["60"] * 12, file=str(file)))
                await until(lambda: len(file.read_text().split()) == 4, "all processes have begun")
                raise KeyError("somewhere else")
        groups = groups_for("0", "0", file=str(file))
        await manager.grade(groups)
        assert values(scores_of(groups)) == [1.0, 1.0]
        assert len(file.read_text().split()) == 6

    with run_sync(two_processes.group(packed, name="graders that are left")) as group:
        run(lambda: test(group))
