"""The one place that knows whether workers are Ray actors or live in this process, and how many copies have room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Literal, TypeVar

import ray

from practicum.controller.cluster import living_nodes, ray_cluster, spread_over_nodes
from practicum.controller.group import WorkerGroup
from practicum.controller.host import host_address
from practicum.controller.local import LocalWorkerGroup
from practicum.controller.pool import RayResourcePool, bundle_of
from practicum.controller.ray_group import RayWorkerGroup
from practicum.controller.worker import RayClassWithInitArgs, Worker
from practicum.errors import ResourceError
from practicum.secret import new_secret

W = TypeVar("W", bound=Worker)


class Controller:
    """Opens groups on one pool and ends them all together. `pool` is None for the in-process twin."""

    def __init__(self, pool: RayResourcePool | None, start_timeout_s: float, call_timeout_s: float) -> None:
        self.pool = pool
        self.world_size = 1 if pool is None else pool.world_size
        self.secret = new_secret()
        """Of the run: its servers answer those who send it."""
        self.uses_gpu = pool is not None and pool.use_gpu
        self._start_timeout_s = start_timeout_s
        self.call_timeout_s = call_timeout_s
        self._groups: list[WorkerGroup[Worker]] = []

    async def group(
        self,
        packed: RayClassWithInitArgs[W],
        *,
        name: str,
        use_gpu: bool | None = None,
        pool: RayResourcePool | None = None,
    ) -> WorkerGroup[W]:
        """Open a group, on another `pool` if one is given. `use_gpu=False` keeps it off the pool's accelerators; None
        takes a share where the pool has them."""
        group: WorkerGroup[W]
        pool = pool or self.pool
        if pool is None:
            group = LocalWorkerGroup(packed, name=name, timeout_s=self.call_timeout_s)
        else:
            group = RayWorkerGroup(
                pool,
                packed,
                name=name,
                use_gpu=use_gpu,
                start_timeout_s=self._start_timeout_s,
                timeout_s=self.call_timeout_s,
                starts=False,
            )
            await group.restart_async()
        self._groups.append(group)  # type: ignore[arg-type]
        return group

    @property
    def address(self) -> str:
        """The address at which workers reach a server beside the driver: not loopback if some are elsewhere."""
        return "127.0.0.1" if self.pool is None or len(living_nodes()) == 1 else host_address()

    def shutdown(self) -> None:
        while self._groups:
            self._groups.pop().shutdown()


@contextmanager
def open_controller(
    backend: Literal["ray", "local"],
    *,
    num_workers: int,
    use_gpu: bool | None,
    max_colocate_count: int,
    address: str | None = None,
    start_timeout_s: float = 120.0,
    call_timeout_s: float = 600.0,
) -> Iterator[Controller]:
    """Return a controller for a `with` block; its groups, pool and, if it started one, Ray end with the block.

    It blocks while it waits for the pool, and for what groups do at their end: do not enter it on an event loop.

    `use_gpu=None` takes GPUs where the cluster has enough of them.
    """
    with ExitStack() as stack:
        pool = None
        if backend == "ray":
            stack.enter_context(ray_cluster(address))
            if use_gpu is None:
                use_gpu = ray.cluster_resources().get("GPU", 0) >= num_workers
            process_on_nodes = spread_over_nodes(num_workers, bundle_of(use_gpu))
            pool = RayResourcePool(
                process_on_nodes, use_gpu=use_gpu, max_colocate_count=max_colocate_count, timeout_s=start_timeout_s
            )
            stack.enter_context(pool)
        controller = Controller(pool, start_timeout_s, call_timeout_s)
        stack.callback(controller.shutdown)
        yield controller


def num_replicas(wanted: int | Literal["auto"], pool: RayResourcePool | None, what: str) -> int:
    """Return the number of replicas, one for each place of the pool if `auto`."""
    places = 1 if pool is None else pool.world_size
    if wanted == "auto":
        return places
    if wanted > places:
        room = "this process has room for 1"
        if pool is not None:
            on_nodes = pool.process_on_nodes
            nodes = f" ({' + '.join(map(str, on_nodes))} on its nodes)" if len(on_nodes) > 1 else ""
            room = f"the pool has {places} place{'s' if places > 1 else ''}{nodes}, for one replica each"
        raise ResourceError(
            f"replicas={wanted} of {what} asked for, but {room}: "
            f"lower replicas by {wanted - places}, or leave it at auto."
        )
    return wanted


@asynccontextmanager
async def places_beside(
    controller: Controller,
    wanted: int | Literal["auto"],
    *,
    key: str,
    num_key: str = "replicas",
    gpus_each: int = 1,
    num_spared: int = 0,
) -> AsyncIterator[RayResourcePool]:
    """Reserve unused resources beside the controller's pool, `gpus_each` GPUs a place if the controller has GPUs.

    `auto` takes all of it but the `num_spared` that others will ask for; on CPUs one place, since a single copy uses
    all of its machine's cores. `key` and `num_key` name the settings in messages: where, and how many.
    """
    scarce = "GPU" if controller.uses_gpu else "CPU"
    each = gpus_each if controller.uses_gpu else 1
    free = int(ray.available_resources().get(scarce, 0)) // each
    most = free - num_spared if controller.uses_gpu else min(free, 1)
    num = most if wanted == "auto" else wanted
    if not 1 <= num <= free:
        sets = "" if each == 1 else f" in sets of {each}"
        raise ResourceError(
            f"{key}=standalone needs {scarce}s{sets} beside the trainer's "
            f"({num_key}: {wanted}), and so many are free: {free}. "
            f"Lower {num_key if free else 'trainer.num_workers'}, or use colocated."
        )
    more = {"GPU": float(each)} if controller.uses_gpu else {}
    # One entry each: on any node that has room.
    pool = RayResourcePool([1] * num, use_gpu=controller.uses_gpu, resources_per_process=more, waits=False)
    async with pool:
        yield pool
