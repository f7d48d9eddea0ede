"""The replicas and their lives: started side by side, woken to write, put to sleep, started again when they are lost.

    update_weights(version)   trainer ─ channel ─▶ every replica ─ same log-probs as the trainer's? ─▶ may write
    for answers in write(requests)
                              woken ─▶ a round of writing ─▶ asleep, or ended, however the round is left
    a replica that is lost    ended, started again from the model's files, given the weights, back in the round

Hybrid replicas are the trainer's own processes: they take its weights as they are, and are not started again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Self

from practicum.controller import side_by_side
from practicum.errors import PracticumError, RolloutError, WeightsGone, WorkerError
from practicum.rollout.delivery import WeightDelivery
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.writing import Answer, ExpectedLengths, HandingOut, WritingRound
from practicum.types import RolloutRequest

log = logging.getLogger("practicum.rollout")
_MOST_RESTARTS = 2  # in one round, or for one version
_MOST_SESSIONS = 100_000


class RolloutManager:
    """`for answers in manager.write(requests)`. `delivery` is None where replicas share the trainer's own weights."""

    def __init__(
        self,
        replicas: Sequence[RolloutReplica],
        rules: HandingOut,
        *,
        delivery: WeightDelivery | None,
        sleeps: bool,
    ) -> None:
        self.replicas = list(replicas)
        self.sleeps = sleeps
        """Whether they are asleep from the end of a round until they get new weights or the next one begins."""
        self.version = -1
        """Of the weights they write with."""
        self.sessions: dict[str, tuple[int, int]] = {}
        self._rules = rules
        self._delivery = delivery
        self._lengths = ExpectedLengths()
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._is_writing = False
        self._is_updating = False
        self._is_closed = False
        self._is_over = False
        self._num_tries = dict.fromkeys((replica.number for replica in self.replicas), 0)
        self._returning: dict[int, Future[None]] = {}
        self._late: set[int] = set()  # started again when the trainer had learnt on: they wait for the next weights
        self._updates = threading.Lock()  # of two versions one comes after the other
        self._giving = threading.Lock()  # weights are given by one thread at a time
        self._threads = ThreadPoolExecutor(max(1, len(self.replicas)), thread_name_prefix="practicum-replicas")

    @property
    def num_restarts(self) -> int:
        """Of all replicas, since they were started."""
        return sum(replica.num_restarts for replica in self.replicas)

    def write(self, requests: Sequence[RolloutRequest]) -> Generator[list[Answer], None, None]:
        """The answers to all requests, in lists as they are finished by any replica. Leaving the loop early breaks the
        rest off. One at a time."""
        if not requests:
            return
        with self._news:
            if self._is_writing:
                raise RolloutError("replicas are writing already: finish or close the first `write`.")
            self._is_writing = True
        try:
            with self._awake():
                self._forget_sessions()
                writing = WritingRound(next(self._numbers), requests, self, self._rules, self._lengths)
                try:
                    yield from writing.answers()
                finally:
                    writing.abandon()
        finally:
            self._is_writing = False

    def update_weights(self, version: int, *, stays_awake: bool = True) -> None:
        """Have all replicas write with the trainer's weights of now, under this version.

        May be called while they write: answers under way are finished with the old weights first, or, with partial
        rollout, broken off and gone on with under the new ones. Unless they are to stay awake for a round that comes
        next, those that sleep between rounds do so again.
        """
        with self._updates, self._pause():
            self._wait_for_returning()
            with self._giving:
                self.version = version
                if self._delivery is None:
                    for replica in self.replicas:
                        replica.update_weights(version)
                else:
                    late = self._take_late()
                    failed = self._delivery.send([*self.well(), *late], version)
                    for replica in late:
                        replica.problem = ""
                    for replica, problem in failed.items():
                        self.lose(replica, problem)
            self._forgive()  # now that there are weights to come back to
        if not self.well():
            self._wait_for_returning()
            self._check_hope()
        if not stays_awake and not self._is_writing:
            self._put_all_to_sleep()

    def break_off(self) -> None:
        """From any thread: whoever is writing gets a RolloutError soon, and what is left is broken off."""
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def take_counts(self) -> Counter[str]:
        """Conversations, turns, and calls of tools by what came of them, since the last time. Not while they write."""
        counts = Counter[str]()
        for replica in self.well():
            try:
                for own in replica.take_counts():
                    counts.update(own)
            except WorkerError as error:  # the next round finds out whether it can go on
                log.warning("%s does not tell what its tools did: %s", replica.name, error.message)
        return counts

    def close(self) -> None:
        """End the replicas that are not the trainer's. Closing twice does nothing."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        with ExitStack() as stack:  # all are ended, even if one raises
            for replica in self.replicas:
                stack.callback(replica.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # What a round asks of us

    def well(self) -> list[RolloutReplica]:
        with self._news:
            return [own for own in self.replicas if not own.problem and own.number not in self._returning]

    @contextmanager
    def calling(self) -> Iterator[bool]:
        with self._news:  # calls that are made now reach the workers before those for new weights
            if self._is_over:
                raise RolloutError("writing was broken off.")
            yield not self._is_updating

    def wait(self, seconds: float) -> None:
        self._check_hope()
        with self._news:
            self._news.wait(seconds)

    def lose(self, replica: RolloutReplica, reason: str) -> None:
        if not replica.is_own:
            raise RolloutError(f"{replica.name} cannot write: {reason}")
        with self._news:
            if replica.number in self._returning or self._is_closed:
                return
            self._late.discard(replica.number)
            self._num_tries[replica.number] += 1
            replica.problem = reason
            if self._num_tries[replica.number] > _MOST_RESTARTS:
                log.warning("%s was lost again and again and stays away: %s", replica.name, reason)
            else:
                log.warning("%s is lost and started again; whoever can takes what it had: %s", replica.name, reason)
                self._returning[replica.number] = self._threads.submit(self._bring_back, replica)
            self._news.notify_all()

    # Lives

    def _bring_back(self, replica: RolloutReplica) -> None:
        """In a thread of its own: the others go on meanwhile."""
        try:
            replica.restart()
            replica.wake_up()
            with self._giving:  # to the end: new weights are not to be sent round while it is neither here nor there
                problem = ""
                if self._delivery is not None and self.version >= 0:
                    try:
                        self._delivery.send_again(replica, self.version)
                    except WeightsGone as error:  # newer ones must not go by the old version
                        log.warning("%s waits for the next weights: %s", replica.name, error)
                        problem = str(error)
                self._is_back(replica, problem, is_late=bool(problem))
        except PracticumError as error:
            self._is_back(replica, str(error))
            self.lose(replica, str(error))
        except BaseException as error:  # a mistake of ours: nobody must wait for it for ever
            self._is_back(replica, f"{type(error).__name__}: {error}")
            raise

    def _is_back(self, replica: RolloutReplica, problem: str, *, is_late: bool = False) -> None:
        with self._news:
            replica.problem = problem
            if is_late:
                self._late.add(replica.number)
            del self._returning[replica.number]
            self._news.notify_all()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._forgive()
        try:
            side_by_side(self._wake, self.well())
            yield
        except BaseException:
            with suppress(PracticumError):  # what went wrong first says more
                self._put_all_to_sleep()
            raise
        self._put_all_to_sleep()

    def _put_all_to_sleep(self) -> None:
        if self.sleeps:
            self._wait_for_returning()  # or they would come back awake
            with self._news:
                late = [own for own in self.replicas if own.number in self._late]
            side_by_side(self._put_to_sleep, [*self.well(), *late])

    def _forgive(self) -> None:
        """Whoever stayed away is tried again."""
        with self._news:
            for replica in self.replicas:
                if replica.number not in self._returning and replica.number not in self._late:
                    self._num_tries[replica.number] = 0
                    if replica.problem:
                        self.lose(replica, replica.problem)

    def _take_late(self) -> list[RolloutReplica]:
        """To be given weights with the others, and counted among them from then on."""
        with self._news:
            late = [own for own in self.replicas if own.number in self._late]
            self._late.clear()
        return late

    def _forget_sessions(self) -> None:
        """Of those nobody has gone on with for long."""
        for session in list(self.sessions)[:-_MOST_SESSIONS]:
            del self.sessions[session]

    def _wake(self, replica: RolloutReplica) -> None:
        self._or_lose(replica, replica.wake_up)

    def _put_to_sleep(self, replica: RolloutReplica) -> None:
        """Asleep, or ended: in either case it holds none of the device."""
        try:
            replica.sleep()
        except PracticumError as error:
            if not replica.is_own:
                raise
            log.warning("%s is ended, to be started again when needed: it did not fall asleep: %s", replica.name, error)
            with self._news:
                replica.problem = str(error)
                self._late.discard(replica.number)
            replica.end()

    def _or_lose(self, replica: RolloutReplica, do: Callable[[], None]) -> None:
        try:
            do()
        except PracticumError as error:
            if not replica.is_own:
                raise
            self.lose(replica, str(error))

    def _wait_for_returning(self) -> None:
        """Each has deadlines of its own."""
        while True:
            with self._news:
                returning = list(self._returning.values())
            if not returning:
                return
            for future in returning:
                future.exception()

    def _check_hope(self) -> None:
        with self._news:
            # New weights, for which late ones wait, are on their way: they are late because the trainer learns.
            if self._returning or self._late or any(not replica.problem for replica in self.replicas):
                return
        told = "; ".join(f"{replica.name}: {replica.problem}" for replica in self.replicas)
        raise RolloutError(f"no replica can write any more. {told}")

    # Weights

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """No more calls to the replicas' workers but ours: those there are end within seconds."""
        with self._news:
            self._is_updating = True
        try:
            yield
        finally:
            with self._news:
                self._is_updating = False
                self._news.notify_all()
