from __future__ import annotations

import pytest
import ray

from practicum.controller import RayResourcePool
from practicum.errors import ResourceError


def test_more_than_the_machine_has_is_refused_at_once_with_the_numbers(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ResourceError, match=rf"asked for {cpus + 1} processes with 1 CPU each; in all: .* {cpus} CPU"):
        RayResourcePool([cpus + 1], timeout_s=60)


def test_a_held_pool_makes_the_next_wait_until_its_deadline(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    with RayResourcePool([cpus]), pytest.raises(ResourceError, match=r"within 0.5 s.*Another job may hold it"):
        RayResourcePool([cpus], timeout_s=0.5)
    with RayResourcePool([cpus], timeout_s=20) as pool:  # released with the block
        assert pool.world_size == cpus
        assert [node for _, _, node in pool.places] == [0] * cpus


@pytest.mark.parametrize("process_on_nodes", [[], [0], [-1, 2]])
def test_nonsense_is_refused(process_on_nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RayResourcePool(process_on_nodes)
