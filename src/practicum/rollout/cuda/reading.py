"""Prompts through the model, and a trial of it: whether the same is computed as by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.rollout.answers import most_positions
from practicum.rollout.cuda.flights import Flights
from practicum.rollout.cuda.pages import PAGE, num_pages
from practicum.rollout.cuda.slots import Beginning, Seats, SlotRow
from practicum.rollout.cuda.step import LeanModel, Prompts, Rows
from practicum.types import SamplingParams

READ_TOKENS = 16384  # in one pass
_TRIED = PAGE + 6
Ids = NDArray[np.int32]


class Reader:
    def __init__(self, lean: LeanModel, seats: Seats, flights: Flights, pages: Tensor) -> None:
        self._lean, self._seats, self._flights, self._pages = lean, seats, flights, pages

    def read(self, ids: Sequence[Ids], slots: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits after the last token of each sequence [sequences, vocabulary], and the routes of all tokens. Keys and
        values are kept in the rows' pages. A single long sequence is read in parts."""
        if len(ids) > 1 or len(ids[0]) <= READ_TOKENS:
            return self._pass(ids, [0] * len(ids), slots)
        routes: list[Tensor] = []
        for start in range(0, len(ids[0]), READ_TOKENS):
            logits, own = self._pass([ids[0][start : start + READ_TOKENS]], [start], slots)
            routes += [] if own is None else [own]
        return logits, torch.cat(routes) if routes else None

    def share(self, rows: Sequence[SlotRow]) -> None:
        """Of a prompt that has been read for the first: what it has begun of its last page is copied to the others'."""
        whole, begun = divmod(rows[0].length, PAGE)
        if begun and len(rows) > 1:
            to = self._seats.slots.on_device([row.pages[whole] for row in rows[1:]], np.int64)
            self._pages[to] = self._pages[rows[0].pages[whole]].clone()

    def look(self, ids: Ids) -> Tensor:
        """Logits of a sequence [tokens, vocabulary]; nothing is kept."""
        return self._pass([ids], [0], None)[0]

    def _pass(
        self, ids: Sequence[Ids], starts: Sequence[int], slots: Sequence[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        lengths, own = [len(one) for one in ids], self._seats.slots
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
        new, both = np.cumsum([0, *lengths]), np.cumsum([0, *np.add(lengths, starts)])
        prompts = Prompts(
            lengths,
            starts,
            own.on_device(new, np.int32),
            own.on_device(both, np.int32),
            own.on_device(np.repeat([own.num] * len(ids) if slots is None else slots, lengths), np.int32),
            own.on_device(positions, np.int32),
            None if slots is None else own.tables,
            self._flights.room_for_routes(len(positions)),
        )
        keep = None if slots is None else own.on_device(new[1:] - 1, np.int64)
        tokens = own.on_device(np.concatenate(ids), np.int64)
        logits = self._lean.logits_of_prompts(tokens, prompts, None if slots is None else self._pages, keep)
        return logits, prompts.routes

    @torch.inference_mode()
    def trial(self, model: Any) -> float:
        """The mean difference to the model's own log-probs: of a sequence that is looked at, kept in parts, and then
        decoded by steps of one row and of two."""
        num = min(_TRIED, most_positions(model.config) or _TRIED)
        read, seats = num - min(8, num // 2), self._seats
        ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, num, np.int32)
        expected = model(input_ids=torch.from_numpy(ids)[None].long().to(self._pages.device), use_cache=False).logits
        own = seats.pool.take(num_pages(num))
        seats.slots.begin([Beginning(0, 0, read, SamplingParams(1), 0, 0, own)])
        parts = [self.look(ids[:read])]
        self._pass([ids[: read - 1]], [0], [0])
        self._pass([ids[read - 1 : read]], [read - 1], [0])
        for at in range(read, num):
            seats.slots.tokens[0], seats.slots.positions[0] = int(ids[at]), at
            slots = torch.zeros(1 + at % 2, dtype=torch.int32, device=self._pages.device)
            rows = Rows(slots, seats.slots.positions, seats.slots.tables, num_splits=1 + at % 2)
            parts.append(self._lean.logits_of_rows(seats.slots.tokens, rows, self._pages)[:1])
        seats.pool.give_back(own)
        gap = torch.cat(parts).float().log_softmax(-1) - expected[0].float().log_softmax(-1)
        return float(gap.abs().mean())
