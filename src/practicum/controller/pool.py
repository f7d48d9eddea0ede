"""Places reserved in the Ray cluster: one placement group per node, held until released."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from practicum.controller.cluster import (
    check_not_lost,
    cluster_id,
    could_hold,
    describe_nodes,
    ends_with_driver,
    ensure_ray,
    is_lost,
    living_nodes,
)
from practicum.errors import CallError, ResourceError

_LOOK_EVERY_S = 0.02


@dataclass(slots=True)
class Reservation:
    """A placement group on one node."""

    group: PlacementGroup
    size: int
    is_held: bool = True

    def is_ready(self) -> bool:
        """Return whether its places are there. Ray's own wait for them counts whole seconds and ignores Ctrl-C."""
        return ray.is_initialized() and bool(self.group.wait(0))  # else it would start a Ray

    def release(self) -> None:
        if self.is_held and ray.is_initialized() and not is_lost():  # else it has gone with the cluster
            remove_placement_group(self.group)
        self.is_held = False


@dataclass(slots=True)
class Place:
    """Room for a process of each group that shares the pool. `tenants` are those groups, with what they asked for."""

    reservation: Reservation
    bundle: int
    tenants: list[tuple[str, Mapping[str, float]]] = field(default_factory=list)


class RayResourcePool:
    """Reserves `process_on_nodes[i]` processes on one node, for each i, with a CPU and, if asked, a GPU per process.

    The processes of one entry share a node; two entries may share one that is large enough. Up to
    `max_colocate_count` groups can use the pool at a time, in separate processes; each process gets that fraction.
    `resources_per_process` adds other resources of Ray's, or asks for another number of CPUs. The places are held until
    `release` or the end of the `with` block; a `detached` pool even outlives its driver. If the driver has no Ray yet,
    `ray_cluster()` is entered for the rest of its life.

    Ranks follow the addresses of the nodes, so that they stay put when a group or a driver starts again.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        use_gpu: bool = False,
        accelerator_type: str | None = None,
        resources_per_process: Mapping[str, float] | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
        timeout_s: float = 60.0,
        waits: bool = True,
    ) -> None:
        """`waits=False` leaves the reservation to `async with`, for callers on an event loop."""
        _check(process_on_nodes, max_colocate_count, resources_per_process or {}, timeout_s)
        if accelerator_type is not None and not use_gpu:
            raise CallError(f"accelerator_type={accelerator_type!r} needs use_gpu=True")
        ensure_ray()
        if detached and ends_with_driver():
            raise CallError("a detached pool outlives its driver, but this driver's Ray does not: join a cluster")
        self._cluster = cluster_id()
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.detached = detached
        self.bundle = bundle_of(use_gpu, accelerator_type, resources_per_process)
        self.places: list[Place] = []
        self.is_owner = True
        self._asked = tuple(process_on_nodes), timeout_s
        if waits:
            with closing(self._reserve(*self._asked)) as reserving:
                for _ in reserving:
                    time.sleep(_LOOK_EVERY_S)

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def process_on_nodes(self) -> list[int]:
        return [
            len(list(places)) for _, places in itertools.groupby(self.places, key=lambda place: id(place.reservation))
        ]

    def sub_pool(self, ranks: Sequence[int]) -> RayResourcePool:
        """Return some places of this pool as a pool. The pool that reserved them still holds them."""
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.world_size)):
            raise CallError(f"ranks {list(ranks)} are not distinct ranks of a pool of {self.world_size}")
        return self._view([self.places[rank] for rank in ranks])

    def split(self, sizes: Sequence[int]) -> list[RayResourcePool]:
        """Return sub-pools of the given sizes, in the order of the ranks, which together have all places."""
        if sum(sizes) != self.world_size or min(sizes, default=0) < 1:
            raise CallError(f"a pool of {self.world_size} processes cannot be split into {list(sizes)}")
        ends = list(itertools.accumulate(sizes))
        return [self.sub_pool(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def merge(self, *others: RayResourcePool) -> RayResourcePool:
        """Return this pool and others as one, their ranks one after another. Each keeps its own reservation."""
        for other in others:
            if (other.bundle, other.max_colocate_count) != (self.bundle, self.max_colocate_count):
                raise CallError(
                    f"pools that differ cannot be merged: {self.bundle} shared by up to {self.max_colocate_count}, "
                    f"and {other.bundle} shared by up to {other.max_colocate_count}"
                )
        places = [place for pool in (self, *others) for place in pool.places]
        if len({id(place) for place in places}) < len(places):
            raise CallError("pools that overlap cannot be merged")
        return self._view(places)

    def release(self) -> None:
        """Give the places back; workers still on them end. Sub-pools and merged pools hold none: nothing happens."""
        if self.is_owner:
            for reservation in self._reservations():
                reservation.release()

    def share(self, resource: str) -> float:
        """Return how much of a resource one process gets."""
        # Ray counts in ten-thousandths; rounded up, the shares of a GPU could exceed it.
        return math.floor(10_000 * self.bundle[resource] / self.max_colocate_count) / 10_000

    def claim(self, tenant: str, resources: Mapping[str, float]) -> None:
        """Enter a group into all places, if there is room for it and what else it asks for."""
        if not self.is_held:
            raise ResourceError(f"no place for group {tenant!r}: the pool has been released, or its cluster left")
        for rank, place in enumerate(self.places):
            if len(place.tenants) >= self.max_colocate_count:
                names = ", ".join(repr(name) for name, _ in place.tenants)
                raise ResourceError(
                    f"no room for group {tenant!r}: place {rank} of the pool is taken by {names}, "
                    f"and max_colocate_count={self.max_colocate_count}"
                )
            for name, amount in resources.items():
                left = self.bundle.get(name, 0.0) - sum(held.get(name, 0.0) for _, held in place.tenants)
                if amount > left:
                    raise ResourceError(
                        f"group {tenant!r} asks for {amount:g} {name} per process, place {rank} of the pool has "
                        f"{left:g}: add to its resources_per_process"
                    )
        for place in self.places:
            place.tenants.append((tenant, resources))

    def vacate(self, tenant: str) -> None:
        for place in self.places:
            leaving = next(entry for entry in place.tenants if entry[0] == tenant)
            place.tenants.remove(leaving)

    @property
    def is_held(self) -> bool:
        return self._cluster == cluster_id() and all(reservation.is_held for reservation in self._reservations())

    async def wait_until_whole(self, deadline: float) -> None:
        """Wait until all places are there: Ray moves what was on a lost node to another that has room."""
        check_not_lost("the start of processes")
        for reservation in self._reservations():
            while not reservation.is_ready():
                check_not_lost("the start of processes")
                if time.monotonic() > deadline:
                    asked = _asked_and_there(self.process_on_nodes, self.bundle)
                    raise ResourceError(
                        f"part of the pool was lost with its node, and no other has room for it: {asked}"
                    )
                await asyncio.sleep(_LOOK_EVERY_S)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pool in another driver of the same cluster."""
        self.__dict__.update(state)
        self._cluster = cluster_id()

    async def __aenter__(self) -> Self:
        with closing(self._reserve(*self._asked)) as reserving:
            for _ in reserving:
                await asyncio.sleep(_LOOK_EVERY_S)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _reserve(self, counts: Sequence[int], timeout_s: float) -> Generator[None]:
        """Take the places, and yield while they are not there. Being closed before that gives them back."""
        if not could_hold(counts, self.bundle):
            raise ResourceError(
                f"more asked for than the Ray cluster can hold: {_asked_and_there(counts, self.bundle)}. "
                "Lower the number of workers or add machines."
            )
        deadline = time.monotonic() + timeout_s
        reservations: list[Reservation] = []
        try:
            for count in counts:
                lifetime = "detached" if self.detached else None
                group = placement_group([self.bundle] * count, strategy="STRICT_PACK", lifetime=lifetime)
                reservations.append(Reservation(group, count))
            for reservation in reservations:
                while not reservation.is_ready():
                    if time.monotonic() > deadline:
                        raise ResourceError(
                            f"the Ray cluster did not free what was asked for within {timeout_s:g} s: "
                            f"{_asked_and_there(counts, self.bundle)}. Another job may hold it."
                        )
                    yield
            self.places = [Place(one, index) for one in _in_node_order(reservations) for index in range(one.size)]
        except BaseException:
            for reservation in reservations:
                reservation.release()
            raise

    def _view(self, places: list[Place]) -> RayResourcePool:
        view = copy.copy(self)
        view.places = places
        view.is_owner = False
        return view

    def _reservations(self) -> list[Reservation]:
        return list({id(place.reservation): place.reservation for place in self.places}.values())


