from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from practicum import Sample
from practicum.errors import RewardError
from practicum.reward.desks import Graded
from practicum.reward.graders.base import Rule
from practicum.reward.hall import HallSettings
from practicum.reward.rubric import Rubric, Term
from practicum.reward.worker import Handout, RewardLoopWorker, Stack
from practicum.types import Score
from tests.reward.halls import function, hall_settings, samples_of

DEADLINE_S = 20.0


@pytest.fixture
def workers() -> Iterator[list[RewardLoopWorker]]:
    made: list[RewardLoopWorker] = []
    yield made
    for worker in made:
        worker.close()


def worker_for(workers: list[RewardLoopWorker], config: dict[str, Any], **settings: Any) -> RewardLoopWorker:
    workers.append(RewardLoopWorker(hall_settings(config, **settings)))
    return workers[-1]


def stack(*texts: str, number: int = 0, first: int = 0, **kwargs: Any) -> Stack:
    return Stack(number, range(first, first + len(texts)), samples_of(*texts, **kwargs))


def values(handout: Handout) -> dict[int, float | None]:
    return {place: graded.score.value for place, graded in handout.graded}


def test_rules_are_graded_at_once_and_without_processes(workers: list[RewardLoopWorker]) -> None:
    before = psutil.Process().children()
    worker = worker_for(workers, {"grader": "exact"})
    handout = worker.grade(stack("4", "5", truth="4"), 0.0)
    assert (values(handout), handout.num_left) == ({0: 1.0, 1: 0.0}, 0)
    assert psutil.Process().children() == before
    assert worker.collect(0, 0.0).graded == []


def test_scores_are_handed_out_once_as_they_come(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("naps")})
    assert worker.grade(stack(*["0.02"] * 3), 0.0).num_left == 3
    assert worker.grade(stack(*["0.02"] * 100, first=3), 0.0).num_left > 0
    seen: dict[int, float | None] = {}
    deadline = time.monotonic() + DEADLINE_S
    num_left, num_turns = 1, 0
    while num_left:
        assert time.monotonic() < deadline
        handout = worker.collect(0, 0.1)
        assert not seen.keys() & values(handout).keys()
        seen |= values(handout)
        num_left = handout.num_left
        num_turns += 1
    assert seen == dict.fromkeys(range(103), 1.0)
    assert num_turns > 2


def test_collecting_waits_no_longer_than_it_must(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("naps")})
    start = time.monotonic()
    assert len(worker.grade(stack("0", "0"), 10.0).graded) == 2
    assert worker.grade(stack("5", first=2), 0.2).graded == []
    assert time.monotonic() - start < 3


def test_an_abandoned_round_is_forgotten_and_stops_at_once(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("naps")})
    worker.grade(stack("0.01", *["60"] * 5), 0.0)
    start = time.monotonic()
    worker.abandon(0)
    assert worker.collect(0, 0.0) == Handout([], 0)
    assert values(worker.grade(stack("0", number=1), 5.0)) == {0: 1.0}
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("config", [{"function": function("naps")}, {"grader": "exact"}])
def test_rounds_that_are_open_at_once_are_kept_apart(workers: list[RewardLoopWorker], config: dict[str, Any]) -> None:
    worker = worker_for(workers, config)
    truth = {"truth": "0"}
    first = worker.grade(stack("0", "0.2", **truth), 0.0)
    second = worker.grade(stack("0", "0", "0", number=1, **truth), 10.0)  # the same places
    assert (sorted(values(second)), second.num_left) == ([0, 1, 2], 0)
    rest = worker.collect(0, 10.0)
    assert sorted([*values(first), *values(rest)]) == [0, 1]
    assert worker.collect(1, 0.0) == worker.collect(0, 0.0) == Handout([], 0)


def test_a_round_that_is_abandoned_leaves_the_others_alone(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("naps")})
    worker.grade(stack(*["60"] * 3), 0.0)
    worker.grade(stack("0.2", "0.3", number=1), 0.0)
    worker.abandon(0)
    assert worker.collect(0, 0.0) == Handout([], 0)
    assert values(worker.collect(1, 10.0)) == {0: 1.0, 1: 1.0}


