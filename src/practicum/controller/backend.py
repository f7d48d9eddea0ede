"""The one place that knows whether workers are Ray actors or live in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import ray

from practicum.controller.cluster import ray_cluster
from practicum.controller.group import WorkerGroup
from practicum.controller.host import host_address
from practicum.controller.local import LocalWorkerGroup
from practicum.controller.nodes import living_nodes, spread_over_nodes
from practicum.controller.packed import RayClassWithInitArgs
from practicum.controller.pool import RayResourcePool, bundle_of
from practicum.controller.ray_group import RayWorkerGroup
from practicum.controller.worker import Worker

W = TypeVar("W", bound=Worker)


class Controller:
    """Opens groups on one pool and ends them all together. `pool` is None for the in-process twin."""

    def __init__(self, pool: RayResourcePool | None, start_timeout_s: float, call_timeout_s: float) -> None:
        self.pool = pool
        self.world_size = 1 if pool is None else pool.world_size
        self.uses_gpu = pool is not None and pool.use_gpu
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._groups: list[WorkerGroup[Worker]] = []

    def group(
        self,
        packed: RayClassWithInitArgs[W],
        *,
        name: str,
        use_gpu: bool | None = None,
        pool: RayResourcePool | None = None,
    ) -> WorkerGroup[W]:
        """On another `pool` if one is given. `use_gpu=False` keeps a group off the pool's accelerators; None takes a
        share where the pool has them."""
        group: WorkerGroup[W]
        pool = pool or self.pool
        if pool is None:
            group = LocalWorkerGroup(packed, name=name, timeout_s=self._call_timeout_s)
        else:
            group = RayWorkerGroup(
                pool,
                packed,
                name=name,
                use_gpu=use_gpu,
                start_timeout_s=self._start_timeout_s,
                timeout_s=self._call_timeout_s,
            )
        self._groups.append(group)  # type: ignore[arg-type]
        return group

    @property
    def address(self) -> str:
        """Where workers reach what listens beside the driver: this machine's own address if some are elsewhere."""
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
    """A controller for the time of a `with` block; its groups, pool and, if it started one, Ray end with the block.

    `use_gpu=None` takes GPUs where the cluster has enough of them.
    """
    if backend == "local":
        controller = Controller(None, start_timeout_s, call_timeout_s)
        try:
            yield controller
        finally:
            controller.shutdown()
        return
    with ray_cluster(address):
        if use_gpu is None:
            use_gpu = ray.cluster_resources().get("GPU", 0) >= num_workers
        with RayResourcePool(
            spread_over_nodes(num_workers, bundle_of(use_gpu)),
            use_gpu=use_gpu,
            max_colocate_count=max_colocate_count,
            timeout_s=start_timeout_s,
        ) as pool:
            controller = Controller(pool, start_timeout_s, call_timeout_s)
            try:
                yield controller
            finally:
                controller.shutdown()
