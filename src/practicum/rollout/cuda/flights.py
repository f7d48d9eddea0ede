"""What the device has drawn, on its way to the host, which reads it while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.replay.hooks import RouterShape
from practicum.rollout.cuda.slots import SlotRow

_DEPTH = 4  # launches that the host has room for


@dataclass(slots=True)
class _Flight:
    rows: Sequence[SlotRow]
    place: int  # among the host's buffers
    landed: torch.cuda.Event
    routes: Tensor | None  # of the tokens that were read
    spans: Sequence[tuple[int, int]] | None  # where in `routes` each row's are; None: one for each


class Flights:
    def __init__(self, most_rows: int, shape: RouterShape | None, device: torch.device) -> None:
        """`shape` of the routes that are kept, if any are."""
        self._shape = shape
        self._device = device
        self.tokens = torch.zeros(most_rows, dtype=torch.int32, device=device)  # as they were drawn last
        self.log_probs = torch.zeros(most_rows, dtype=torch.float32, device=device)
        self.routes = self.room_for_routes(most_rows)
        self._host_tokens = torch.zeros(_DEPTH, most_rows, dtype=torch.int32, pin_memory=True)
        self._host_log_probs = torch.zeros(_DEPTH, most_rows, dtype=torch.float32, pin_memory=True)
        self._under_way: deque[_Flight] = deque()
        self._num = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        self._under_way.clear()

    def room_for_routes(self, num_tokens: int) -> Tensor | None:
        """[tokens, layers that route, k] on the device."""
        if self._shape is None:
            return None
        kind = torch.uint8 if self._shape.dtype is np.uint8 else torch.int32
        return torch.zeros(num_tokens, len(self._shape.layers), self._shape.k, dtype=kind, device=self._device)

    def take_off(
        self, rows: Sequence[SlotRow], routes: Tensor | None, spans: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """What was drawn for the rows last. `spans` say where in `routes` the tokens are that each row began with."""
        assert len(self._under_way) < _DEPTH
        place, num = self._num % _DEPTH, len(rows)
        self._num += 1
        self._host_tokens[place, :num].copy_(self.tokens[:num], non_blocking=True)
        self._host_log_probs[place, :num].copy_(self.log_probs[:num], non_blocking=True)
        there = None
        if routes is not None:
            there = torch.empty(routes.shape, dtype=routes.dtype, pin_memory=True)
            there.copy_(routes, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        for row in rows:
            row.num_launched += 1
        self._under_way.append(_Flight(rows, place, landed, there, spans))

    def land(self) -> Iterator[tuple[SlotRow, int, float]]:
        """The rows of the oldest launch that have not ended meanwhile, with what was drawn for each. Waits for it."""
        flight = self._under_way.popleft()
        flight.landed.synchronize()
        num = len(flight.rows)
        tokens = self._host_tokens[flight.place, :num].tolist()
        log_probs = self._host_log_probs[flight.place, :num].tolist()
        routes = self._known(flight.routes)
        for number, (row, token, log_prob) in enumerate(zip(flight.rows, tokens, log_probs, strict=True)):
            row.num_launched -= 1
            if row.has_ended:
                continue
            if routes is not None:
                first, last = (number, number + 1) if flight.spans is None else flight.spans[number]
                own = routes[first:last]
                if flight.spans is not None:  # what is read again is known
                    own = own[row.num_routed :]
                row.routes.append(own.copy())
                row.num_routed += len(own)
            yield row, token, log_prob

    def _known(self, routes: Tensor | None) -> NDArray[np.unsignedinteger[Any]] | None:
        if routes is None:
            return None
        assert self._shape is not None
        return routes.numpy().astype(self._shape.dtype, copy=False)
