"""The manager: gives prompt groups to the workers that have room, and restarts their replicas.

    generate(groups) ─▶ waiting, by priority ─▶ worker with room and the fewest tokens to write ─▶ finished groups
                           ▲                                   │
                           └── work of a failed replica ◀───────┘    what it had finished is kept

    update_weights(version)   trainer ─ channel ─▶ every replica ─ same log-probs as the trainer's? ─▶ may write
    awake()                   replicas are woken; they sleep after it, or are ended, however the block is left
    a replica that failed     ended, started again from the model's files, given the weights, back at work

Groups are sent and come back in lists; a worker returns trajectories as it finishes them. One counts when it arrives,
and only once. Any worker can write the others of its group, since each has its own random numbers. All of it runs on
one event loop. Hybrid replicas are the trainer's own processes: they take its weights as they are, and are never
restarted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from practicum.controller.averages import MovingAverages
from practicum.controller.wire import split_batch
from practicum.errors import PracticumError, RolloutError, TrainingError, WeightsGone, WorkerError
from practicum.rollout.delivery import WeightDelivery
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import with_trajectories
from practicum.types import PromptGroup, Trajectory

T = TypeVar("T")
log = logging.getLogger("practicum.rollout")
_MOST_RESTARTS = 2  # in a row
_MORE_ATTEMPTS = 2
_MOST_SESSIONS = 100_000
_PARTS_PER_WORKER = 4
_LEAST_ROOM = 1 / 16  # of a window: a worker with less is sent nothing, so that lists do not fall to pieces
_PING_EVERY_S = 30.0
_ABORT_S = 60.0


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `generate`."""

    priority: int
    number: int
    num_open: dict[str, int]  # trajectories that are not there yet, by the id of their group
    finished: list[PromptGroup] = field(default_factory=list)  # and not yielded yet
    error: BaseException | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    streams: set[asyncio.Task[None]] = field(default_factory=set)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.changed.set()


@dataclass(slots=True, eq=False)
class _Part:
    """Trajectories of a group that one worker writes."""

    call: _Call
    group: PromptGroup
    open: dict[int, Trajectory]  # those that are not there yet, by number
    cost: float  # tokens expected of each
    number: int  # in the order of the call's groups
    num_attempts: int = 0

    def __lt__(self, other: _Part) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, ...]:
        """The sort key: within a call parts that were sent before come first, then the longest."""
        return self.call.priority, self.call.number, -self.num_attempts, -self.cost, self.number

    @property
    def num_tokens(self) -> float:
        return self.cost * len(self.open)

    def copies(self) -> list[Trajectory]:
        """Return copies to send: a worker in this process fills in what it is given, which has not arrived yet."""
        return [replace(own, samples=[*own.samples], counts={**own.counts}) for own in self.open.values()]


@dataclass(slots=True, eq=False)
class _Worker:
    """A rank of a replica, which writes by itself."""

    replica: RolloutReplica
    rank: int
    parts: set[_Part] = field(default_factory=set)  # with open trajectories
    num_open: int = 0  # trajectories of its parts
    num_tokens: float = 0.0  # that it is expected to write
    streams: dict[asyncio.Task[None], _Call] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None
    heard_at: float = 0.0

    def add(self, part: _Part) -> None:
        self.parts.add(part)
        self.num_open += len(part.open)
        self.num_tokens += part.num_tokens

    def keep(self, parts: Iterable[_Part]) -> None:
        """Forget all other parts."""
        self.parts, self.num_open, self.num_tokens = set(), 0, 0.0
        for part in parts:
            self.add(part)


