from __future__ import annotations

import threading
from typing import Any

from practicum.reward.serving.watch import Watch

from practicum.errors import RewardError


class FakeReplica:
    def __init__(self, number: int, *, well: bool) -> None:
        self.number = number
        self.well = well
        self.problem = ""
        self.misses_left: int | None = None  # None: as `well` says
        self.looked_at, self.ended, self.replaced = threading.Event(), threading.Event(), threading.Event()
        self.num_replaced = 0

    def is_well(self) -> bool:
        self.looked_at.set()
        if self.misses_left:
            self.misses_left -= 1
            return False
        return self.well

    def end(self) -> None:
        self.ended.set()

    def replace(self) -> None:
        self.num_replaced += 1
        self.well = True
        self.replaced.set()


def watched(replicas: list[Any]) -> Watch:
    return Watch(replicas, lambda replica: replica.replace())  # type: ignore[attr-defined]


def test_who_does_not_answer_is_started_again_and_nobody_else() -> None:
    replicas: list[Any] = [FakeReplica(0, well=True), FakeReplica(1, well=False), FakeReplica(2, well=True)]
    with watched(replicas):
        assert replicas[1].replaced.wait(20)
        assert replicas[0].looked_at.wait(20) and replicas[2].looked_at.wait(20)
        replicas[2].well = False
        assert replicas[2].replaced.wait(20)
    assert replicas[0].num_replaced == 0


def test_a_single_replica_is_started_again_too() -> None:
    only: Any = FakeReplica(0, well=False)
    with watched([only]):
        assert only.replaced.wait(20)


def test_one_missed_look_is_forgiven() -> None:
    slow: Any = FakeReplica(0, well=True)
    slow.misses_left = 1
    with watched([slow]):
        assert slow.looked_at.wait(20)
        slow.looked_at.clear()
        assert slow.looked_at.wait(20)
    assert slow.num_replaced == 0


def test_one_that_dies_again_and_again_stays_away() -> None:
    class Doomed(FakeReplica):
        def replace(self) -> None:
            self.num_replaced += 1

    doomed: Any = Doomed(0, well=False)
    with watched([doomed]):
        assert doomed.ended.wait(30)
    assert doomed.num_replaced == 2


def test_a_start_that_fails_ends_the_watch_over_that_one() -> None:
    tried = threading.Event()

    def fail(replica: Any) -> None:
        tried.set()
        raise RewardError("no room")

    with Watch([FakeReplica(0, well=False)], fail):  # type: ignore[list-item]
        assert tried.wait(20)


def test_nothing_is_watched_after_the_block_or_that_has_a_problem_already() -> None:
    ill: Any = FakeReplica(2, well=False)
    ill.problem = "does not start"
    before = threading.active_count()
    with watched([FakeReplica(0, well=True), FakeReplica(1, well=True), ill]):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
