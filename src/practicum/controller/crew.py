"""The processes of a group: one Ray actor per place of the pool, started by a handshake, watched while they work.

    CrewPlan.start   hosts ─ seat (node, pid, port) ─▶ places known ─ build (class, arguments, context) ─▶ Crew
    Crew.collect     references ─▶ all replies | the first failure, with its rank | the deadline, with all stacks

A crew is known to others only once it is complete, and never changes: a group that restarts gets another one, and calls
under way keep the one they were made to.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.controller.cluster import cluster_id
from practicum.controller.host import Seat, Turn, host_class, is_async
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs
from practicum.controller.pool import Place, RayResourcePool
from practicum.controller.stacks import fold_stacks, name_ranks, read_stacks
from practicum.controller.wire import pack_arguments
from practicum.controller.worker import WorkerContext
from practicum.errors import DeadlineError, NodeLost, ResourceError, WorkerDied, WorkerError

NAMESPACE = "practicum"
# When one rank fails, others often follow: its peers in a collective, or all by the same mistake. Waiting this long for
# them tells the one that died from those that only noticed.
_ECHO_S = 0.4
_ARRIVAL_S = 5.0  # for a reply that is there to reach the driver
_MOST_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class CrewPlan:
    """All it takes to start the processes of a group, once or again."""

    name: str
    packed: RayClassWithInitArgs[Any]
    pool: RayResourcePool
    use_gpu: bool
    meshes: Mapping[str, Mesh]
    detached: bool
    start_timeout_s: float

    def start(self) -> Crew:
        """Start the processes and build the workers in them; if anything fails, none is left."""
        deadline = time.monotonic() + self.start_timeout_s
        init = f"{self.packed.cls.__name__}.__init__"
        payload = pack_arguments(self.packed, init, self.packed.by_name)
        self.pool.claim(self.name, self.packed.resources)
        crew = Crew(self, [], [])
        try:
            while not (crew := self._seated(deadline)).seats:
                crew.kill()
            shared = ray.put(payload)
            building = [
                host.build_packed.remote(shared, context)
                for host, context in zip(crew.hosts, self._contexts(crew.seats), strict=True)
            ]
            crew.collect(building, range(len(building)), init, deadline)
            return crew
        except BaseException:
            crew.end()
            raise

    def _seated(self, deadline: float) -> Crew:
        """Processes that have told where they came up. Without seats if a node turns out to be gone: Ray, which takes
        seconds to notice, then looks for another."""
        self.pool.wait_until_whole(deadline)
        if self.detached:
            wait_until_free(self.name, deadline)
        actor = ray.remote(host_class(self.packed))
        crew = Crew(self, [], [])
        try:
            for rank, place in enumerate(self.pool.places):
                crew.hosts.append(self._host(actor, rank, place))
            asked = [host.seat.remote() for host in crew.hosts]
            return Crew(self, crew.hosts, crew.collect(asked, range(len(asked)), "the start of its process", deadline))
        except NodeLost:
            return crew
        except BaseException:
            crew.kill()
            raise

    def _host(self, actor: Any, rank: int, place: Place) -> Any:
        packed, pool = self.packed, self.pool
        options: dict[str, Any] = dict(packed.ray_options)
        if packed.env:
            runtime_env = dict(options.get("runtime_env", {}))
            options["runtime_env"] = {**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **packed.env}}
        if self.detached:
            options |= {"name": actor_name(self.name, rank), "namespace": NAMESPACE, "lifetime": "detached"}
        return actor.options(
            num_cpus=pool.share("CPU"),
            num_gpus=pool.share("GPU") if self.use_gpu else 0,
            resources=dict(packed.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place.ground.reserved, placement_group_bundle_index=place.bundle
            ),
            **options,
        ).remote(sys.path)

    def _contexts(self, seats: Sequence[Seat]) -> list[WorkerContext]:
        on_node = Counter(seat.node_id for seat in seats)
        node_ranks = {node: index for index, node in enumerate(on_node)}  # in the order of their first rank
        next_local_rank = {node: itertools.count() for node in on_node}
        return [
            WorkerContext(
                group=self.name,
                rank=rank,
                world_size=len(seats),
                local_rank=next(next_local_rank[seat.node_id]),
                local_world_size=on_node[seat.node_id],
                node_rank=node_ranks[seat.node_id],
                master_address=seats[0].address,
                master_port=seats[0].free_port,
                meshes=self.meshes,
            )
            for rank, seat in enumerate(seats)
        ]


class Crew:
    """Processes that were started together."""

    def __init__(self, plan: CrewPlan, hosts: list[Any], seats: list[Seat]) -> None:
        self.plan = plan
        self.hosts = hosts
        self.seats = seats
        self.id = uuid.uuid4().hex
        self._cluster = cluster_id()
        self._is_dismissed = False
        self._caller = uuid.uuid4().hex
        self._num_sent = [0] * len(hosts)

    @classmethod
    def found(cls, plan: CrewPlan, hosts: list[Any], seats: list[Seat], crew_id: str) -> Crew:
        """A crew that another driver has started."""
        crew = cls(plan, hosts, seats)
        crew.id = crew_id
        return crew

    def end(self) -> None:
        """Kill the processes and leave the pool. Safe to call twice."""
        if not self._is_dismissed:
            self._is_dismissed = True
            self.plan.pool.vacate(self.plan.name)
            self.kill()

    def kill(self) -> None:
        if self.is_reachable:  # else they have ended with their cluster
            for host in self.hosts:
                ray.kill(host)

    def send(self, rank: int, method: str, arguments: Sequence[Any]) -> tuple[Any, Turn | None]:
        """Call a method of a host; `collect` and `arrive` take what comes back. With it comes, where hosts are async,
        by what `cancel` knows the call. Calls of two threads must not be sent to one rank at a time."""
        remote = getattr(self.hosts[rank], method).remote
        if not self.is_async:
            return remote(*arguments), None
        turn = self._caller, self._num_sent[rank]
        handle = remote(turn, arguments) if arguments else remote(turn)
        self._num_sent[rank] += 1  # now that it is certain to arrive
        return handle, turn

    @cached_property
    def is_async(self) -> bool:
        return is_async(self.plan.packed)

    @property
    def is_reachable(self) -> bool:
        """Whether the driver is still connected to the cluster the processes are in."""
        return ray.is_initialized() and self._cluster == cluster_id()

    def collect(self, refs: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """All replies in order. Ray gives up the wait at the first failure, whoever else is still busy."""
        self._check_reachable(ranks, what)
        try:
            return list(ray.get(list(refs), timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            unanswered = self._pending(refs)
            if not unanswered:  # they have come just now, or are on their way from other nodes
                return self._arriving(refs, ranks, what)
            raise self.late([r for ref, r in zip(refs, ranks, strict=True) if ref in unanswered], what) from None
        except RayError as error:
            raise self._first_failure(refs, ranks, what, error) from None

    async def arrive(self, refs: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """The same as `collect`, awaited."""
        self._check_reachable(ranks, what)
        replies = [asyncio.wrap_future(ref.future()) for ref in refs]
        for reply in replies:
            reply.add_done_callback(_heed)
        left_s = max(0.0, deadline - time.monotonic())
        await asyncio.wait(replies, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        first = next(
            (error for reply in replies if reply.done() and isinstance(error := reply.exception(), RayError)), None
        )
        if first is not None:
            await asyncio.wait(replies, timeout=_ECHO_S)
        elif not all(reply.done() for reply in replies) and not self._pending(refs):
            await asyncio.wait(replies, timeout=_ARRIVAL_S)
        ended = [(rank, reply.exception()) for rank, reply in zip(ranks, replies, strict=True) if reply.done()]
        failures = [(rank, error) for rank, error in ended if isinstance(error, RayError)]
        if failures:
            raise self._named(failures, what, first or failures[0][1], ranks) from None
        late = [rank for rank, reply in zip(ranks, replies, strict=True) if not reply.done()]
        if late:
            raise await asyncio.to_thread(self.late, late, what)
        return [reply.result() for reply in replies]

    def _pending(self, refs: Sequence[Any]) -> set[Any]:
        return set(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[1])

    def _check_reachable(self, ranks: Sequence[int], what: str) -> None:
        if not self.is_reachable:
            raise WorkerDied(f"group {self.plan.name!r}: its Ray has ended, and {what} with it", **self._of(ranks))

    def _arriving(self, refs: Sequence[Any], ranks: Sequence[int], what: str) -> list[Any]:
        try:
            return list(ray.get(list(refs), timeout=_ARRIVAL_S))
        except GetTimeoutError:
            raise self.late(ranks, f"{what} is done, but the way of its replies") from None
        except RayError as error:
            raise self._first_failure(refs, ranks, what, error) from None

    def stacks(self) -> dict[int, str]:
        """What the process of each rank is doing now."""
        return read_stacks({rank: seat.stack for rank, seat in enumerate(self.seats)})

    @cached_property
    def _actor_ids(self) -> frozenset[str]:
        return frozenset(host._actor_id.hex() for host in self.hosts)

    def _of(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Who an error is about."""
        seat = self.seats[ranks[0]] if self.seats and len(ranks) == 1 else None
        place = {"node": seat.address, "pid": seat.pid} if seat else {}
        return {"group": self.plan.name, "ranks": ranks, **place}

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        if not self.seats or len(ranks) > _MOST_RANKS_NAMED:
            return name_ranks(ranks)
        return ", ".join(f"rank {rank} ({self.seats[rank]})" for rank in ranks)

    def late(self, ranks: Sequence[int], what: str) -> WorkerError:
        stacks = self.stacks()
        shown = f" What they were doing:\n{fold_stacks(stacks)}" if stacks else ""
        return DeadlineError(
            f"group {self.plan.name!r}: {what} passed its deadline; no answer from {self._whereabouts(ranks)}.{shown}",
            stacks=stacks,
            **self._of(ranks),
        )

    def _first_failure(self, refs: Sequence[Any], ranks: Sequence[int], what: str, first: RayError) -> WorkerError:
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ECHO_S, fetch_local=False)
        rank_of = dict(zip(refs, ranks, strict=True))
        failures = []
        for ref in ready:
            try:
                ray.get(ref, timeout=_ARRIVAL_S)
            except RayError as error:
                failures.append((rank_of[ref], error))
        return self._named(failures, what, first, ranks)

    def _named(
        self, errors: Sequence[tuple[int, RayError]], what: str, first: RayError, ranks: Sequence[int]
    ) -> WorkerError:
        """The error that tells of what Ray raised for some ranks; `first` came before all others."""
        failures = [self._failure(error, rank, what) for rank, error in errors]
        if not failures:  # what Ray could not fetch a moment ago it can now
            return WorkerError(f"group {self.plan.name!r}: {what} failed: {first}", **self._of(ranks))
        cause = getattr(first, "cause", None)
        came_first = cause.ranks if isinstance(cause, WorkerError) else ()
        # A death explains what others raise; of those who raised, the one that did so first explains the most.
        failures.sort(key=lambda one: (not isinstance(one, WorkerDied), one.ranks != came_first, one.ranks))
        return _with_company(failures)

    def _failure(self, error: RayError, rank: int, what: str) -> WorkerError:
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
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
        if actor_id is not None and actor_id not in self._actor_ids:
            return self._error(f"did not get the arguments of {what}: the worker they come from has died", rank, error)
        if self._is_dismissed:
            text = f"group {self.plan.name!r}: rank {rank} was ended by a restart or shutdown before it answered {what}"
            return WorkerDied(text, **self._of([rank]))
        kind, reason = WorkerDied, "its process was killed, ran out of memory or crashed"
        if not self.plan.pool.is_held:
            reason = "its pool was released"
        elif _is_node_lost(error):
            kind, reason = NodeLost, "its node is gone or cannot be reached"
        elif isinstance(error, OutOfMemoryError):
            reason = "its process was ended because its node ran out of memory"
        return kind(
            f"group {self.plan.name!r}: {self._whereabouts([rank])} died during {what}: {reason}. "
            "restart() brings the group back.",
            remote_traceback=str(error),
            **self._of([rank]),
        )

    def _error(self, text: str, rank: int, error: RayError) -> WorkerError:
        message = f"group {self.plan.name!r}: {self._whereabouts([rank])} {text}"
        return WorkerError(message, remote_traceback=str(error), **self._of([rank]))


