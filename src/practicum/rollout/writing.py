"""One round of writing: requests go out to the lanes that have room, answers come in as they are finished.

    requests ─▶ pieces ─ to the lane with the fewest tokens to write ─▶ lane ─ begin, collect ─▶ answers
                  ▲                                                      │
                  └── what a replica had that died, hangs or gave up ◀───┘

A lane is a worker that writes by itself. It has as much as it can write at a time and a little more, which waits there:
so its batch stays full, and a slow one is not left with the rest. An answer counts when it has arrived here, once; the
others of the same request can be written by anyone, since each has its own random numbers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from practicum.controller import GroupFuture, split_batch, wait_any
from practicum.errors import RolloutError, TrainingError, WorkerError
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import Batch, Written
from practicum.types import RolloutRequest, Sample

log = logging.getLogger("practicum.rollout")
_WAIT_S = 1.0
_MORE_ATTEMPTS = 2
_PIECES_PER_LANE = 4
_NEWEST_COUNTS = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: the index of its request among those given, its number within it, and what was written."""

    request: int
    number: int
    sample: Sample


class Crew(Protocol):
    """Who looks after the replicas while a round is under way."""

    def well(self) -> Sequence[RolloutReplica]:
        """Those that can write now."""

    def lose(self, replica: RolloutReplica, reason: str) -> None:
        """It cannot go on. It will be started again; the error to raise where it cannot be."""

    def calling(self) -> AbstractContextManager[bool]:
        """Whether workers may be called inside the block: not while new weights are on their way."""

    def wait(self, seconds: float) -> None:
        """For news of `well` or `calling`. An error if none is left that could ever be well."""

    sessions: dict[str, tuple[int, int]]
    """The lane each session is with, by numbers of replica and lane."""


@dataclass(slots=True)
class Piece:
    """Some answers to one request, in a row; `first` is the number of the first."""

    index: int
    first: int
    request: RolloutRequest
    cost: float  # of each answer, in tokens
    num_attempts: int = 0
    open: set[int] = field(default_factory=set)  # numbers within the piece

    @property
    def num_tokens(self) -> float:
        return self.cost * self.request.params.num_answers

    def left(self) -> Iterator[Piece]:
        """What of it is not there yet, in as few pieces as there are gaps."""
        numbers = sorted(self.open)
        while numbers:
            start = numbers[0]
            run = [n for offset, n in enumerate(numbers) if n == start + offset]
            numbers = numbers[len(run) :]
            params = replace(self.request.params, num_answers=len(run))
            request = replace(self.request, params=params, first_answer=self.request.first_answer + start)
            yield Piece(self.index, self.first + start, request, self.cost, self.num_attempts)


class Lane:
    def __init__(self, replica: RolloutReplica, rank: int) -> None:
        self.replica = replica
        self.rank = rank
        self.pieces: dict[int, Piece] = {}  # with open answers, by place
        self.fresh: list[tuple[int, Piece]] = []  # to be sent with the next call
        self.bound: deque[Piece] = deque()  # of sessions that are with it
        self.call: GroupFuture[Written] | None = None
        self.num_open = 0  # answers
        self.load = 0.0  # tokens it is expected to write
        self.heard_at = time.monotonic()

    @property
    def key(self) -> tuple[int, int]:
        return self.replica.number, self.rank

    def give(self, place: int, piece: Piece) -> None:
        if not self.num_open:
            self.heard_at = time.monotonic()
        piece.open = set(range(piece.request.params.num_answers))
        self.fresh.append((place, piece))
        self.pieces[place] = piece
        self.num_open += len(piece.open)
        self.load += piece.cost * len(piece.open)

    def take(self, place: int, number: int) -> Piece | None:
        """The piece that an answer is of; None if it is not expected from here."""
        piece = self.pieces.get(place)
        if piece is None or number not in piece.open:
            return None
        piece.open.remove(number)
        self.num_open -= 1
        self.load -= piece.cost
        self.heard_at = time.monotonic()
        if not piece.open:
            del self.pieces[place]
        return piece

    def send(self, round_number: int) -> None:
        """The next call, where there is anything to do or to wait for."""
        if self.fresh:
            places, pieces = zip(*self.fresh, strict=True)
            self.fresh = []
            batch = Batch(round_number, places, [piece.request for piece in pieces])
            self.call = self.replica.begin(self.rank, batch, _WAIT_S)
        elif self.pieces:
            self.call = self.replica.collect(self.rank, _WAIT_S)


