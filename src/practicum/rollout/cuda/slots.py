"""What the device knows of each row, by slot: its last token, where that stands, how the next is drawn, its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Beginning:
    """A row as it takes its slot."""

    slot: int
    position: int  # of the last token that has been read
    num_prompt: int  # tokens
    params: SamplingParams
    seed: int
    answer: int
    pages: Sequence[int]


class Slots:
    """One more than there are rows: the last is for rows that fill a batch up."""

    def __init__(self, num: int, most_pages: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((num + 1, *shape), dtype=dtype, device=device)

        self.num = num
        self._device = device
        self.tokens = zeros(torch.int64)
        self.positions, self.prompts, self.top_ks = zeros(torch.int32), zeros(torch.int32), zeros(torch.int32)
        self.temperatures, self.top_ps = zeros(torch.float32), zeros(torch.float32) + 1
        self.seeds, self.answers = zeros(torch.int64), zeros(torch.int64)
        self.tables = zeros(torch.int32, most_pages)

    def begin(self, rows: Sequence[Beginning]) -> None:
        at = self.on_device([row.slot for row in rows], np.int64)
        for own, values in (
            (self.positions, [row.position for row in rows]),
            (self.prompts, [row.num_prompt for row in rows]),
            (self.temperatures, [row.params.temperature for row in rows]),
            (self.top_ks, [row.params.top_k for row in rows]),
            (self.top_ps, [row.params.top_p for row in rows]),
            (self.seeds, np.array([row.seed for row in rows], np.uint64).view(np.int64)),
            (self.answers, np.array([row.answer for row in rows], np.uint64).view(np.int64)),
        ):
            kind = torch.empty(0, dtype=own.dtype).numpy().dtype
            own[at] = self.on_device(values, kind)
        self.have([(row.slot, 0, row.pages) for row in rows])

    def have(self, pages: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Rows in slots get pages from a place in their tables on."""
        slots = np.repeat([slot for slot, _, _ in pages], [len(own) for _, _, own in pages])
        places = np.concatenate([np.arange(first, first + len(own)) for _, first, own in pages])
        values = np.concatenate([np.asarray(own, np.int64) for _, _, own in pages])
        slots, places, values = self.on_device(np.stack([slots, places, values]), np.int64)
        self.tables[slots, places] = values.to(torch.int32)

    def on_device(self, values: Sequence[float] | NDArray[np.generic], dtype: Any) -> Tensor:
        """Without waiting for the device."""
        return torch.from_numpy(np.asarray(values, dtype)).pin_memory().to(self._device, non_blocking=True)
