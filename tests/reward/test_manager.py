from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from practicum import Sample
from practicum.controller import Controller, GroupFuture, LocalWorkerGroup, RayClassWithInitArgs, open_controller
from practicum.controller.future import Gather, only
from practicum.errors import RewardError, WorkerDied
from practicum.reward import Progress, RewardLoopManager, RewardLoopWorker
from practicum.reward.desks import Graded
from practicum.reward.manager import GradingPolicy
from practicum.reward.worker import Handout, Stack
from practicum.types import Score
from tests.reward.halls import function, hall_settings, samples_of

WAIT_S = 20.0
Open = Callable[..., RewardLoopManager]


@pytest.fixture
def local() -> Iterator[Open]:
    """`local({"grader": "exact"}, retries=1)`: a manager with two workers in this process."""
    with ExitStack() as stack:

        def open_manager(
            config: dict[str, Any],
            timeout_s: float = 10.0,
            on_progress: Callable[[Progress], None] = lambda progress: None,
            side_by_side: bool = False,
            **policy: Any,
        ) -> RewardLoopManager:
            packed = RayClassWithInitArgs(RewardLoopWorker, hall_settings(config, timeout_s=timeout_s, num_processes=2))
            workers = stack.enter_context(LocalWorkerGroup(packed, name="graders", world_size=2))
            return RewardLoopManager(
                workers, GradingPolicy(**policy), side_by_side=side_by_side, on_progress=on_progress
            )

        yield open_manager


def statuses(scores: Sequence[Score]) -> list[str]:
    return [score.status for score in scores]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.005)


def test_scores_come_in_the_order_of_the_samples(local: Open) -> None:
    samples = samples_of("4", "5", " 4 ", "44", truth="4")
    batch = local({"grader": "exact"}, max_failure_share=0.0).grade(samples)
    assert [score.value for score in batch.scores] == [1.0, 0.0, 1.0, 0.0]
    lengths = [str(i % 7) * (1 + i * 37 % 50) for i in range(200)]
    batch = local({"function": function("length")}).grade(samples_of(*lengths))
    assert [score.value for score in batch.scores] == [float(len(text)) for text in lengths]
    assert batch.report.num_samples == 200 and batch.report.failures == {}


def test_the_value_of_a_sample_stands_at_its_last_token(local: Open) -> None:
    batch = local({"grader": "exact"}).grade(samples_of("4", "5", truth="4"))
    assert [row.tolist() for row in batch.token_rewards if row is not None] == [[0, 0, 1], [0, 0, 0]]
    assert all(row is not None and row.dtype == np.float32 for row in batch.token_rewards)


def test_no_samples_are_no_scores(local: Open) -> None:
    for config in ({"grader": "exact"}, {"function": function("length")}):
        assert local(config).grade([]).scores == []


def test_failures_within_the_allowed_share_stay_failures(local: Open) -> None:
    manager = local({"function": function("raises_on_one")}, max_failure_share=0.25)
    batch = manager.grade(samples_of("0", "1", "2", "3"))
    assert statuses(batch.scores) == ["ok", "invalid", "ok", "ok"]
    assert batch.kept == [True, False, True, True]
    assert batch.token_rewards[1] is None
    assert batch.report.failures == {"invalid": 1}


def test_too_many_failures_stop_the_run_with_the_first_reason(local: Open) -> None:
    manager = local({"function": function("raises_on_one")}, max_failure_share=0.2)
    with pytest.raises(RewardError, match=r"1 of 4 samples could not be graded \(1 invalid\).*no such thing"):
        manager.grade(samples_of("0", "1", "2", "3"))
    # The next round has nothing to do with it.
    assert statuses(manager.grade(samples_of("0", "2")).scores) == ["ok", "ok"]


def test_a_missing_ground_truth_is_invalid_not_wrong(local: Open) -> None:
    with pytest.raises(RewardError, match="ground truth"):
        local({"grader": "exact"}, max_failure_share=0.0).grade(samples_of("4"))


