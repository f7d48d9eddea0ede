"""Ground staked out in the Ray cluster: one placement group per node, held until released."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from practicum.errors import ResourceError


class RayResourcePool:
    """Reserves `process_on_nodes[i]` processes on the i-th node, each with one CPU and, if asked, one accelerator.

    Up to `max_colocate_count` groups can share the pool in separate processes; each process gets that fraction.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1 or max_colocate_count < 1:
            raise ValueError(f"process_on_nodes={list(process_on_nodes)} and max_colocate_count must be positive")
        self.process_on_nodes = list(process_on_nodes)
        self.use_gpu = use_gpu
        self.share = 1.0 / max_colocate_count
        self._bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}
        self._groups = self._reserve(timeout_s)

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def places(self) -> list[tuple[PlacementGroup, int, int]]:
        """Placement group, bundle in it, and node rank of each process, in rank order."""
        return [
            (group, bundle, node)
            for node, group in enumerate(self._groups)
            for bundle in range(self.process_on_nodes[node])
        ]

    def release(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _reserve(self, timeout_s: float) -> list[PlacementGroup]:
        self._refuse_the_impossible()
        deadline = time.monotonic() + timeout_s
        groups = [placement_group([self._bundle] * count, strategy="STRICT_PACK") for count in self.process_on_nodes]
        _, late = ray.wait(
            [group.ready() for group in groups], num_returns=len(groups), timeout=max(0.0, deadline - time.monotonic())
        )
        if late:
            for group in groups:
                remove_placement_group(group)
            raise ResourceError(
                f"the Ray cluster did not free what was asked for within {timeout_s:g} s: {self._asked()}; "
                f"{_nodes('available')}. Another job may hold it."
            )
        return _sorted_by_node(groups, self.process_on_nodes)

    def _refuse_the_impossible(self) -> None:
        """Fail at once when no node could ever hold what is asked of it, instead of waiting for the deadline."""
        free = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        for count in sorted(self.process_on_nodes, reverse=True):
            need = {name: amount * count for name, amount in self._bundle.items()}
            fitting = [node for node in free if all(node.get(name, 0) >= amount for name, amount in need.items())]
            if not fitting:
                raise ResourceError(
                    f"more processes asked for than the Ray cluster can hold: {self._asked()}; {_nodes('in all')}. "
                    "Lower the number of workers or add machines."
                )
            for name, amount in need.items():
                fitting[0][name] -= amount

    def _asked(self) -> str:
        each = " and ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        wanted = " + ".join(map(str, self.process_on_nodes))
        return f"asked for {wanted} process{'es' if self.world_size > 1 else ''} with {each} each"


def _nodes(what: str) -> str:
    available = ray._private.state.available_resources_per_node() if what == "available" else {}
    rows = []
    for node in ray.nodes():
        if node["Alive"]:
            amounts: dict[str, Any] = available.get(node["NodeID"], {}) if available else node["Resources"]
            rows.append(
                f"{node['NodeManagerAddress']} has {amounts.get('CPU', 0):g} CPU, {amounts.get('GPU', 0):g} GPU"
            )
    return f"{what}: {'; '.join(rows)}"


def _sorted_by_node(groups: list[PlacementGroup], counts: Sequence[int]) -> list[PlacementGroup]:
    """Equal-sized groups in the order of their nodes' addresses, so that ranks stay put across restarts."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def node_of(group: PlacementGroup) -> str:
        return str(address[placement_group_table(group)["bundles_to_node_id"][0]])

    ordered = list(groups)
    for count in set(counts):
        slots = [i for i, c in enumerate(counts) if c == count]
        for slot, group in zip(slots, sorted((groups[i] for i in slots), key=node_of), strict=True):
            ordered[slot] = group
    return ordered
