"""For those who keep several copies of something on a pool: how many fit, where, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, TypeVar

import ray

from practicum.controller.backend import Controller
from practicum.controller.pool import RayResourcePool
from practicum.errors import ResourceError

T = TypeVar("T")
R = TypeVar("R")


def num_replicas(wanted: int | Literal["auto"], pool: RayResourcePool | None, what: str) -> int:
    """One per place unless told otherwise: a place is a GPU, or what the pool calls a process's share."""
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


@contextmanager
def places_beside(
    controller: Controller,
    wanted: int | Literal["auto"],
    *,
    key: str,
    num_key: str = "replicas",
    gpus_each: int = 1,
    num_spared: int = 0,
) -> Iterator[RayResourcePool]:
    """A pool beside the controller's, of what nobody uses, with `gpus_each` GPUs a place where the controller has GPUs.

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
    # One ground each: on any node that has room.
    with RayResourcePool([1] * num, use_gpu=controller.uses_gpu, resources_per_process=more) as pool:
        yield pool


def side_by_side(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """For all at once. The first failure is raised when all are done."""
    if not items:
        return []
    with ThreadPoolExecutor(len(items), thread_name_prefix="practicum-replicas") as threads:
        return list(threads.map(function, items))
