"""Handing out and taking in, with replicas that are nothing but what a test says they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from practicum.controller import GroupFuture
from practicum.controller.future import only
from practicum.errors import RolloutError, TrainingError, WorkerDied, WorkerError
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import Batch, Written
from practicum.rollout.writing import Answer, ExpectedLengths, HandingOut, WritingRound
from practicum.types import RolloutRequest, Sample
from tests.rollout.writers import requests_of


def answer_to(request: RolloutRequest, number: int) -> Sample:
    """Its tokens say whose answer it is."""
    ids = np.array([request.seed, request.first_answer + number], np.int32)
    rest = np.zeros(2, np.float32), np.ones(2, np.bool_), np.zeros(2, np.int32)
    return Sample(request.prompt, request.prompt_ids, ids, *rest, text="", finish_reason="stop")


class FakeReplica:
    """Finishes up to `pace` answers a call; `dies_after` so many it is dead, `gives_up_after` its engine fails."""

    def __init__(self, number: int, pace: int = 4, lanes: int = 1, **fate: Any) -> None:
        self.number = number
        self.name = f"rollout-{number}"
        self.is_own = True
        self.pace = pace
        self.num_lanes = lanes
        self.fate = fate
        self.most_at_once = 0
        self.given: list[RolloutRequest] = []
        self.num_written = 0
        self.num_aborts = 0
        self._open: dict[int, list[tuple[int, int, RolloutRequest]]] = {lane: [] for lane in range(lanes)}

    def begin(self, lane: int, batch: Batch, wait_s: float) -> GroupFuture[Written]:
        self.given += batch.requests
        for place, request in zip(batch.places, batch.requests, strict=True):
            self._open[lane] += [(place, n, request) for n in range(request.params.num_answers)]
        self.most_at_once = max(self.most_at_once, len(self._open[lane]))
        return self.collect(lane, wait_s)

    def collect(self, lane: int, wait_s: float) -> GroupFuture[Written]:
        rows, self._open[lane] = self._open[lane][: self.pace], self._open[lane][self.pace :]

        def result(_: float) -> list[Any]:
            self.num_written += len(rows)
            if "raises" in self.fate:
                error = self.fate["raises"]
                raise WorkerError(f"{self.name} raised", group=self.name, ranks=[0], cause=error)
            if self.num_written > self.fate.get("dies_after", 10**9):
                raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])
            failure = "engine is tired" if self.num_written > self.fate.get("gives_up_after", 10**9) else ""
            places, numbers, requests = zip(*rows, strict=True) if rows else ((), (), ())
            samples = [self._sample(request, n) for request, n in zip(requests, numbers, strict=True)]
            return [Written(0, places, numbers, samples, len(self._open[lane]), failure)]

        return GroupFuture([None], result, float("inf"), only)

    def _sample(self, request: RolloutRequest, number: int) -> Sample:
        sample = answer_to(request, number)
        if self.fate.get("breaks_off") and request.written is None:
            return replace(sample, finish_reason="abort")
        return sample

    def abort(self) -> None:
        self.num_aborts += 1


class FakeCrew:
    def __init__(self, replicas: Sequence[FakeReplica], comes_back: bool = True) -> None:
        self.replicas = list(replicas)
        self.sessions: dict[str, tuple[int, int]] = {}
        self.lost: list[tuple[int, str]] = []
        self.comes_back = comes_back
        self._away: list[FakeReplica] = []

    def well(self) -> Sequence[RolloutReplica]:
        return cast(Sequence[RolloutReplica], [own for own in self.replicas if own not in self._away])

    def lose(self, replica: RolloutReplica, reason: str) -> None:
        own = cast(FakeReplica, replica)
        self.lost.append((own.number, reason))
        self._away.append(own)

    @contextmanager
    def calling(self) -> Iterator[bool]:
        yield True

    def wait(self, seconds: float) -> None:
        if not self.comes_back:
            raise RolloutError("none is left")
        own = self._away.pop()
        own._open = {lane: [] for lane in own._open}
        own.fate, own.num_written = {}, 0


def write(
    crew: FakeCrew, requests: Sequence[RolloutRequest], window: int | None = 8, **rules: Any
) -> dict[tuple[int, int], Sample]:
    writing = WritingRound(0, requests, crew, HandingOut(window, **rules), ExpectedLengths())
    answers: list[Answer] = [answer for some in writing.answers() for answer in some]
    writing.abandon()
    expected = Counter((i, n) for i, request in enumerate(requests) for n in range(request.params.num_answers))
    assert Counter((answer.request, answer.number) for answer in answers) == expected
    for answer in answers:  # and each is what it should be
        request = requests[answer.request]
        assert answer.sample.token_ids.tolist() == [request.seed, request.first_answer + answer.number]
    return {(answer.request, answer.number): answer.sample for answer in answers}


def test_a_fast_replica_writes_more_and_none_has_more_than_its_window() -> None:
    slow, fast = FakeReplica(0, pace=1), FakeReplica(1, pace=6)
    write(FakeCrew([slow, fast]), requests_of(120))
    assert fast.num_written > 3 * slow.num_written > 0
    assert slow.most_at_once <= 8 and fast.most_at_once <= 8


def test_a_lane_is_never_left_without_work_while_there_is_some() -> None:
    lanes = [FakeReplica(n, pace=3) for n in range(4)]
    write(FakeCrew(lanes), requests_of(100, num_answers=2))
    assert max(own.num_written for own in lanes) - min(own.num_written for own in lanes) <= 12


def test_few_prompts_with_many_answers_are_shared_out_too() -> None:
    lanes = [FakeReplica(n) for n in range(4)]
    write(FakeCrew(lanes), requests_of(1, num_answers=32))
    assert all(own.num_written == 8 for own in lanes)


def test_without_a_window_all_is_shared_out_by_order_alone() -> None:
    own = FakeReplica(0, pace=2, lanes=2)
    requests = requests_of(5, num_answers=3)
    write(FakeCrew([own]), requests, window=None)
    assert [request.prompt.id for request in own.given] == ["0", "1", "2", "3", "4"]
    assert all(request.params.num_answers == 3 for request in own.given)


@pytest.mark.parametrize("fate", [{"dies_after": 5}, {"gives_up_after": 5}])
def test_what_a_lost_replica_had_is_written_by_others(fate: dict[str, int]) -> None:
    crew = FakeCrew([FakeReplica(0, pace=3, **fate), FakeReplica(1, pace=3)])
    write(crew, requests_of(30, num_answers=4))
    assert [number for number, _ in crew.lost] == [0]


def test_the_only_replica_is_waited_for() -> None:
    write(FakeCrew([FakeReplica(0, pace=3, dies_after=7)]), requests_of(10, num_answers=2))
    with pytest.raises(RolloutError, match="none is left"):
        write(FakeCrew([FakeReplica(0, dies_after=7)], comes_back=False), requests_of(10))


def test_only_what_is_missing_is_asked_for_again() -> None:
    own = FakeReplica(0, pace=1, dies_after=2)
    write(FakeCrew([own]), [replace(request, session="one piece") for request in requests_of(1, num_answers=12)])
    assert [(request.first_answer, request.params.num_answers) for request in own.given] == [(0, 12), (2, 10)]


def test_losses_at_random_change_nothing(tries: int = 40) -> None:
    dice = random.Random(7)
    for _ in range(tries):
        num = dice.randint(1, 4)
        crew = FakeCrew([
            FakeReplica(n, pace=dice.randint(1, 5), lanes=dice.randint(1, 3), dies_after=dice.randint(0, 60))
            for n in range(num)
        ])  # fmt: skip
        write(crew, requests_of(dice.randint(1, 25), num_answers=dice.randint(1, 6)), window=dice.randint(1, 20))


def test_a_request_that_loses_every_replica_is_an_error() -> None:
    class Deadly(FakeCrew):
        def wait(self, seconds: float) -> None:
            self._away.clear()

    with pytest.raises(RolloutError, match=r"prompt 0 was given to replicas 3 times in turn.*rollout-0 died"):
        write(Deadly([FakeReplica(0, dies_after=0)]), requests_of(1))


@pytest.mark.parametrize("error", [RolloutError("too long"), TrainingError("weights are spoilt")])
def test_what_no_replica_could_do_better_is_raised(error: Exception) -> None:
    crew = FakeCrew([FakeReplica(0, raises=error), FakeReplica(1, raises=error)])
    with pytest.raises(type(error), match=r"rollout-\d: (too long|weights are spoilt)"):
        write(crew, requests_of(8))
    assert crew.lost == []


def test_an_answer_that_was_broken_off_is_gone_on_with() -> None:
    own = FakeReplica(0, breaks_off=True)
    writing = WritingRound(0, requests_of(3), FakeCrew([own]), HandingOut(8), ExpectedLengths())
    answers = [answer for some in writing.answers() for answer in some]
    assert sorted(answer.request for answer in answers) == [0, 1, 2]
    assert all(request.written is not None for request in own.given[3:])


def test_a_session_stays_with_its_replica_while_that_lives() -> None:
    crew = FakeCrew([FakeReplica(0, pace=2), FakeReplica(1, pace=2)])
    requests = [replace(request, session=f"talk-{i % 5}") for i, request in enumerate(requests_of(40))]
    for _ in range(2):  # also from one round to the next
        write(crew, requests, window=4)
    homes = [{request.session for request in own.given} for own in crew.replicas]
    assert not homes[0] & homes[1] and len(homes[0] | homes[1]) == 5
    crew.replicas[0].fate, crew.replicas[0].num_written = {"dies_after": 3}, 0
    write(crew, requests, window=4)  # its sessions have moved
    assert {home[0] for home in crew.sessions.values()} <= {0, 1}


def test_a_replica_that_finishes_nothing_hangs() -> None:
    crew = FakeCrew([FakeReplica(0, pace=0), FakeReplica(1)])
    write(crew, requests_of(20), silence_s=0.0)
    assert crew.lost[0][0] == 0 and "not finished an answer" in crew.lost[0][1]


def test_leaving_early_breaks_off_what_is_left() -> None:
    own = FakeReplica(0, pace=1)
    writing = WritingRound(0, requests_of(20), FakeCrew([own]), HandingOut(8), ExpectedLengths())
    next(writing.answers())
    writing.abandon()
    assert own.num_aborts == 1


def test_lengths_are_learnt_by_source() -> None:
    lengths = ExpectedLengths()
    (request,) = requests_of(1, 100)
    assert lengths.expected(request) == 100
    sample = answer_to(request, 0)
    lengths.learn(sample)
    assert lengths.expected(request) == 2
    assert lengths.expected(replace(request, prompt=replace(request.prompt, data_source="other"))) == 100
    assert lengths.expected(replace(request, written=sample)) == 1
