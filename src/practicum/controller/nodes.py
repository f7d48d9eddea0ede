"""The nodes of the Ray cluster: what each has, what is free, how processes fit on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def capacity(self, bundle: Mapping[str, float]) -> int:
        """How many processes it could hold if nobody else were there."""
        return min(int(self.total.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount)


def living_nodes() -> list[Node]:
    """In the order of their addresses, which stays the same when a job starts again."""
    free = available_resources_per_node()
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def spread_over_nodes(num_processes: int, bundle: Mapping[str, float]) -> list[int]:
    """How many processes to ask of each node so that they fill as few nodes as possible.

    If the cluster cannot hold them all, one node is asked for what is left over, which it will refuse.
    """
    counts = []
    for capacity in sorted((node.capacity(bundle) for node in living_nodes()), reverse=True):
        if num_processes and capacity:
            counts.append(min(capacity, num_processes))
            num_processes -= counts[-1]
    return [*counts[:-1], counts[-1] + num_processes] if counts else [num_processes]


def could_hold(process_on_nodes: Sequence[int], bundle: Mapping[str, float]) -> bool:
    """False if the living nodes are certainly too small, even with nobody else there."""
    rooms = [node.capacity(bundle) for node in living_nodes()]
    return max(process_on_nodes) <= max(rooms) and sum(process_on_nodes) <= sum(rooms)


def describe_nodes(resources: Iterable[str]) -> str:
    """What each node has and what of it is free, for an error message."""
    nodes, names = living_nodes(), list(resources)
    rows = [f"{node.address} ({', '.join(_free_of(node, name) for name in names)})" for node in nodes[:_SHOWN]]
    more = f" and {len(nodes) - _SHOWN} more nodes" if len(nodes) > _SHOWN else ""
    types = sorted({n.partition(":")[2] for node in nodes for n in node.total if n.startswith("accelerator_type:")})
    accelerators = f"; accelerator types: {', '.join(types) or 'none'}" if "GPU" in names else ""
    return f"the cluster has {'; '.join(rows)}{more}{accelerators}"


def _free_of(node: Node, name: str) -> str:
    return f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
