"""Decoding steps as CUDA graphs: recorded when they are first wanted, for as many rows as the next rung of a ladder."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RUNGS = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
_WAVES = 8  # programs for each multiprocessor


def rung(num_rows: int) -> int:
    """How many rows a step for so many is computed with."""
    at = bisect_left(_RUNGS, num_rows)
    return _RUNGS[at] if at < len(_RUNGS) else -(-num_rows // 64) * 64


def num_splits(num_programs: int, num_blocks: int, num_processors: int) -> int:
    """Among how many programs a head's context is shared out, so that all multiprocessors have work."""
    splits = 1
    while splits < 32 and num_programs * splits * 2 <= num_processors * _WAVES and splits * 2 <= num_blocks:
        splits *= 2
    return splits


class StepGraphs:
    """`step` computes with `rows` rows: it takes the slots [rows] and how it is to compute, and returns nothing.

    All graphs share memory for what is in between: only one runs at a time, and none leaves anything there.
    """

    def __init__(self, step: Callable[[Tensor, int, bool], None], most_rows: int, filler: int, device: torch.device):
        self._step = step
        self._filler = filler
        self._slots = torch.full((rung(most_rows),), filler, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def choose(self, slots: Tensor) -> None:
        """Which rows the next steps are of, on the device."""
        self._slots[: len(slots)] = slots
        self._slots[len(slots) : rung(len(slots))] = self._filler

    def run(self, num_rows: int, num_splits: int, narrows: bool) -> None:
        key = rung(num_rows), num_splits, narrows
        if key not in self._graphs:
            self._graphs[key] = self._recorded(*key)
        self._graphs[key].replay()

    def _recorded(self, num_rows: int, num_splits: int, narrows: bool) -> torch.cuda.CUDAGraph:
        slots = self._slots[:num_rows]
        chosen = slots.clone()
        slots.fill_(self._filler)  # trying it out must change nothing
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are built, and libraries made ready, before it is recorded
            self._step(slots, num_splits, narrows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(slots, num_splits, narrows)
        self._pool = self._pool or graph.pool()
        slots.copy_(chosen)
        return graph

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None