def actor_name(group: str, rank: int) -> str:
    """Under which Ray knows a worker of a detached group."""
    return f"{group}/{rank}"


def is_taken(name: str) -> bool:
    """Whether workers of a detached group of that name live."""
    try:
        ray.get_actor(actor_name(name, 0), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def wait_until_free(name: str, deadline: float) -> None:
    """Until Ray has let go of the workers of a detached group that were just killed."""
    while is_taken(name):
        if time.monotonic() > deadline:
            raise ResourceError(f"the workers of detached group {name!r} do not end, so that its name stays taken")
        time.sleep(0.02)


def _heed(reply: asyncio.Future[Any]) -> None:
    """Else asyncio complains of a failure that nobody asked for."""
    if not reply.cancelled():
        reply.exception()


def _with_company(failures: Sequence[WorkerError]) -> WorkerError:
    """The first failure; it names those who failed like it, and carries them all."""
    first, *others = failures
    same = {
        rank for other in others if (type(other), other.group) == (type(first), first.group) for rank in other.ranks
    }
    same -= set(first.ranks)
    first.others = tuple(others)
    if first.remote_traceback:
        first.add_note(f"On the worker:\n{first.remote_traceback}")
    if same:
        first.ranks = (*first.ranks, *sorted(same))
        first.message += f" [{name_ranks(sorted(same))} failed too]"
        first.args = (first.message,)
    return first


def _is_node_lost(error: RayError) -> bool:
    """Ray first only knows that nobody answers on the other machine, and later that its node is dead."""
    return isinstance(error, ActorUnavailableError) or "because its node has died" in str(error)
