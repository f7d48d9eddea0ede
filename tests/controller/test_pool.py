from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import ray

from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from practicum.errors import CallError, ResourceError, WorkerDied


class Clerk(Worker):
    def desk(self) -> tuple[int, int]:
        return self.rank, self.world_size


def num_cpus() -> int:
    return int(ray.cluster_resources()["CPU"])


def test_more_than_the_cluster_has_is_refused_at_once_with_the_numbers(ray_session: None) -> None:
    cpus = num_cpus()
    with pytest.raises(
        ResourceError, match=rf"asked for {cpus + 1} processes with 1 CPU each; the cluster has .* of {cpus} CPU free"
    ):
        RayResourcePool([cpus + 1], timeout_s=60)
    with pytest.raises(ResourceError, match=r"asked for 1 \+ 99 processes with 1 CPU each"):
        RayResourcePool([1, 99], timeout_s=60)
    with pytest.raises(ResourceError, match=r"1 GPU of type B1000 each; .*accelerator types: "):
        RayResourcePool([1], use_gpu=True, accelerator_type="B1000")
    with pytest.raises(ResourceError, match=r"1 CPU and 2 nvme each; .*0 of 0 nvme free"):
        RayResourcePool([1], resources_per_process={"nvme": 2})


def test_a_held_pool_makes_the_next_wait_until_its_deadline(ray_session: None) -> None:
    cpus = num_cpus()
    with (
        RayResourcePool([cpus]),
        pytest.raises(ResourceError, match=rf"within 0.5 s: .* \(0 of {cpus} CPU free\).*Another job may hold it"),
    ):
        start = time.monotonic()
        try:
            RayResourcePool([cpus], timeout_s=0.5)
        finally:
            assert time.monotonic() - start >= 0.5
    with RayResourcePool([cpus], timeout_s=20) as pool:  # released with the block
        assert (pool.world_size, pool.process_on_nodes) == (cpus, [cpus])


def test_the_one_who_waits_gets_the_ground_when_it_is_released(ray_session: None) -> None:
    held = RayResourcePool([num_cpus()])
    threading.Timer(0.5, held.release).start()
    with RayResourcePool([num_cpus()], timeout_s=20) as pool:
        assert pool.world_size == num_cpus()


def test_pools_are_split_and_merged_and_the_ground_stays_with_its_owner(ray_session: None) -> None:
    with RayResourcePool([1, 1], max_colocate_count=2) as pool:
        first, second = pool.split([1, 1])
        left = RayWorkerGroup(first, RayClassWithInitArgs(Clerk), name="left")
        right = RayWorkerGroup(second, RayClassWithInitArgs(Clerk), name="right")
        both = RayWorkerGroup(second.merge(first), RayClassWithInitArgs(Clerk), name="both")
        assert left.execute_all(Clerk.desk) == right.execute_all(Clerk.desk) == [(0, 1)]
        assert both.execute_all(Clerk.desk) == [(0, 2), (1, 2)]
        tenants = [[name for name, _ in place.tenants] for place in pool.places]
        assert tenants == [["left", "both"], ["right", "both"]]
        first.release()  # only looks at the ground
        assert left.execute_all(Clerk.desk) == [(0, 1)]
        for group in (left, right, both):
            group.shutdown()
    with pytest.raises(ResourceError, match="pool has been released"):
        RayWorkerGroup(first, RayClassWithInitArgs(Clerk))
    pool.release()  # twice does no harm


def test_a_group_whose_pool_is_released_says_so(ray_session: None) -> None:
    with RayResourcePool([1], resources_per_process={"CPU": 0.5}) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Clerk), name="homeless")
        group.execute_all(Clerk.desk)
    deadline = time.monotonic() + 20
    with pytest.raises(WorkerDied, match=r"'homeless': rank 0 .*its pool was released"):
        while time.monotonic() < deadline:
            group.execute_all(Clerk.desk)
    with pytest.raises(ResourceError, match="pool has been released"):
        group.restart()
    group.shutdown()


def test_wrong_splits_and_merges_are_refused(ray_session: None) -> None:
    with RayResourcePool([1], resources_per_process={"CPU": 0.5}) as pool, RayResourcePool([1]) as other:
        with pytest.raises(CallError, match=r"pool of 1 processes cannot be split into \[1, 1\]"):
            pool.split([1, 1])
        with pytest.raises(CallError, match=r"ranks \[0, 3\] are not distinct ranks of a pool of 1"):
            pool.sub_pool([0, 3])
        with pytest.raises(CallError, match="pools that overlap"):
            pool.merge(pool)
        with pytest.raises(CallError, match="pools that differ"):
            pool.merge(other)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_shares_of_a_process_never_exceed_the_whole(ray_session: None, count: int) -> None:
    with RayResourcePool([1], max_colocate_count=count) as pool:
        assert round(pool.share("CPU") * 10_000) * count <= 10_000


def test_what_one_group_holds_another_cannot_have(ray_session: None) -> None:
    with RayResourcePool([1], resources_per_process={"CPU": 0.5, "memory": 2e8}, max_colocate_count=3) as pool:
        pool.claim("first", {"memory": 1.5e8})
        with pytest.raises(ResourceError, match=r"'second' asks for 1e\+08 memory per process, place 0 .*has 5e\+07"):
            pool.claim("second", {"memory": 1e8})
        pool.vacate("first")
        pool.claim("second", {"memory": 1e8})


@pytest.mark.parametrize("process_on_nodes", [[], [0], [-1, 2], [1.5], 2, "2"])
def test_nonsense_is_refused(process_on_nodes: Any) -> None:
    with pytest.raises(CallError, match="process_on_nodes must list a positive number"):
        RayResourcePool(process_on_nodes)
    for wrong, match in [
        ({"max_colocate_count": 0}, "max_colocate_count must be"),
        ({"timeout_s": 0}, "timeout_s must be"),
        ({"resources_per_process": {"CPU": 0}}, "resources_per_process: CPU must be a positive number, not 0"),
    ]:
        with pytest.raises(CallError, match=match):
            RayResourcePool([1], **wrong)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="needs use_gpu=True"):
        RayResourcePool([1], accelerator_type="H200")