class ExpectedLengths:
    """How long answers get, learnt from those to prompts of the same source."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def expected(self, request: RolloutRequest) -> float:
        most = request.params.max_new_tokens
        length = min(most, self._tokens.get(request.prompt.data_source, most))
        return max(1.0, length - (0 if request.written is None else len(request.written.token_ids)))

    def learn(self, sample: Sample) -> None:
        source, now = sample.prompt.data_source, float(len(sample.token_ids))
        before = self._tokens.get(source)
        self._tokens[source] = now if before is None else before + _NEWEST_COUNTS * (now - before)


@dataclass(frozen=True, slots=True)
class HandingOut:
    """How requests are shared out. `window` is the most answers that a lane has; None shares all out at once, by their
    order alone, so that every run does it alike."""

    window: int | None
    silence_s: float = 1800.0
    """A lane from which no answer comes for so long hangs."""


class WritingRound:
    def __init__(
        self, number: int, requests: Sequence[RolloutRequest], crew: Crew, rules: HandingOut, lengths: ExpectedLengths
    ) -> None:
        self._number = number
        self._crew = crew
        self._rules = rules
        self._lengths = lengths
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._num_replicas = 0  # at most so far
        self._next_place = 0
        self._num_open = sum(request.params.num_answers for request in requests)
        self._waiting: deque[Piece] = deque()
        self._see_lanes()
        self._plan(requests)

    def answers(self) -> Iterator[list[Answer]]:
        """All of them, in lists as they come together."""
        while self._num_open:
            self._see_lanes()
            with self._crew.calling() as may_call:
                if may_call:
                    self._hand_out()
                    self._send()
            lane_of = {id(lane.call): lane for lane in self._lanes.values() if lane.call is not None}
            if not lane_of:
                self._crew.wait(_WAIT_S)
                for lane in self._lanes.values():
                    lane.heard_at = time.monotonic()  # nobody has asked them
                continue
            came: list[Answer] = []
            for call in wait_any([lane.call for lane in lane_of.values() if lane.call is not None], _WAIT_S):
                came += self._heard(lane_of[id(call)])
            self._look_for_silence()
            if came:
                self._num_open -= len(came)
                yield came

    def abandon(self) -> None:
        """Have the replicas break off what they still have. Does nothing when all is written."""
        busy = {lane.replica.number: lane.replica for lane in self._lanes.values() if lane.pieces}
        self._lanes.clear()
        for own in busy.values():
            try:
                own.abort()
            except WorkerError as error:
                if own.is_own:
                    self._crew.lose(own, error.message)
                else:
                    log.warning("%s did not break off what it was writing: %s", own.name, error.message)

    def _plan(self, requests: Sequence[RolloutRequest]) -> None:
        pieces = [Piece(i, 0, request, self._lengths.expected(request)) for i, request in enumerate(requests)]
        if self._rules.window is None:
            for lane, share in zip(self._lanes.values(), split_batch(pieces, len(self._lanes)), strict=True):
                self._give(lane, share)
            return
        # Small enough that every lane has some, and the answers to one prompt beside each other otherwise.
        most = max(1, self._num_open // (_PIECES_PER_LANE * max(1, len(self._lanes))))
        split = [part for piece in pieces for part in _cut(piece, most)]
        self._waiting.extend(sorted(split, key=lambda piece: -piece.cost))  # those of one length stay in their order

    def _see_lanes(self) -> None:
        there = self._crew.well()
        self._num_replicas = max(self._num_replicas, len(there))
        for own in there:
            for rank in range(own.num_lanes):
                if (own.number, rank) not in self._lanes:
                    self._lanes[own.number, rank] = Lane(own, rank)

    def _hand_out(self) -> None:
        free = [lane for lane in self._lanes.values() if lane.call is None]
        for lane in free:
            while lane.bound and self._has_room(lane):
                self._give(lane, [lane.bound.popleft()])
        left = sum(piece.num_tokens for piece in self._waiting) + sum(lane.load for lane in self._lanes.values())
        fair = left / max(1, len(self._lanes))
        while self._waiting:
            open_to_more = [lane for lane in free if self._has_room(lane) and lane.load < fair]
            if not open_to_more:
                return
            self._give_next(min(open_to_more, key=lambda lane: lane.load))

    def _give_next(self, lane: Lane) -> None:
        """The piece that has waited longest, to the lane; or to the one that its session is with."""
        piece = self._waiting.popleft()
        session = piece.request.session
        if session is not None:
            home = self._crew.sessions.setdefault(session, lane.key)
            if home != lane.key and home in self._lanes:
                self._lanes[home].bound.append(piece)
                if self._lanes[home].call is None and self._has_room(self._lanes[home]):
                    self._give(self._lanes[home], [self._lanes[home].bound.popleft()])
                return
            self._crew.sessions[session] = lane.key
        self._give(lane, [piece])

    def _has_room(self, lane: Lane) -> bool:
        return self._rules.window is None or lane.num_open < self._rules.window

    def _give(self, lane: Lane, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            lane.give(self._next_place, piece)
            self._next_place += 1

    def _send(self) -> None:
        for lane in list(self._lanes.values()):
            if lane.call is None:
                try:
                    lane.send(self._number)
                except WorkerError as error:  # its group is being restarted, or has ended
                    self._lose(lane, error.message)

    def _heard(self, lane: Lane) -> list[Answer]:
        if self._lanes.get(lane.key) is not lane:  # lost together with another lane of its replica
            return []
        assert lane.call is not None
        call, lane.call = lane.call, None
        try:
            written = call.result()
        except WorkerError as error:
            if isinstance(error.cause, RolloutError | TrainingError):  # no other replica would do better
                raise type(error.cause)(f"{lane.replica.name}: {error.cause}") from error
            self._lose(lane, error.message)
            return []
        found = []
        for place, number, sample in zip(written.places, written.answers, written.samples, strict=True):
            piece = lane.take(place, number)
            if piece is None:
                continue
            if sample.finish_reason == "abort":  # by no wish of ours: whoever has room goes on with it
                again = piece.request.going_on(number, sample)
                self._again([Piece(piece.index, piece.first + number, again, piece.cost, piece.num_attempts)], "abort")
                continue
            self._lengths.learn(sample)
            found.append(Answer(piece.index, piece.first + number, sample))
        if written.failure:
            self._lose(lane, f"its engine failed: {written.failure}")
        return found

    def _look_for_silence(self) -> None:
        for lane in list(self._lanes.values()):
            silent_s = time.monotonic() - lane.heard_at
            if lane.pieces and silent_s > self._rules.silence_s:
                self._lose(lane, f"it has not finished an answer for {silent_s:.0f} s, with {lane.num_open} to write")

    def _lose(self, lane: Lane, reason: str) -> None:
        """All that its replica had is written by others, or by itself when it is back."""
        lost = [other for other in self._lanes.values() if other.replica is lane.replica]
        for other in lost:
            del self._lanes[other.key]
        for session in [s for s, home in self._crew.sessions.items() if home[0] == lane.replica.number]:
            del self._crew.sessions[session]
        self._crew.lose(lane.replica, reason)
        for other in lost:
            self._again([part for piece in other.pieces.values() for part in piece.left()], reason)
            self._waiting.extendleft(reversed(other.bound))

    def _again(self, pieces: Sequence[Piece], reason: str) -> None:
        for piece in reversed(pieces):
            piece.num_attempts += 1
            # Every replica may be lost once by no fault of this one; then it looks as if it were the cause.
            if piece.num_attempts == self._num_replicas + _MORE_ATTEMPTS:
                raise RolloutError(
                    f"prompt {piece.request.prompt.id} was given to replicas {piece.num_attempts} times in turn, and "
                    f"none answered it. The last: {reason}"
                )
            self._waiting.appendleft(piece)


def _cut(piece: Piece, most: int) -> Iterator[Piece]:
    params = piece.request.params
    if piece.request.session is not None or params.num_answers <= most:
        yield piece
        return
    for start in range(0, params.num_answers, most):
        num = min(most, params.num_answers - start)
        request = replace(
            piece.request,
            params=replace(params, num_answers=num),
            first_answer=piece.request.first_answer + start,
        )
        yield Piece(piece.index, start, request, piece.cost)