def test_a_function_that_always_hangs_does_not_take_its_time_for_every_sample(local: Open) -> None:
    manager = local({"function": function("always_hangs")}, timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"of 100 samples could not be graded \(\d+ timeout\)"):
        manager.grade(samples_of(*"x" * 100))
    assert time.monotonic() - start < 3 * 0.5 + 5  # of 100 the 11th is one too many, with four at a time
    manager = local({"function": function("will_not_be_cancelled")}, timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(RewardError):
        manager.grade(samples_of(*"1" * 500))  # all at once
    assert time.monotonic() - start < 6


def test_all_kinds_of_failure_have_their_status_and_the_rest_its_score(local: Open) -> None:
    expected = {"raise": "invalid", "exit": "invalid", "segfault": "invalid", "hang": "timeout", "die": "infra_error"}
    texts = ["fine"] * 195
    for position, text in zip((3, 50, 99, 120, 170), expected, strict=True):
        texts.insert(position, text)
    batch = local({"function": function("misbehaves")}, timeout_s=1.0).grade(samples_of(*texts))
    assert statuses(batch.scores) == [expected.get(text, "ok") for text in texts]
    assert batch.report.failures == {"invalid": 3, "timeout": 1, "infra_error": 1}


def test_timeouts_are_tried_again_and_what_is_the_samples_fault_is_not(local: Open, tmp_path: Path) -> None:
    (late,) = samples_of("x", file=str(tmp_path / "late"))
    manager = local({"function": function("hangs_the_first_time")}, timeout_s=0.7, retries=1)
    batch = manager.grade([late, *samples_of("y", file=str(tmp_path))])
    assert statuses(batch.scores) == ["ok", "ok"]
    assert batch.report.num_retried == 1 and batch.report.failures == {}

    manager = local({"function": function("misbehaves")}, timeout_s=0.3, retries=2, max_failure_share=1.0)
    batch = manager.grade(samples_of("hang", "raise", "fine"))
    assert statuses(batch.scores) == ["timeout", "invalid", "ok"]
    assert batch.report.num_retried == 2  # both of the one that hangs


def test_a_failure_may_cost_its_whole_group(local: Open) -> None:
    samples = samples_of("0", "1", "2", "3")
    config, groups = {"function": function("raises_on_one")}, [0, 0, 1, 1]
    masking = local(config, max_failure_share=0.5).grade(samples, groups)
    dropping = local(config, max_failure_share=0.5, on_failure="drop_group").grade(samples, groups)
    assert masking.kept == [True, False, True, True]
    assert dropping.kept == [False, False, True, True]
    assert statuses(dropping.scores) == ["ok", "invalid", "ok", "ok"]  # the scores are still there to be seen


def test_samples_are_graded_while_others_are_still_being_written(local: Open, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    file.touch()
    manager = local({"function": function("counts_calls")})
    with manager.round() as grading:
        time.sleep(0.3)  # the time before the first sample is not the graders'
        grading.add(samples_of("a", "bb", file=str(file)))
        wait_until(lambda: len(file.read_text().split()) == 2, "the first two were graded")
        grading.add(samples_of("ccc", file=str(file)))
        wait_until(lambda: len(file.read_text().split()) == 3, "the third was graded")
        grading.add([])
        start = time.monotonic()
        batch = grading.result()
        assert time.monotonic() - start < 0.3
    assert [score.value for score in batch.scores] == [1.0, 2.0, 3.0]


def test_adding_does_not_wait(local: Open) -> None:
    manager = local({"function": function("naps")})
    with manager.round() as grading:
        grading.add(samples_of("0", "0"))
        start = time.monotonic()
        grading.add(samples_of("0.5", "0.5"))
        assert time.monotonic() - start < 0.3
        assert statuses(grading.result().scores) == ["ok"] * 4


def test_a_round_left_by_an_exception_stops_what_it_began(local: Open) -> None:
    manager = local({"function": function("naps")})
    start = time.monotonic()
    with pytest.raises(KeyError), manager.round() as grading:
        grading.add(samples_of(*["60"] * 10))
        raise KeyError("somewhere else")
    assert statuses(manager.grade(samples_of("0")).scores) == ["ok"]
    assert time.monotonic() - start < 5


def test_progress_is_told_about_once_a_second(local: Open) -> None:
    told: list[Progress] = []
    manager = local({"function": function("naps")}, on_progress=told.append)
    manager.grade(samples_of(*["0.4"] * 64))  # four at a time: 6.4 s
    assert 1 <= len(told) <= 7
    assert all(progress.num_samples == 64 for progress in told)
    assert 0 < told[0].num_done < 64 and told[0].seconds >= 0.9
    assert [progress.num_done for progress in told] == sorted(progress.num_done for progress in told)


def test_the_report_tells_waiting_from_running(local: Open) -> None:
    report = local({"function": function("naps")}).grade(samples_of(*["0.1"] * 12)).report
    assert report.ran_s >= 0.1 and report.longest_wait_s > 0.1
    assert report.metrics()["time/graded_per_s"] == pytest.approx(12 / report.seconds)


class Mortal:
    """A group whose workers die when their turn comes, some times or always; the others grade everything with 1."""

    name, world_size = "graders", 2

    def __init__(self, num_deaths: float) -> None:
        self.num_deaths = num_deaths
        self.num_restarts = 0
        self.abandoned: list[int] = []
        self.seen: Counter[int] = Counter()

    def with_timeout(self, timeout_s: float) -> Mortal:
        return self

    def execute_rank_async(self, rank: int, method: Any, stack: Stack, wait_s: float) -> GroupFuture[Any]:
        self.seen.update(stack.places)
        graded = [(place, Graded(Score(1.0))) for place in stack.places]
        return GroupFuture([], lambda deadline: self._replies(graded), 0.0, cast(Gather, only))

    def execute_all(self, method: Any, number: int) -> None:
        assert method is RewardLoopWorker.abandon
        self.abandoned.append(number)

    def _replies(self, graded: list[tuple[int, Graded]]) -> list[Any]:
        if self.num_deaths > 0:
            self.num_deaths -= 1
            raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
        return [Handout(graded, 0)]

    def restart(self) -> None:
        self.num_restarts += 1


def test_workers_that_die_are_started_anew_and_their_samples_graded_again() -> None:
    group = Mortal(num_deaths=2)
    batch = RewardLoopManager(cast(Any, group)).grade(samples_of(*"abc"))
    assert statuses(batch.scores) == ["ok"] * 3
    assert group.num_restarts == batch.report.num_restarts == 2
    assert group.seen == {0: 3, 1: 3, 2: 3}


def test_workers_that_die_again_and_again_are_an_infra_error_not_a_hang() -> None:
    batch = RewardLoopManager(cast(Any, Mortal(num_deaths=3)), GradingPolicy(max_failure_share=1.0)).grade(
        samples_of(*"abc")
    )
    assert statuses(batch.scores) == ["infra_error"] * 3
    assert "ended 3 times in this round: rank 1 is gone" in batch.scores[0].reason
    with pytest.raises(RewardError, match="1 of 3 samples could not be graded"):
        RewardLoopManager(cast(Any, Mortal(num_deaths=3))).grade(samples_of(*"abc"))


class DiesOnce(Mortal):
    """What was sent to it before it was started anew is lost."""

    def execute_rank_async(self, rank: int, method: Any, stack: Stack, wait_s: float) -> GroupFuture[Any]:
        is_lost, graded = not self.num_restarts, [(place, Graded(Score(1.0))) for place in stack.places]

        def replies(deadline: float) -> list[Any]:
            if is_lost:
                raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
            return [Handout(graded, 0)]

        return GroupFuture([], replies, 0.0, cast(Gather, only))


def test_workers_that_die_under_two_rounds_are_started_anew_once() -> None:
    group = DiesOnce(0)
    manager = RewardLoopManager(cast(Any, group), side_by_side=True)
    with manager.round() as first, manager.round() as second:
        first.add(samples_of(*"ab"))
        second.add(samples_of(*"abc"))
        assert statuses(second.result().scores) == ["ok"] * 3
        assert statuses(first.result().scores) == ["ok"] * 2
    assert group.num_restarts == 1
    assert group.abandoned == [0]  # nothing of it is left with the new ones, whenever it was sent to them


class Busy(Mortal):
    """Workers who say that they are at it; started anew they know of nothing from before, and grade what comes then."""

    def execute_rank_async(self, rank: int, method: Any, *given: Any) -> GroupFuture[Any]:
        life = self.num_restarts

        def replies(deadline: float) -> list[Any]:
            if method is RewardLoopWorker.collect:
                return [Handout([], 0)]
            (stack, _) = given
            if life:
                return [Handout([(place, Graded(Score(1.0))) for place in stack.places], 0)]
            if stack.round == self.dies_of:
                raise WorkerDied("rank 1 is gone", group=self.name, ranks=[1])
            return [Handout([], len(stack.places))]

        return GroupFuture([], replies, 0.0, cast(Gather, only))

    dies_of = 1


def test_a_round_that_heard_of_no_death_grades_anew_what_another_one_has_lost_for_it() -> None:
    group = Busy(0)
    manager = RewardLoopManager(cast(Any, group), side_by_side=True)
    with manager.round() as first, manager.round() as second:
        first.add(samples_of(*"ab"))
        second.add(samples_of(*"abc"))
        first._take(first._unheard.pop(0).result())  # they are at it, and will not be heard of again
        assert statuses(second.result().scores) == ["ok"] * 3
        assert statuses(first.result().scores) == ["ok"] * 2
    assert group.num_restarts == 1


class Recording(Mortal):
    def __init__(self) -> None:
        super().__init__(0)
        self.stacks: list[Stack] = []

    def execute_rank_async(self, rank: int, method: Any, stack: Stack, wait_s: float) -> GroupFuture[Any]:
        self.stacks.append(stack)
        return super().execute_rank_async(rank, method, stack, wait_s)


def test_the_dearest_samples_are_spread_over_the_workers() -> None:
    group = Recording()
    manager = RewardLoopManager(cast(Any, group))
    long, short = samples_of("a", "b"), samples_of(*"c" * 20)
    object.__setattr__(long[0], "token_ids", np.zeros(4000, np.int32))
    object.__setattr__(long[1], "token_ids", np.zeros(4000, np.int32))
    manager.grade([*short[:5], *long, *short[5:]])
    assert sorted(len(stack.samples) for stack in group.stacks) == [11, 11]
    assert [len(stack.samples[0].token_ids) for stack in group.stacks] == [4000, 4000]  # one each, and first


def test_what_is_known_to_be_cheap_is_not_worth_a_call_to_everyone() -> None:
    group = Recording()
    manager = RewardLoopManager(cast(Any, group))
    for num_stacks in (2, 1):  # unknown, and then known to take no time
        group.stacks.clear()
        assert statuses(manager.grade(samples_of(*"a" * 64)).scores) == ["ok"] * 64
        assert len(group.stacks) == num_stacks


def test_answers_to_one_prompt_stay_side_by_side() -> None:
    group = Recording()
    samples = [sample for sample in samples_of(*"abcdefghijklmnop") for _ in range(4)]
    RewardLoopManager(cast(Any, group)).grade(samples)
    assert [len(stack.samples) for stack in group.stacks] == [32, 32]
    for stack in group.stacks:
        ids = [sample.prompt.id for sample in stack.samples]
        assert all(ids.count(one) == 4 and ids[ids.index(one) :][:4] == [one] * 4 for one in ids)


def test_rounds_that_are_open_at_once_have_each_their_own_scores(local: Open) -> None:
    manager = local({"function": function("naps")}, side_by_side=True)
    with manager.round() as first, manager.round() as second:
        first.add(samples_of("0.3", "0.3"))
        second.add(samples_of("0", "0", "0"))
        assert statuses(second.result().scores) == ["ok"] * 3
        assert statuses(first.result().scores) == ["ok"] * 2
        with pytest.raises(ValueError), manager.round() as third:
            third.add(samples_of("60"))
            raise ValueError("out of here")
        first.add(samples_of("0.1"))
        assert statuses(first.result().scores) == ["ok"] * 3


def test_open_rounds_can_be_broken_off_from_another_thread(local: Open) -> None:
    manager = local({"function": function("naps")}, side_by_side=True)
    with manager.round() as grading:
        grading.add(samples_of("60"))
        timer = threading.Timer(0.2, manager.break_off)
        timer.start()
        start = time.monotonic()
        with pytest.raises(RewardError, match="broken off"):
            grading.result()
    assert time.monotonic() - start < WAIT_S


# On Ray


@pytest.fixture(scope="module")
def two_processes(ray_session: None) -> Iterator[Controller]:
    with open_controller("ray", num_workers=2, use_gpu=False, max_colocate_count=2) as controller:
        yield controller


def fork_servers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "practicum.processes.server" in child.cmdline()]


def test_a_worker_killed_in_the_middle_costs_no_score(two_processes: Controller, tmp_path: Path) -> None:
    settings = hall_settings({"function": function("kills_its_worker_the_first_time")})
    with two_processes.group(RayClassWithInitArgs(RewardLoopWorker, settings), name="mortal graders") as group:
        servers = fork_servers()
        assert len(servers) >= 2
        manager = RewardLoopManager(group, GradingPolicy(max_failure_share=0.0))
        samples: list[Sample] = samples_of(*map(str, range(40)), file=str(tmp_path / "once"))
        batch = manager.grade(samples)
        assert [score.value for score in batch.scores] == [float(i) for i in range(40)]
        assert batch.report.num_restarts == 1
        again = manager.grade(samples)
        assert (again.scores, again.report.num_restarts) == (batch.scores, 0)
        assert not psutil.wait_procs(servers, timeout=10)[1]  # those of the group started anew are others
