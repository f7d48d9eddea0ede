"""Controllers on both backends, and room for copies."""

from __future__ import annotations

import time

import pytest
import ray

from practicum.controller import (
    Controller,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    num_replicas,
    open_controller,
    places_beside,
)
from practicum.errors import ResourceError


class Closing(Worker):
    closed = 0

    def hello(self) -> str:
        return f"rank {self.rank}"

    def close(self) -> None:
        Closing.closed += 1


def test_the_same_code_runs_on_both_backends_and_ends_its_groups(ray_session: None) -> None:
    for backend, kind in (("local", LocalWorkerGroup), ("ray", RayWorkerGroup)):
        with open_controller(backend, num_workers=1, use_gpu=False, max_colocate_count=2) as controller:  # type: ignore[arg-type]
            group = controller.group(RayClassWithInitArgs(Closing), name="closing")
            assert isinstance(group, kind)
            assert group.execute_all(Closing.hello) == ["rank 0"]
    assert Closing.closed == 1  # in this process; the Ray worker's process is gone


def test_there_is_one_for_each_place_unless_told_otherwise(ray_session: None) -> None:
    with RayResourcePool([2], resources_per_process={"CPU": 0.1}) as pool:
        assert num_replicas("auto", pool, "the engine") == 2
        assert num_replicas(1, pool, "the engine") == 1
        with pytest.raises(ResourceError, match=r"replicas=5 of the engine asked for.*2 places.*lower replicas by 3"):
            num_replicas(5, pool, "the engine")
    assert num_replicas("auto", None, "the engine") == 1
    with pytest.raises(ResourceError, match="this process has room for 1"):
        num_replicas(2, None, "the engine")


def test_places_beside_are_what_nobody_uses(ray_session: None) -> None:
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:  # of pools released just now
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with RayResourcePool([1], resources_per_process={"CPU": 0.5}) as own:
        controller = Controller(own, 60, 60)
        with places_beside(controller, "auto", key="x.placement") as pool:
            assert pool.world_size == 1 and pool.is_held and not pool.use_gpu
        assert not pool.is_held
        with (
            pytest.raises(ResourceError, match=r"x\.placement=standalone needs CPUs beside .* \(replicas: 500\)"),
            places_beside(controller, 500, key="x.placement"),
        ):
            pass
