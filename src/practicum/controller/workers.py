"""The processes of a group: one Ray actor per place of the pool, started by a handshake, watched while they work.

    start      hosts ─ locate (node, pid, port) ─▶ locations known ─ build (class, arguments, context) ─▶ WorkerSet
    collect    references ─▶ all replies | the first failure, with its rank | the deadline, with all stacks

A worker set is known to others only once it is complete, and never changes: a group that restarts gets another one, and
calls under way keep the one they were made to.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)  # fmt: skip
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.controller.cluster import check_not_lost, cluster_id, is_lost
from practicum.controller.host import CallId, Location, host_class, is_async
from practicum.controller.pool import Place, RayResourcePool
from practicum.controller.stacks import fold_stacks, name_ranks, read_stacks
from practicum.controller.wire import pack_arguments
from practicum.controller.worker import Mesh, RayClassWithInitArgs, WorkerContext
from practicum.errors import DeadlineError, NodeLost, ResourceError, WorkerDied, WorkerError

# When one rank fails, others often follow: its peers in a collective, or all by the same mistake. Waiting this long for
# them tells the one that died from those that only noticed.
_ECHO_S = 0.4
_ARRIVAL_S = 5.0  # for a reply that is there to reach the driver
_LOOK_EVERY_S = 2.0  # whether Ray is still there
_MOST_RANKS_NAMED = 8
_NAMESPACE = "practicum"
_PREFIX = "group/"
_MOST_KILL_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSetPlan:
    """All it takes to start the processes of a group, once or again."""

    name: str
    packed: RayClassWithInitArgs[Any]
    pool: RayResourcePool
    use_gpu: bool
    meshes: Mapping[str, Mesh]
    detached: bool
    start_timeout_s: float

    async def start(self) -> WorkerSet:
        """Start the processes and build the workers in them. If anything fails, or it is cancelled, none is left."""
        workers = WorkerSet(self)
        if self.detached:
            await asyncio.to_thread(_end_what_was_abandoned, self.name)
            if _is_taken(self.name):
                raise ResourceError(f"a detached group {self.name!r} runs already: attach to it, or shut it down first")
            workers.write_down()
        try:
            await self._start(workers)
            if self.detached:
                workers.write_down()
        except BaseException:
            workers.end()
            if self.detached:
                _internal_kv_del(_PREFIX + self.name, namespace=_NAMESPACE)
            raise
        return workers

    async def _start(self, workers: WorkerSet) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        init = f"{self.packed.cls.__name__}.__init__"
        payload = pack_arguments(self.packed, init, self.packed.by_name)
        self.pool.claim(self.name, self.packed.resources)
        workers.has_places = True
        while not await self._locate(workers, deadline):
            workers.kill()
        shared = ray.put(payload)
        building = [
            host.build_packed.remote(shared, context)
            for host, context in zip(workers.hosts, self._contexts(workers.locations), strict=True)
        ]
        await workers.arrive(building, range(len(building)), init, deadline)

    async def _locate(self, workers: WorkerSet, deadline: float) -> bool:
        """Start processes and ask each where it came up. Return False if a node turns out to be gone: Ray, which takes
        seconds to notice, then looks for another."""
        await self.pool.wait_until_whole(deadline)
        if self.detached:
            await asyncio.to_thread(_wait_until_free, self.name, deadline)
        actor = ray.remote(host_class(self.packed))
        workers.hosts = []
        for rank, place in enumerate(self.pool.places):
            workers.hosts.append(self._host(actor, rank, place))
        asked = [host.locate.remote() for host in workers.hosts]
        try:
            workers.locations = await workers.arrive(asked, range(len(asked)), "the start of its process", deadline)
        except NodeLost:
            return False
        return True

    def _host(self, actor: Any, rank: int, place: Place) -> Any:
        packed, pool = self.packed, self.pool
        options: dict[str, Any] = dict(packed.ray_options)
        if packed.env:
            runtime_env = dict(options.get("runtime_env", {}))
            options["runtime_env"] = {**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **packed.env}}
        if self.detached:
            options |= {"name": _actor_name(self.name, rank), "namespace": _NAMESPACE, "lifetime": "detached"}
        return actor.options(
            num_cpus=pool.share("CPU"),
            num_gpus=pool.share("GPU") if self.use_gpu else 0,
            resources=dict(packed.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place.reservation.group, placement_group_bundle_index=place.bundle
            ),
            **options,
        ).remote(sys.path)

    def _contexts(self, locations: Sequence[Location]) -> list[WorkerContext]:
        on_node = Counter(location.node_id for location in locations)
        node_ranks = {node: index for index, node in enumerate(on_node)}  # in the order of their first rank
        next_local_rank = {node: itertools.count() for node in on_node}
        return [
            WorkerContext(
                group=self.name,
                rank=rank,
                world_size=len(locations),
                local_rank=next(next_local_rank[location.node_id]),
                local_world_size=on_node[location.node_id],
                node_rank=node_ranks[location.node_id],
                master_address=locations[0].address,
                master_port=locations[0].master_port,
                meshes=self.meshes,
            )
            for rank, location in enumerate(locations)
        ]


class WorkerSet:
    """Processes that were started together; without `hosts` while they start.

    A detached group's is written down under its name before its processes start, and again when they are there:
    whatever becomes of its driver, another can find and end them.
    """

    def __init__(
        self,
        plan: WorkerSetPlan,
        hosts: Sequence[Any] = (),
        locations: Sequence[Location] = (),
        set_id: str = "",
        created_at: float = 0.0,
    ) -> None:
        self.plan = plan
        self.hosts = list(hosts)
        self.locations = list(locations)
        self.id = set_id or uuid.uuid4().hex
        self.created_at = created_at or time.time()  # since the epoch, which drivers on several machines roughly share
        self.is_async = is_async(plan.packed)
        self.has_places = bool(hosts)  # in the pool
        self._cluster = cluster_id()
        self._caller = uuid.uuid4().hex
        self._num_sent: Counter[int] = Counter()

    def __reduce__(self) -> Any:
        """Restore the worker set in another driver of the same cluster."""
        return WorkerSet, (self.plan, self.hosts, self.locations, self.id, self.created_at)

    def write_down(self) -> None:
        """Enter the group in Ray's key-value store."""
        _internal_kv_put(_PREFIX + self.plan.name, cloudpickle.dumps(self), namespace=_NAMESPACE)

    @classmethod
    def find(cls, name: str) -> WorkerSet:
        """Return the worker set of a detached group, which another driver of this cluster has started."""
        found = _written_down(name)
        if found is None:
            keys = _internal_kv_list(_PREFIX, namespace=_NAMESPACE)
            known = ", ".join(sorted(key.decode().removeprefix(_PREFIX) for key in keys)) or "none"
            raise ResourceError(f"no detached group {name!r} runs in this cluster; those written down: {known}")
        if not _is_taken(name):
            raise ResourceError(f"detached group {name!r} was started in this cluster, but its workers are gone")
        if not found.hosts:
            raise ResourceError(f"detached group {name!r} is not ready: its start has not ended, or was cut off")
        return found

    def end(self) -> None:
        """Kill the processes and leave the pool. Safe to call twice."""
        if self.has_places:
            self.has_places = False
            self.plan.pool.vacate(self.plan.name)
            self.kill()

    def end_detached(self) -> None:
        """End a detached group, unless another driver has restarted it meanwhile."""
        name = self.plan.name
        current = _written_down(name)
        if current is not None and current.id != self.id:
            raise WorkerDied(
                f"detached group {name!r} was started anew by another driver: attach to it again",
                group=name,
                ranks=range(len(self.hosts)),
            )
        self.end()
        _wait_until_free(name, time.monotonic() + _MOST_KILL_S)
        _internal_kv_del(_PREFIX + name, namespace=_NAMESPACE)

    def kill(self) -> None:
        if self.is_reachable and not is_lost():  # else they have ended with their cluster, or end when Ray does
            for host in self.hosts:
                ray.kill(host)

    @property
    def is_reachable(self) -> bool:
        """Return whether the driver is still connected to the cluster the processes are in."""
        return ray.is_initialized() and self._cluster == cluster_id()

    def stacks(self) -> dict[int, str]:
        """Return what the process of each rank is doing now."""
        return read_stacks({rank: location.stack for rank, location in enumerate(self.locations)})

    def send(self, rank: int, method: str, arguments: Sequence[Any]) -> tuple[Any, CallId | None]:
        """Call a method of a host. Return the reference for `collect` or `arrive` and, of async hosts, the id of the
        call for `cancel`. Two threads must not send to one rank at a time."""
        remote = getattr(self.hosts[rank], method).remote
        if not self.is_async:
            return remote(*arguments), None
        call_id = self._caller, self._num_sent[rank]
        handle = remote(call_id, arguments) if arguments else remote(call_id)
        self._num_sent[rank] += 1  # now that it is certain to arrive
        return handle, call_id

    def collect(self, refs: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """Return all replies in order, or raise the first failure at once, even while other ranks are busy."""
        if not self.is_reachable:
            raise WorkerDied(f"group {self.plan.name!r}: its Ray has ended, and {what} with it", **self._of(ranks))
        check_not_lost(f"group {self.plan.name!r}: {what}")
        # Replies that are there at the deadline may still be on their way from other nodes.
        for timeout_s in (max(0.0, deadline - time.monotonic()), _ARRIVAL_S):
            try:
                return list(ray.get(list(refs), timeout=timeout_s))
            except GetTimeoutError:
                pending = set(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[1])
                if pending:
                    raise self.late([r for ref, r in zip(refs, ranks, strict=True) if ref in pending], what) from None
            except RayError as error:
                raise self._first_failure(refs, ranks, what, error) from None
        raise self.late(ranks, f"{what} is done, but the way of its replies")

    async def arrive(self, refs: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """Do what `collect` does without blocking; another thread finds out what a failure or a deadline means."""
        if self.is_reachable:
            replies = [asyncio.wrap_future(ref.future()) for ref in refs]
            for reply in replies:
                reply.add_done_callback(_retrieve_exception)
            left_s = deadline - time.monotonic()
            waiting: set[asyncio.Future[Any]] = set(replies)
            while waiting and left_s > 0 and not any(reply.done() and reply.exception() for reply in replies):
                check_not_lost(f"group {self.plan.name!r}: {what}")
                within_s = min(left_s, _LOOK_EVERY_S)
                _, waiting = await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
                left_s = deadline - time.monotonic()
            if all(reply.done() and reply.exception() is None for reply in replies):
                return [reply.result() for reply in replies]
            if any(reply.done() and reply.exception() for reply in replies):
                deadline += _ECHO_S  # it was a failure, not the deadline, that ended the wait
        return await asyncio.to_thread(self.collect, refs, ranks, what, deadline)

    def late(self, ranks: Sequence[int], what: str) -> WorkerError:
        """Return the error for a deadline that has passed, with the stacks of all ranks."""
        stacks = self.stacks()
        shown = f" What they were doing:\n{fold_stacks(stacks)}" if stacks else ""
        return DeadlineError(
            f"group {self.plan.name!r}: {what} passed its deadline; no answer from {self._whereabouts(ranks)}.{shown}",
            stacks=stacks,
            **self._of(ranks),
        )

    def _of(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return who an error is about."""
        location = self.locations[ranks[0]] if self.locations and len(ranks) == 1 else None
        place = {"node": location.address, "pid": location.pid} if location else {}
        return {"group": self.plan.name, "ranks": ranks, **place}

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        if not self.locations or len(ranks) > _MOST_RANKS_NAMED:
            return name_ranks(ranks)
        return ", ".join(f"rank {rank} ({self.locations[rank]})" for rank in ranks)

    def _first_failure(self, refs: Sequence[Any], ranks: Sequence[int], what: str, first: RayError) -> WorkerError:
        check_not_lost(f"group {self.plan.name!r}: {what}")
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ECHO_S, fetch_local=False)
        rank_of = dict(zip(refs, ranks, strict=True))
        failures = []
        for ref in ready:
            try:
                ray.get(ref, timeout=_ARRIVAL_S)
            except RayError as error:
                failures.append(self._failure(error, rank_of[ref], what))
        if not failures:  # what Ray could not fetch a moment ago it can now
            return WorkerError(f"group {self.plan.name!r}: {what} failed: {first}", **self._of(ranks))
        cause = getattr(first, "cause", None)
        came_first = cause.ranks if isinstance(cause, WorkerError) else ()
        # A death explains what others raise; of those who raised, the one that did so first explains the most.
        failures.sort(key=lambda one: (not isinstance(one, WorkerDied), one.ranks != came_first, one.ranks))
        return _with_others(failures)

    def _failure(self, error: RayError, rank: int, what: str) -> WorkerError:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, WorkerError):
            return cause
        if isinstance(cause, RayActorError | OutOfMemoryError):
            return self._death(cause, rank, what)
        if isinstance(error, RayTaskError):  # raised around the method, not in it
            doing = f"take the arguments or hand over the answer of {what}"
            return self._error(f"could not {doing}: {type(cause).__name__}: {cause}", rank, error)
        return self._error(f"could not run {what}: {error}", rank, error)

    def _death(self, error: RayError, rank: int, what: str) -> WorkerError:
        actor_id = getattr(error, "actor_id", None)
        if actor_id is not None and actor_id not in [host._actor_id.hex() for host in self.hosts]:
            return self._error(f"did not get the arguments of {what}: the worker they come from has died", rank, error)
        if not self.has_places:
            text = f"group {self.plan.name!r}: rank {rank} was ended by a restart or shutdown before it answered {what}"
            return WorkerDied(text, **self._of([rank]))
        kind, reason = WorkerDied, "its process was killed, ran out of memory or crashed"
        if not self.plan.pool.is_held:
            reason = "its pool was released"
        # Ray first only knows that nobody answers on the other machine, and later that its node is dead.
        elif isinstance(error, ActorUnavailableError) or "because its node has died" in str(error):
            kind, reason = NodeLost, "its node is gone or cannot be reached"
        elif isinstance(error, OutOfMemoryError):
            reason = "its process was ended because its node ran out of memory"
        text = f"group {self.plan.name!r}: {self._whereabouts([rank])} died during {what}: {reason}."
        death = kind(text, remote_traceback=str(error), **self._of([rank]))
        death.add_note("A group of your own is started anew by its `restart()`.")  # in tracebacks only
        return death

    def _error(self, text: str, rank: int, error: RayError) -> WorkerError:
        message = f"group {self.plan.name!r}: {self._whereabouts([rank])} {text}"
        return WorkerError(message, remote_traceback=str(error), **self._of([rank]))


def _with_others(failures: Sequence[WorkerError]) -> WorkerError:
    """Return the first failure. It names the ranks that failed like it, and carries all other failures."""
    first, *others = failures
    alike = [other for other in others if (type(other), other.group) == (type(first), first.group)]
    same = {rank for other in alike for rank in other.ranks} - set(first.ranks)
    first.others = tuple(others)
    if first.remote_traceback:
        first.add_note(f"On the worker:\n{first.remote_traceback}")
    if same:
        first.ranks = (*first.ranks, *sorted(same))
        first.message += f" [{name_ranks(sorted(same))} failed too]"
        first.args = (first.message,)
    return first


def _retrieve_exception(reply: asyncio.Future[Any]) -> None:
    """Retrieve the exception: asyncio logs one that nobody has retrieved."""
    if not reply.cancelled():
        reply.exception()


def _written_down(name: str) -> WorkerSet | None:
    record = _internal_kv_get(_PREFIX + name, namespace=_NAMESPACE)
    found: WorkerSet | None = None if record is None else pickle.loads(record)
    return found


def _end_what_was_abandoned(name: str) -> None:
    """End the processes of a driver that was killed while it started a detached group."""
    left = _written_down(name)
    if left is None or left.hosts or time.time() < left.created_at + left.plan.start_timeout_s:
        return
    for rank in range(left.plan.pool.world_size):
        with suppress(ValueError):  # it did not get that far
            ray.kill(ray.get_actor(_actor_name(name, rank), namespace=_NAMESPACE))
    _wait_until_free(name, time.monotonic() + _MOST_KILL_S)
    left.plan.pool.release()


def _actor_name(group: str, rank: int) -> str:
    return f"{group}/{rank}"


def _is_taken(name: str) -> bool:
    """Return whether workers of a detached group of that name live."""
    try:
        ray.get_actor(_actor_name(name, 0), namespace=_NAMESPACE)
    except ValueError:
        return False
    return True


def _wait_until_free(name: str, deadline: float) -> None:
    """Wait until Ray has ended the workers of a detached group that were just killed."""
    while _is_taken(name):
        if time.monotonic() > deadline:
            raise ResourceError(f"the workers of detached group {name!r} do not end, so that its name stays taken")
        time.sleep(0.02)