def _check(counts: Sequence[int], max_colocate_count: int, resources: Mapping[str, float], timeout_s: float) -> None:
    is_list = isinstance(counts, Sequence) and not isinstance(counts, str)
    if not is_list or not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        raise CallError(f"process_on_nodes must list a positive number of processes per node, not {counts!r}")
    if not isinstance(max_colocate_count, int) or max_colocate_count < 1:
        raise CallError(f"max_colocate_count must be a positive number, not {max_colocate_count!r}")
    for name, amount in resources.items():
        if not isinstance(amount, int | float) or not amount > 0:
            raise CallError(f"resources_per_process: {name} must be a positive number, not {amount!r}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise CallError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")


def bundle_of(
    use_gpu: bool, accelerator_type: str | None = None, more: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the resources of one process, as Ray names them."""
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {}), **(more or {})}
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = 0.001  # Ray's way to say: on a node that has this kind
    return bundle


def _in_node_order(reservations: list[Reservation]) -> list[Reservation]:
    """Keep the order of the sizes, but sort reservations of one size by their nodes."""
    position = {node.id: index for index, node in enumerate(living_nodes())}

    def node_of(reservation: Reservation) -> int:
        return position[placement_group_table(reservation.group)["bundles_to_node_id"][0]]

    in_order = sorted(reservations, key=node_of)
    of_size = {size: iter([one for one in in_order if one.size == size]) for size in {one.size for one in in_order}}
    return [next(of_size[one.size]) for one in reservations]


def _asked_and_there(counts: Sequence[int], bundle: Mapping[str, float]) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items() if not name.startswith("accelerator"))
    kind = "".join(f" of type {name.partition(':')[2]}" for name in bundle if name.startswith("accelerator_type:"))
    wanted = f"{' + '.join(map(str, counts))} process{'es' if sum(counts) > 1 else ''}"
    resources = [name for name in bundle if not name.startswith("accelerator")]
    return f"asked for {wanted} with {each}{kind} each; {describe_nodes(resources)}"
