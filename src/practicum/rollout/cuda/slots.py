"""What the device knows of each row, by slot: its last token, where that stands, how the next is drawn, its pages; and
who has which slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.rollout.cuda.pages import PAGE, PagePool, num_pages
from practicum.rollout.rows import Pending, Row
from practicum.types import SamplingParams

PAGES_AT_A_TIME = 4
_LARGEST = 2**31 - 1


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
            (self.top_ks, [min(row.params.top_k, _LARGEST) for row in rows]),
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


class SlotRow(Row):
    """One that has a slot and pages."""

    __slots__ = ("has_ended", "num_launched", "num_routed", "pages", "slot")

    def __init__(self, pending: Pending, answer: int) -> None:
        super().__init__(pending.ticket, answer, pending.ending, pending.num_tokens)
        self.slot = -1
        self.pages: list[int] = []
        self.num_launched = 0  # tokens that the device has been asked for and we have not read
        self.num_routed = 0  # tokens whose experts are known
        self.has_ended = False

    @property
    def num_tokens(self) -> int:
        """Prompt and answer, with what is on its way."""
        return self.length + self.num_launched

    @property
    def is_at_end(self) -> bool:
        """All it may have is on its way."""
        return self.num_tokens >= self.most_tokens


class Seats:
    """Which rows have which slots and pages. Those that are given back may be taken at once: the device does what it is
    asked to in order."""

    def __init__(self, num: int, most_tokens: int, device: torch.device) -> None:
        self.slots = Slots(num, num_pages(most_tokens) + PAGES_AT_A_TIME, device)
        self.begin_anew(1)

    def begin_anew(self, num_pages: int) -> None:
        """Nobody has anything, of so many pages."""
        self.pool = PagePool(num_pages)
        self._free = list(range(self.slots.num - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots."""
        return len(self._free)

    def seat(self, groups: Sequence[Sequence[SlotRow]]) -> None:
        """A slot for each row, and pages: those that the prompt of a group fills are of all its rows."""
        beginnings = []
        for rows in groups:
            length = rows[0].length
            whole = self.pool.take(length // PAGE)
            for number, row in enumerate(rows):
                if number:
                    self.pool.share(whole)
                row.slot = self._free.pop()
                row.pages = [*whole, *self.pool.take(num_pages(length + 1) - len(whole))]
                request, (seed, answer) = row.ticket.request, row.seed
                num_prompt = len(request.prompt_ids)
                beginnings.append(
                    Beginning(row.slot, length - 1, num_prompt, request.params, seed, answer, row.pages)
                )  # fmt: skip
        self.slots.begin(beginnings)

    def grow(self, rows: Sequence[SlotRow]) -> bool:
        """Pages for one more token of each row; False, and nothing changed, if there are not enough."""
        wanted = [row for row in rows if row.num_tokens > len(row.pages) * PAGE]
        if len(wanted) > self.pool.num_free:
            return False
        if wanted:
            each = max(1, min(PAGES_AT_A_TIME, self.pool.num_free // len(wanted)))
            news = []
            for row in wanted:
                own = self.pool.take(max(1, min(each, num_pages(row.most_tokens) - len(row.pages))))
                news.append((row.slot, len(row.pages), own))
                row.pages += own
            self.slots.have(news)
        return True

    def leave(self, row: SlotRow) -> None:
        self.pool.give_back(row.pages)
        self._free.append(row.slot)
        row.slot, row.pages = -1, []
