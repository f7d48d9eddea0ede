"""Decoding steps as CUDA graphs, recorded when a number of rows is first wanted, for one of a series of sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SIZES = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
_WAVES = 8  # programs for each multiprocessor


def graph_size(num_rows: int) -> int:
    """Return the number of rows that a step of `num_rows` is computed with."""
    at = bisect_left(_SIZES, num_rows)
    return _SIZES[at] if at < len(_SIZES) else -(-num_rows // 64) * 64


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Return the number of programs that share the context of a head, so that all multiprocessors have work."""
    splits = 1
    while splits < 32 and num_programs * splits * 2 <= num_processors * _WAVES and splits * 2 <= num_tiles:
        splits *= 2
    return splits


class DecodeGraphs:
    """Graphs of `step(slots [rows], num_splits, filters)`.

    All graphs share the memory of intermediate results: only one runs at a time, and none leaves anything there.
    """

    def __init__(self, step: Callable[[Tensor, int, bool], None], max_rows: int, padding: int, device: torch.device):
        self._step = step
        self._padding = padding  # the slot of rows that fill a size up
        self._slots = torch.full((graph_size(max_rows),), padding, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def choose(self, slots: Tensor) -> None:
        """Set the slots, on the device, of the next steps."""
        self._slots[: len(slots)] = slots
        self._slots[len(slots) : graph_size(len(slots))] = self._padding

    def run(self, num_rows: int, num_splits: int, filters: bool) -> None:
        key = graph_size(num_rows), num_splits, filters
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        self._graphs[key].replay()

    def _record(self, num_rows: int, num_splits: int, filters: bool) -> torch.cuda.CUDAGraph:
        slots = self._slots[:num_rows]
        chosen = slots.clone()
        slots.fill_(self._padding)  # the run before recording must change nothing
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are built, and libraries initialised, before it is recorded
            self._step(slots, num_splits, filters)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(slots, num_splits, filters)
        self._pool = self._pool or graph.pool()
        slots.copy_(chosen)
        return graph

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None
