from __future__ import annotations

import ray

from practicum.controller.nodes import could_hold, describe_nodes, living_nodes, spread_over_nodes


def test_processes_fill_as_few_nodes_as_they_can(ray_session: None) -> None:
    (node,) = living_nodes()
    cpus = int(ray.cluster_resources()["CPU"])
    assert spread_over_nodes(1, {"CPU": 1.0}) == [1]
    assert spread_over_nodes(2 * cpus, {"CPU": 0.5}) == [2 * cpus]
    assert spread_over_nodes(cpus + 3, {"CPU": 1.0}) == [cpus + 3]  # too many: the pool will say so
    assert spread_over_nodes(3, {"GPU": 1000.0}) == [3]
    assert node.capacity({"CPU": 1.0, "GPU": 0.0}) == cpus


def test_entries_of_a_pool_may_share_a_node(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    assert could_hold([1] * cpus, {"CPU": 1.0})
    assert not could_hold([1] * (cpus + 1), {"CPU": 1.0})
    assert not could_hold([cpus + 1], {"CPU": 1.0})


def test_what_a_node_has_is_told_resource_by_resource(ray_session: None) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    assert f" of {cpus} CPU free, 0 of 0 nvme free)" in describe_nodes(["CPU", "nvme"])