class RolloutManager(AbstractAsyncContextManager["RolloutManager"]):
    """`async for groups in manager.generate(prompt_groups)`.

    `window` is the most answers that a worker has at a time. None gives all out at once, by the order of the groups
    alone, so that every run does it alike. A worker that finishes nothing for `silence_s` has failed. `delivery` is
    None where replicas share the trainer's own weights. `sleeps`: replicas sleep outside of `awake`.
    """

    def __init__(
        self,
        replicas: Sequence[RolloutReplica],
        *,
        window: int | None,
        silence_s: float = 1800.0,
        delivery: WeightDelivery | None,
        sleeps: bool,
    ) -> None:
        self.replicas = list(replicas)
        self.sleeps = sleeps
        self.version = -1
        """The version of the weights that replicas write with."""
        self._window = window
        self._silence_s = silence_s
        self._delivery = delivery
        self._lengths = MovingAverages()  # tokens of an answer, by data source
        self._numbers = itertools.count()
        self._workers = [_Worker(own, rank) for own in self.replicas for rank in range(own.num_workers)]
        self._calls: set[_Call] = set()
        self._waiting: list[_Part] = []  # a heap
        self._waiting_tokens = 0.0  # expected of them
        self._sessions: dict[str, _Worker] = {}
        self._num_awake = 0  # blocks of `awake`
        self._is_paused = False  # new weights are on their way: workers are sent nothing
        self._is_closed = False
        self._num_tries: Counter[int] = Counter()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._late: set[int] = set()  # started again when the trainer had learnt on: they wait for the next weights
        # Whoever holds a lock makes calls to workers, which have deadlines: those who wait for it need none.
        self._lifecycle = asyncio.Lock()  # waking, new weights and falling asleep come one after another
        self._giving = asyncio.Lock()  # weights are given by one at a time

    @property
    def num_restarts(self) -> int:
        """The number of restarts of all replicas since they were started."""
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def healthy(self) -> list[RolloutReplica]:
        """The replicas that can write now."""
        return [replica for replica in self.replicas if not replica.problem]

    async def generate(
        self, groups: Sequence[PromptGroup], *, priority: int = 0
    ) -> AsyncGenerator[list[PromptGroup], None]:
        """Write the missing trajectories, and yield each group once, in lists as groups are finished.

        Several calls share the workers; of what waits the lowest `priority` comes first, then the call that was made
        first. Closing the generator early aborts its rest.
        """
        if finished := [group for group in groups if group.is_finished]:
            yield finished
        async with self.awake():
            call = self._begin([group for group in groups if not group.is_finished], priority)
            try:
                while call.num_open or call.finished:
                    # Bounded: a worker with work has `silence_s`, restarts and new weights have deadlines of their own.
                    await call.changed.wait()
                    call.changed.clear()
                    finished, call.finished = call.finished, []
                    if finished:
                        yield finished
                    if call.error is not None:
                        raise call.error
            finally:
                await self._end(call)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keep the replicas awake in the block. They fall asleep again after the last of such blocks."""
        await self._lifecycle.acquire()
        self._num_awake += 1
        try:
            try:
                if self._num_awake == 1:
                    self._reset_retries()
                    await all_of(self._wake(replica) for replica in self.healthy)
            finally:
                self._lifecycle.release()
            yield
        except BaseException:
            with suppress(PracticumError):  # what went wrong first says more
                await self._leave()
            raise
        await self._leave()

    async def _leave(self) -> None:
        self._num_awake -= 1  # even if waiting for the lock is cancelled
        async with self._lifecycle:
            await self._put_to_sleep()

    async def update_weights(self, version: int, *, stays_awake: bool = True) -> None:
        """Have all replicas write with the trainer's weights of now, under this version.

        It may be called while they write: answers that are begun are finished with the old weights first, or, with
        partial rollout, aborted and continued under the new ones. Unless they are to stay awake for what comes next,
        those that sleep do so again.
        """
        async with self._lifecycle:
            self._is_paused = True
            try:
                await self._wait_for_restarts()
                async with self._giving:
                    self.version = version
                    await self._give_weights(version)
                self._reset_retries()  # now that there are weights to come back to
                if not self.healthy:
                    await self._wait_for_restarts()
                    if (error := self._no_replica_left()) is not None:
                        raise error
                if not stays_awake:
                    await self._put_to_sleep()
            finally:
                self._is_paused = False
                for worker in self._workers:
                    worker.heard_at = time.monotonic()  # it had something else to do
                self._dispatch()

    async def close(self) -> None:
        """End the replicas that are not the trainer's. Closing twice does nothing."""
        self._is_closed = True
        for call in self._calls:
            call.fail(RolloutError("the rollout manager has been closed."))
        watches = [worker.watch for worker in self._workers if worker.watch is not None]
        for task in [*self._restarts.values(), *watches]:
            task.cancel()
        await self._wait_for_restarts()
        await all_of(replica.end() for replica in self.replicas)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Giving out and taking in

    def _begin(self, groups: Sequence[PromptGroup], priority: int) -> _Call:
        if self._is_closed:
            raise RolloutError("the rollout manager has been closed.")
        if again := [own for own, num in Counter(group.id for group in groups).items() if num > 1]:
            raise RolloutError(f"two prompt groups have the id {again[0]!r}: ids are unique in a run.")
        open_of = [[t for t in group.trajectories if not t.is_finished] for group in groups]
        num_open = {group.id: len(own) for group, own in zip(groups, open_of, strict=True)}
        call = _Call(priority, next(self._numbers), num_open)
        self._calls.add(call)
        most = sum(num_open.values())
        if self._window is not None:  # every worker has some, and the answers to one prompt are together otherwise
            most = max(1, most // (_PARTS_PER_WORKER * len(self._workers)))
        for group, own in zip(groups, open_of, strict=True):
            size = most if group.session is None else len(own)
            for start in range(0, len(own), size):
                part = {trajectory.number: trajectory for trajectory in own[start : start + size]}
                cost = self._expected_tokens(group, own[start])
                self._push(_Part(call, group, part, cost, next(self._numbers)))
        if (error := self._no_replica_left()) is not None:
            call.fail(error)
        self._dispatch()
        return call

    def _expected_tokens(self, group: PromptGroup, trajectory: Trajectory) -> float:
        """Return how many tokens an answer lacks, if it becomes as long as others to prompts of its source."""
        most = group.params.max_new_tokens
        written = len(trajectory.last.token_ids) if trajectory.samples else 0
        return max(1.0, min(most, self._lengths.get(group.prompt.data_source, most)) - written)

    async def _end(self, call: _Call) -> None:
        """Abort what is left of a call. Does nothing when all is written."""
        self._calls.discard(call)
        kept = [part for part in self._waiting if part.call is not call]
        self._waiting, self._waiting_tokens = [], 0.0
        for part in kept:
            self._push(part)
        for task in call.streams:
            task.cancel()
        late: set[asyncio.Task[None]] = set()
        try:
            if call.streams:
                _, late = await asyncio.wait(call.streams, timeout=_ABORT_S)
        finally:  # even if it is cancelled: workers keep no room for a call that has ended
            for worker in self._workers:
                worker.keep([part for part in worker.parts if part.call is not call])
                if late & worker.streams.keys():
                    self._mark_failed(worker.replica, f"it did not abort what it was writing within {_ABORT_S:g} s")
            self._dispatch()

    def _dispatch(self) -> None:
        """Send what waits to workers that have room for it, in lists."""
        workers = [worker for worker in self._workers if not worker.replica.problem]
        if not self._waiting or not workers or self._is_paused or self._is_closed:
            return
        lists: dict[tuple[_Worker, _Call], list[_Part]] = {}
        for worker, part in self._shared_out(workers) if self._window is None else self._chosen(workers, self._window):
            worker.add(part)
            lists.setdefault((worker, part.call), []).append(part)
        for (worker, call), parts in lists.items():
            if not worker.streams:
                worker.heard_at = time.monotonic()
            task = asyncio.create_task(self._receive(worker, call, parts))
            worker.streams[task] = call
            call.streams.add(task)
            task.add_done_callback(worker.streams.pop)
            task.add_done_callback(call.streams.discard)
            if worker.watch is None or worker.watch.done():
                worker.watch = asyncio.create_task(self._watch(worker))

    def _shared_out(self, workers: Sequence[_Worker]) -> Iterator[tuple[_Worker, _Part]]:
        """Share everything out, in the order of the groups, in shares of the same size."""
        parts = sorted(self._waiting, key=lambda part: (part.call.number, part.number))
        self._waiting, self._waiting_tokens = [], 0.0
        for _, own in itertools.groupby(parts, key=lambda part: part.call):
            for worker, share in zip(workers, split_batch(list(own), len(workers)), strict=True):
                yield from ((worker, part) for part in share)

    def _chosen(self, workers: Sequence[_Worker], window: int) -> Iterator[tuple[_Worker, _Part]]:
        """Fill the workers that have room: the next part goes to the one that has the fewest tokens to write."""
        room = {worker: window - worker.num_open for worker in workers}
        load = {worker: worker.num_tokens for worker in workers}
        free = {worker for worker in workers if room[worker] >= max(1, int(window * _LEAST_ROOM))}
        if not free:
            return
        fair = (self._waiting_tokens + sum(load.values())) / len(workers)
        kept = []  # of sessions whose workers have no room
        while self._waiting:
            open_to_more = [worker for worker in workers if worker in free and load[worker] < fair]
            if not open_to_more:
                break
            worker, part = min(open_to_more, key=lambda worker: load[worker]), heapq.heappop(self._waiting)
            self._waiting_tokens -= part.num_tokens
            if (session := part.group.session) is not None:
                before = self._sessions.pop(session, worker)
                worker = before if before in load else worker
                self._sessions[session] = worker  # the sessions that nobody has continued for long are dropped first
                if worker not in free:
                    kept.append(part)
                    continue
            room[worker] -= len(part.open)
            load[worker] += part.num_tokens
            if room[worker] <= 0:
                free.discard(worker)
            yield worker, part
        for part in kept:
            self._push(part)
        for session in list(itertools.islice(self._sessions, max(0, len(self._sessions) - _MOST_SESSIONS))):
            del self._sessions[session]

    async def _receive(self, worker: _Worker, call: _Call, parts: Sequence[_Part]) -> None:
        """Send a worker one list, and take in what it has finished of it."""
        replica = worker.replica
        part_of = {(part.group.id, number): part for part in parts for number in part.open}
        try:
            sent = [with_trajectories(part.group, part.copies()) for part in parts]
            async with aclosing(replica.generate(worker.rank, sent)) as stream:
                async for groups in stream:
                    self._take_in(worker, part_of, groups)
            if any(part in worker.parts for part in parts):
                self._mark_failed(replica, "it left answers out")
        except WorkerError as error:
            if isinstance(error.cause, RolloutError | TrainingError):  # no other replica would do better
                raised = type(error.cause)(f"{replica.name}: {error.cause}")
                raised.__cause__ = error
                call.fail(raised)
            else:
                self._mark_failed(replica, error.message)
        except Exception as error:  # such as a prompt that cannot be pickled: the caller must not wait for ever
            call.fail(error)

    def _take_in(self, worker: _Worker, part_of: dict[tuple[str, int], _Part], groups: Sequence[PromptGroup]) -> None:
        for came, part in ((t, part_of.get((group.id, t.number))) for group in groups for t in group.trajectories):
            if part is None or part not in worker.parts or (own := part.open.pop(came.number, None)) is None:
                continue
            own.samples, own.counts, own.score = came.samples, came.counts, came.score
            worker.num_open -= 1
            worker.num_tokens -= part.cost
            if not part.open:
                worker.parts.remove(part)
            if not own.is_finished:  # the replica aborted it: any worker with room writes it
                self._put_back(replace(part, open={own.number: own}), "abort")
                continue
            self._lengths.add(own.last.prompt.data_source, len(own.last.token_ids))
            call, group = part.call, part.group
            call.num_open[group.id] -= 1
            if not call.num_open[group.id]:
                del call.num_open[group.id]
                call.finished.append(group)
                call.changed.set()
        worker.heard_at = time.monotonic()
        self._dispatch()

    def _push(self, part: _Part) -> None:
        heapq.heappush(self._waiting, part)
        self._waiting_tokens += part.num_tokens

    def _put_back(self, part: _Part, reason: str) -> None:
        part.num_attempts += 1
        # Every replica may fail once for other reasons; after that the group itself is taken for the cause.
        if part.num_attempts == len(self.replicas) + _MORE_ATTEMPTS:
            part.call.fail(
                RolloutError(
                    f"prompt {part.group.prompt.id} was given to replicas {part.num_attempts} times in turn, and none "
                    f"answered it. The last: {reason}"
                )
            )
        elif part.call in self._calls:
            self._push(part)

    async def _watch(self, worker: _Worker) -> None:
        """Find out that a worker does not answer at all, or finishes nothing for too long."""
        while num_open := worker.num_open:
            silent_s = time.monotonic() - worker.heard_at
            if silent_s > self._silence_s and not self._is_paused:
                reason = f"it has not finished an answer for {silent_s:.0f} s, with {num_open} to write"
                return self._mark_failed(worker.replica, reason)
            await asyncio.sleep(min(_PING_EVERY_S, max(0.0, self._silence_s - silent_s) + 0.01))
            if not worker.num_open:  # its replica may sleep by now: a restart would wake it up
                return
            try:
                await worker.replica.ping(worker.rank)
            except WorkerError as error:
                if worker.num_open:
                    self._mark_failed(worker.replica, error.message)
                return

    # Failed replicas

    def _mark_failed(self, replica: RolloutReplica, reason: str) -> None:
        """Restart a replica, and put back all that it had for any worker to write."""
        if replica.problem or self._is_closed:
            return
        if not replica.is_own:
            return self._fail_calls(RolloutError(f"{replica.name} cannot write: {reason}"))
        replica.problem = reason
        for worker in self._workers:
            if worker.replica is replica:
                self._sessions = {session: own for session, own in self._sessions.items() if own is not worker}
                for task in (*worker.streams, *([] if worker.watch is None else [worker.watch])):
                    if task is not asyncio.current_task():
                        task.cancel()
                parts = worker.parts
                worker.keep([])
                for part in parts:
                    self._put_back(part, reason)
        self._begin_restart(replica)
        self._dispatch()

    def _begin_restart(self, replica: RolloutReplica) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if self._restarts.get(replica.number) is task:  # it may have failed again since
                del self._restarts[replica.number]
            if (failure := self._no_replica_left()) is not None:
                self._fail_calls(failure)
            self._dispatch()

        restart = self._restarts[replica.number] = asyncio.create_task(self._restart(replica))
        restart.add_done_callback(ended)  # also called where it is cancelled before it has begun

    async def _restart(self, replica: RolloutReplica) -> None:
        number = replica.number
        while replica.problem and self._num_tries[number] < _MOST_RESTARTS:
            self._num_tries[number] += 1
            log.warning("%s is lost, and others take what it had. Starting it again: %s", replica.name, replica.problem)
            try:
                await replica.restart()
                await replica.wake_up()
                async with self._giving:  # to the end: it must not miss the next weights
                    if self._delivery is not None and self.version >= 0:
                        await self._delivery.send_again(replica, self.version)
                    replica.problem = ""
            except WeightsGone as error:  # newer ones must not go by the old version
                log.warning("%s waits for the next weights: %s", replica.name, error)
                replica.problem = str(error)
                self._late.add(number)
                return
            except Exception as error:  # whatever it was: others may still be able to write
                replica.problem = str(error) if isinstance(error, PracticumError) else repr(error)
        if replica.problem:
            log.warning("%s was lost again and again and stays away: %s", replica.name, replica.problem)

    def _reset_retries(self) -> None:
        """Start replicas again that had failed too often."""
        for replica in self.replicas:
            if replica.number not in self._restarts and replica.number not in self._late:
                self._num_tries[replica.number] = 0
                if replica.problem:
                    self._begin_restart(replica)

    async def _wait_for_restarts(self) -> None:
        while self._restarts:  # each has deadlines of its own
            await asyncio.wait(self._restarts.values())

    def _no_replica_left(self) -> RolloutError | None:
        # New weights, for which late ones wait, are on their way: they are late because the trainer learns.
        if self._restarts or self._late or self.healthy:
            return None
        problems = "; ".join(f"{replica.name}: {replica.problem}" for replica in self.replicas)
        return RolloutError(f"no replica can write any more. {problems}")

    def _fail_calls(self, error: RolloutError) -> None:
        for call in self._calls:
            call.fail(error)

    # Weights, sleep

    async def _give_weights(self, version: int) -> None:
        if self._delivery is None:
            await all_of(replica.update_weights(version) for replica in self.replicas)
            return
        late = [replica for replica in self.replicas if replica.number in self._late]
        self._late.clear()
        failed = await self._delivery.send([*self.healthy, *late], version)
        for replica in late:
            replica.problem = ""
        for replica, problem in failed.items():
            self._mark_failed(replica, problem)

    async def _wake(self, replica: RolloutReplica) -> None:
        try:
            await replica.wake_up()
        except PracticumError as error:
            if not replica.is_own:
                raise
            self._mark_failed(replica, str(error))

    async def _put_to_sleep(self) -> None:
        """Put the replicas to sleep, unless a block of `awake` is open."""
        if self.sleeps and not self._num_awake:
            await self._wait_for_restarts()  # or they would come back awake
            await all_of(self._sleep(own) for own in self.replicas if not own.problem or own.number in self._late)

    async def _sleep(self, replica: RolloutReplica) -> None:
        """Put a replica to sleep, or end it: in either case it holds none of the device."""
        try:
            await replica.sleep()
        except PracticumError as error:
            if not replica.is_own:
                raise
            log.warning("%s is ended, to be started again when needed: it did not fall asleep: %s", replica.name, error)
            replica.problem = str(error)
            self._late.discard(replica.number)
            await replica.end()


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of them, each to its end; then raise the first error."""
    found = await asyncio.gather(*coroutines, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return cast(list[T], found)