def test_far_more_samples_than_are_under_way_at_a_time_are_all_graded(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("naps"), "processes": 2})
    handout = worker.grade(stack(*["0"] * 700), 30.0)
    seen = values(handout)
    while handout.num_left:
        handout = worker.collect(0, 30.0)
        seen |= values(handout)
    assert seen == dict.fromkeys(range(700), 1.0)
    worker.grade(stack(*["60"] * 700, number=1), 0.0)
    worker.abandon(1)  # those that had not begun too
    assert values(worker.grade(stack("0", number=2), 5.0)) == {0: 1.0}


def test_a_function_of_a_list_sees_many_at_once(workers: list[RewardLoopWorker]) -> None:
    worker = worker_for(workers, {"function": function("how_many_at_once")})
    assert set(values(worker.grade(stack(*"x" * 20), 10.0)).values()) == {20.0}


def test_a_failure_of_the_worker_itself_leaves_nobody_waiting(workers: list[RewardLoopWorker], tmp_path: Path) -> None:
    worker = worker_for(workers, {"function": function("length")}, cache_folder=str(tmp_path / "cache"))
    mine = stack("a")
    object.__setattr__(mine.samples[0].prompt, "metadata", {1: "keys that", "cannot be": "sorted"})
    ((_, graded),) = worker.grade(mine, 10.0).graded
    assert graded.score.status == "infra_error" and "the reward worker failed" in graded.score.reason


def test_what_cannot_start_says_so_and_leaves_neither_process_nor_thread(tmp_path: Path) -> None:
    children, threads = set(psutil.Process().children()), threading.active_count()
    with pytest.raises(RewardError, match="does not answer"):
        RewardLoopWorker(hall_settings({"function": function("length")}, limits_at=("127.0.0.1", 1)))
    assert set(psutil.Process().children()) <= children
    assert threading.active_count() <= threads


def test_closing_ends_its_processes_also_in_the_middle(workers: list[RewardLoopWorker]) -> None:
    before = set(psutil.Process().children(recursive=True))
    worker = worker_for(workers, {"function": function("naps")})
    worker.grade(stack(*["60"] * 4), 0.0)
    started = set(psutil.Process().children(recursive=True)) - before
    worker.close()
    worker.close()
    assert started and not psutil.wait_procs(started, timeout=10)[1]


class Slow(Rule):
    def grade(self, sample: Sample) -> Score:
        time.sleep(0.3)
        return Score(1.0)


def test_slow_rules_do_not_keep_whoever_asks_waiting(workers: list[RewardLoopWorker]) -> None:
    workers.append(RewardLoopWorker(HallSettings(Rubric((Term("slow", 1.0, Slow()),), {}), timeout_s=1.0)))
    first = workers[0].grade(stack(*"abcdef"), 0.0)
    assert first.graded and first.num_left == 6 - len(first.graded) > 0
    second = workers[0].collect(0, 5.0)
    assert values(first) | values(second) == dict.fromkeys(range(6), 1.0)
    workers[0].grade(stack(*"abcdef", number=1), 0.0)
    workers[0].abandon(1)
    assert workers[0].collect(1, 0.0) == Handout([], 0)


def test_a_handout_travels_whole() -> None:
    graded = [(3, Graded(Score(0.5, {"a": 1.0}), 0.1, 0.2, 1)), (1, Graded(Score.failed("timeout", "late")))]
    assert pickle.loads(pickle.dumps(Handout(graded, 7))) == Handout(graded, 7)


@pytest.mark.parametrize("num_samples", [2, 300])
def test_a_stack_travels_whole(num_samples: int) -> None:
    sent = stack(*map(str, range(num_samples)), truth="4", number=3, first=5)
    came = pickle.loads(pickle.dumps(sent))
    assert (came.round, list(came.places)) == (3, list(range(5, 5 + num_samples)))
    for one, other in zip(sent.samples, came.samples, strict=True):
        assert (one.prompt, one.text) == (other.prompt, other.text)
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert pickle.loads(pickle.dumps(Stack(1, [], []))) == Stack(1, [], [])
