"""The processes of a group: one Ray actor per place of the pool, started by a handshake, watched while they work.

start   hosts ─ seat (node, pid, port) ─▶ places known ─ build (class, arguments, context) ─▶ ready
call    references ─▶ collect: all replies | the first failure, with its rank | the deadline, with all stacks
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.controller.host import Seat, host_class
from practicum.controller.mesh import Mesh
from practicum.controller.packed import RayClassWithInitArgs
from practicum.controller.pool import Place, RayResourcePool
from practicum.controller.stacks import fold_stacks, name_ranks, read_stacks
from practicum.controller.wire import Payload, pack_arguments
from practicum.controller.worker import WorkerContext
from practicum.errors import DeadlineError, NodeLost, WorkerDied, WorkerError

NAMESPACE = "practicum"
# When one rank fails, others often follow at once: its peers in a collective, or all by the same mistake. Waiting this
# long for them tells the one that died from those that only noticed.
_ECHO_S = 0.2


@dataclass(slots=True)
class Crew:
    """What it takes to start the processes, and the processes once started."""

    name: str
    packed: RayClassWithInitArgs[Any]
    pool: RayResourcePool
    use_gpu: bool
    meshes: Mapping[str, Mesh]
    detached: bool
    start_timeout_s: float
    hosts: list[Any] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    _has_place: bool = False
    _dismissed: set[str] = field(default_factory=set)  # actors that were ended on purpose

    def start(self) -> None:
        """Start the processes and build the workers in them; if anything fails, none is left."""
        deadline = time.monotonic() + self.start_timeout_s
        packed = self._pack()
        self.pool.claim(self.name, self.packed.resources)
        self._has_place = True
        try:
            while not self._are_seated(deadline):
                self._kill()
            ranks = range(len(self.hosts))
            packed_ref = ray.put(packed)
            building = [
                host.build_packed.remote(packed_ref, context)
                for host, context in zip(self.hosts, self._contexts(), strict=True)
            ]
            self.collect(building, ranks, f"{self.packed.cls.__name__}.__init__", deadline)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self._kill()
        if self._has_place:
            self._has_place = False
            self.pool.vacate(self.name)

    def collect(self, refs: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        """All replies in order. Ray gives up the wait at the first failure, whoever else is still busy."""
        try:
            replies: list[Any] = ray.get(list(refs), timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise self._late(refs, ranks, what) from None
        except RayError as error:
            raise self._first_failure(refs, ranks, what, error) from None
        return replies

    def stacks(self) -> dict[int, str]:
        """What the process of each rank is doing now."""
        return read_stacks({rank: seat.stack for rank, seat in enumerate(self.seats)})

    def whereabouts(self, rank: int) -> str:
        return f"rank {rank} ({self.seats[rank]})" if self.seats else f"rank {rank}"

    def _kill(self) -> None:
        if ray.is_initialized():  # else they have ended with it
            for host in self.hosts:
                ray.kill(host)
        self._dismissed |= {host._actor_id.hex() for host in self.hosts}
        self.hosts, self.seats = [], []

    def _are_seated(self, deadline: float) -> bool:
        """Start the processes. False if a node turns out to be gone: Ray, which takes seconds to notice, then looks
        for another."""
        self.pool.wait_until_whole(deadline)
        actor = ray.remote(host_class(self.packed))
        self.hosts = [self._host(actor, rank, place) for rank, place in enumerate(self.pool.places)]
        try:
            seats = [host.seat.remote() for host in self.hosts]
            self.seats = self.collect(seats, range(len(seats)), "the start of its process", deadline)
        except NodeLost:
            return False
        return True

    def _pack(self) -> Payload:
        packed = self.packed
        return pack_arguments(packed, f"{packed.cls.__name__}.__init__", packed.by_name)

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
                place.ground.group, placement_group_bundle_index=place.bundle
            ),
            **options,
        ).remote(sys.path)

    def _contexts(self) -> list[WorkerContext]:
        on_node = Counter(seat.node_id for seat in self.seats)
        node_ranks = {node: index for index, node in enumerate(on_node)}  # in the order of their first rank
        next_local_rank = {node: itertools.count() for node in on_node}
        return [
            WorkerContext(
                group=self.name,
                rank=rank,
                world_size=len(self.seats),
                local_rank=next(next_local_rank[seat.node_id]),
                local_world_size=on_node[seat.node_id],
                node_rank=node_ranks[seat.node_id],
                master_address=self.seats[0].address,
                master_port=self.seats[0].free_port,
                meshes=self.meshes,
            )
            for rank, seat in enumerate(self.seats)
        ]

    def _late(self, refs: Sequence[Any], ranks: Sequence[int], what: str) -> WorkerError:
        _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        unanswered = set(pending) or {refs[-1]}  # the last may have come in just now: late all the same
        late = [rank for ref, rank in zip(refs, ranks, strict=True) if ref in unanswered]
        stacks = self.stacks()
        shown = f" What they were doing:\n{fold_stacks(stacks)}" if stacks else ""
        return DeadlineError(
            f"group {self.name!r}: {what} passed its deadline; no answer from "
            f"{', '.join(map(self.whereabouts, late))}.{shown}",
            group=self.name,
            ranks=late,
            stacks=stacks,
        )

    def _first_failure(self, refs: Sequence[Any], ranks: Sequence[int], what: str, error: RayError) -> WorkerError:
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ECHO_S)
        rank_of = dict(zip(refs, ranks, strict=True))
        failures = [failure for ref in ready if (failure := self._failure(ref, rank_of[ref], what))]
        if not failures:  # what Ray could not fetch a moment ago it can now
            return self._error(f"or another rank could not hand over the answer of {what}: {error}", ranks[0])
        failures.sort(key=lambda failure: (not isinstance(failure, WorkerDied), failure.ranks))
        return _with_company(failures)

    def _failure(self, ref: Any, rank: int, what: str) -> WorkerError | None:
        try:
            ray.get(ref)
        except RayActorError as error:
            return self._death(error, rank, what)
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                return error.cause
            if isinstance(error.cause, RayActorError):
                return self._death(error.cause, rank, what)
            # Raised around the method, not in it.
            doing = f"take the arguments or hand over the answer of {what}"
            return self._error(f"could not {doing}: {type(error.cause).__name__}: {error.cause}", rank, str(error))
        except RayError as error:
            return self._error(f"could not run {what}: {error}", rank)
        return None

    def _death(self, error: RayActorError, rank: int, what: str) -> WorkerError:
        if error.actor_id in self._dismissed:
            text = f"group {self.name!r}: rank {rank} was ended by a restart or shutdown before it answered {what}"
            return WorkerDied(text, group=self.name, ranks=[rank])
        if error.actor_id not in {None, *(host._actor_id.hex() for host in self.hosts)}:
            return self._error(f"did not get the arguments of {what}: the worker they come from has died", rank)
        seat = self.seats[rank] if self.seats else None
        lost = _is_node_lost(error)
        reason = (
            "its node is gone or cannot be reached" if lost else "its process was killed, ran out of memory or crashed"
        )
        return (NodeLost if lost else WorkerDied)(
            f"group {self.name!r}: {self.whereabouts(rank)} died during {what}: {reason}. "
            "restart() brings the group back.",
            group=self.name,
            ranks=[rank],
            node=seat.address if seat else None,
            pid=seat.pid if seat else None,
        )

    def _error(self, text: str, rank: int, remote_traceback: str | None = None) -> WorkerError:
        message = f"group {self.name!r}: {self.whereabouts(rank)} {text}"
        return WorkerError(message, group=self.name, ranks=[rank], remote_traceback=remote_traceback)


def actor_name(group: str, rank: int) -> str:
    return f"{group}/{rank}"


def _with_company(failures: Sequence[WorkerError]) -> WorkerError:
    """The first failure; if others failed in the same way, it names them too."""
    first = failures[0]
    same = {
        rank for other in failures if (type(other), other.group) == (type(first), first.group) for rank in other.ranks
    }
    same -= set(first.ranks)
    if same:
        first.ranks = (*first.ranks, *sorted(same))
        first.message += f" [{name_ranks(same)} failed too]"
        first.args = (first.message,)
    return first


def _is_node_lost(error: RayActorError) -> bool:
    """Ray first only knows that nobody answers on the other machine, and later that its node is dead."""
    return isinstance(error, ActorUnavailableError) or "because its node has died" in str(error)
