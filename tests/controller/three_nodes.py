"""A cluster of three raylets on this machine, put through its paces; prints what happened as JSON.

Run by test_three_nodes.py in a process of its own, since a process can be the driver of one cluster only.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}

import logging

import ray
from ray.cluster_utils import Cluster

from practicum.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, open_controller
from practicum.controller.loop import run_sync
from practicum.errors import NodeLost, ResourceError

PER_NODE = {"num_cpus": 2, "object_store_memory": 80 * 1024 * 1024}


class Citizen(Worker):
    def place(self) -> tuple[str, int, int, int, int]:
        context = self.context
        node = ray.get_runtime_context().get_node_id()
        return node, self.rank, context.local_rank, context.local_world_size, context.node_rank

    def wait(self) -> None:
        time.sleep(120)


def refusal(process_on_nodes: list[int]) -> str:
    try:
        RayResourcePool(process_on_nodes, timeout_s=5)
    except ResourceError as error:
        return str(error)
    return "not refused"


def packing() -> dict[str, Any]:
    with RayResourcePool([2, 2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Citizen))
        first = group.execute_all(Citizen.place)
        group.restart()
        second = group.execute_all(Citizen.place)
        group.shutdown()
    with RayResourcePool([2, 2, 2]) as pool:
        all_nodes = RayWorkerGroup(pool, RayClassWithInitArgs(Citizen))
        third = all_nodes.execute_all(Citizen.place)
        all_nodes.shutdown()
    with open_controller("ray", num_workers=5, use_gpu=False, max_colocate_count=1) as controller:
        spread = run_sync(controller.group(RayClassWithInitArgs(Citizen), name="five")).execute_all(Citizen.place)
    return {"first": first, "second": second, "all_nodes": third, "spread": spread}


def loss_of_a_node(cluster: Cluster) -> dict[str, Any]:
    """Two nodes at work, a spare one; one of the two is killed during a call."""
    node_of = {node.node_id: node for node in cluster.list_all_nodes()}
    head = cluster.head_node.node_id
    with RayResourcePool([2, 2], timeout_s=60) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Citizen), name="citizens", start_timeout_s=120)
        before = group.execute_all(Citizen.place)
        victim = next(place[0] for place in before if place[0] != head)
        lost_ranks = [rank for rank, place in enumerate(before) if place[0] == victim]
        killer = threading.Timer(1.0, lambda: cluster.remove_node(node_of[victim], allow_graceful=False))
        killer.start()
        start = time.monotonic()
        try:
            group.execute_all(Citizen.wait)
            error, ranks = "none", ()
        except NodeLost as died:
            error, ranks = str(died), died.ranks
        noticed_s = time.monotonic() - start - 1.0
        killer.join()
        start = time.monotonic()
        group.restart()
        after = group.execute_all(Citizen.place)
        restart_s = time.monotonic() - start
        group.shutdown()
    return {
        "before": before, "after": after, "victim": victim, "lost_ranks": lost_ranks,
        "error": error, "ranks": ranks, "noticed_s": noticed_s, "restart_s": restart_s,
    }  # fmt: skip


def loss_without_spare(cluster: Cluster) -> str:
    """Both nodes that are left at work; one is killed, and no other has room."""
    node_of = {node.node_id: node for node in cluster.list_all_nodes()}
    with RayResourcePool([2, 2], timeout_s=60) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Citizen), name="citizens", start_timeout_s=25)
        places = group.execute_all(Citizen.place)
        victim = next(place[0] for place in places if place[0] != cluster.head_node.node_id)
        cluster.remove_node(node_of[victim], allow_graceful=False)
        try:
            group.restart()
        except ResourceError as error:
            return str(error)
    return "not refused"


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=PER_NODE)
    try:
        for _ in range(2):
            cluster.add_node(**PER_NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        facts: dict[str, Any] = {"too_large": refusal([3, 1]), "packing": packing()}
        facts["loss"] = loss_of_a_node(cluster)
        facts["no_spare"] = loss_without_spare(cluster)
        print(json.dumps(facts))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
