from __future__ import annotations

import threading

import pytest

from practicum.controller import Controller, RayResourcePool, num_replicas, places_beside, side_by_side
from practicum.errors import ResourceError


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


def test_all_at_once_and_the_first_failure_when_all_are_done() -> None:
    together = threading.Barrier(3, timeout=20)
    assert side_by_side(lambda item: (together.wait(), item)[1], [1, 2, 3]) == [1, 2, 3]
    assert side_by_side(len, []) == []
    done: list[int] = []

    def fail_on_one(item: int) -> None:
        if item == 1:
            raise ValueError("one")
        done.append(item)

    with pytest.raises(ValueError, match="one"):
        side_by_side(fail_on_one, [1, 2, 3])
    assert sorted(done) == [2, 3]
