"""Controllers on both backends, and room for copies."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

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
from practicum.controller.loop import run_sync
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
            group = run_sync(controller.group(RayClassWithInitArgs(Closing), name="closing"))
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
    async def main() -> None:
        deadline = time.monotonic() + 20
        while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:  # of pools released just now
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        async with RayResourcePool([1], resources_per_process={"CPU": 0.5}, waits=False) as own:
            controller = Controller(own, 60, 60)
            async with places_beside(controller, "auto", key="x.placement") as pool:
                assert pool.world_size == 1 and pool.is_held and not pool.use_gpu
            assert not pool.is_held
            with pytest.raises(ResourceError, match=r"x\.placement=standalone needs CPUs .* \(replicas: 500\)"):
                async with places_beside(controller, 500, key="x.placement"):
                    pass

    run_sync(main())


class Gated(Worker):
    def __init__(self, folder: Path) -> None:
        (folder / f"{self.rank} waits").touch()
        while not (folder / "open").exists():
            time.sleep(0.02)

    def hello(self) -> str:
        return f"rank {self.rank}"


def test_an_event_loop_is_free_while_it_starts_a_group_and_can_end_the_start(ray_session: None, tmp_path: Path) -> None:
    async def wait_for(name: str) -> None:
        async with asyncio.timeout(60):
            while not (tmp_path / name).exists():
                await asyncio.sleep(0.02)

    async def main() -> None:
        async with RayResourcePool([2], resources_per_process={"CPU": 0.5}, waits=False) as pool:
            controller = Controller(pool, 60, 60)
            packed = RayClassWithInitArgs(Gated, tmp_path)
            cut_off = asyncio.create_task(controller.group(packed, name="cut off"))
            await wait_for("1 waits")
            cut_off.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cut_off
            assert all(place.tenants == [] for place in pool.places)
            starting = asyncio.create_task(controller.group(packed, name="gated"))
            await asyncio.sleep(0)
            (tmp_path / "open").touch()
            assert await (await starting).execute_all_async(Gated.hello) == ["rank 0", "rank 1"]
            controller.shutdown()

    run_sync(main())


def test_an_event_loop_is_free_while_it_waits_for_places(ray_session: None) -> None:
    async def main() -> None:
        num_cpus = int(ray.cluster_resources()["CPU"])
        async with RayResourcePool([num_cpus], waits=False):
            waiting = asyncio.create_task(RayResourcePool([num_cpus], waits=False).__aenter__())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.2)
        async with RayResourcePool([num_cpus], timeout_s=20, waits=False) as pool:  # else it is held
            assert pool.world_size == num_cpus

    run_sync(main())
