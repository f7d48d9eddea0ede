"""What the device knows of each sequence, by slot, and what it has drawn, on its way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import TrainingError
from practicum.replay.hooks import RouterShape
from practicum.rollout.engine.sequence import Sequence

_MAX_TOP_K = 2**31 - 1
_NUM_BUFFERS = 4  # launches that the host has room for
_MAX_STEPS = 64  # whose routes are kept together


class DeviceState:
    """The last token of each sequence, its position, how the next one is drawn, and the table of its blocks.

    There is one slot more than there are sequences: the last belongs to rows that pad a batch.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        self.num_slots = num_slots
        self._device = device
        self.tokens = zeros(torch.int64)
        self.positions, self.num_prompts, self.top_ks = zeros(torch.int32), zeros(torch.int32), zeros(torch.int32)
        self.temperatures, self.top_ps = zeros(torch.float32), zeros(torch.float32) + 1
        self.seeds, self.numbers = zeros(torch.int64), zeros(torch.int64)
        self.tables = zeros(torch.int32, max_blocks)
        self._num_blocks = [0] * num_slots  # in the table of each slot

    def begin(self, sequences: Items[Sequence]) -> None:
        """Take sequences in that have slots and blocks, and are about to be read."""
        at = self.on_device([sequence.slot for sequence in sequences], np.int64)
        params = [sequence.params for sequence in sequences]
        for own, values in (
            (self.positions, [sequence.num_tokens - 1 for sequence in sequences]),
            (self.num_prompts, [len(sequence.prompt_ids) for sequence in sequences]),
            (self.temperatures, [own.temperature for own in params]),
            (self.top_ks, [min(own.top_k, _MAX_TOP_K) for own in params]),
            (self.top_ps, [own.top_p for own in params]),
            (self.seeds, np.array([sequence.seed for sequence in sequences], np.uint64).view(np.int64)),
            (self.numbers, np.array([sequence.number for sequence in sequences], np.uint64).view(np.int64)),
        ):
            own[at] = self.on_device(values, torch.empty(0, dtype=own.dtype).numpy().dtype)
        for sequence in sequences:
            self._num_blocks[sequence.slot] = 0
        self.extend(sequences)

    def extend(self, sequences: Items[Sequence]) -> None:
        """Write the blocks that sequences have got into their tables."""
        starts = [self._num_blocks[sequence.slot] for sequence in sequences]
        more = [sequence.blocks[start:] for sequence, start in zip(sequences, starts, strict=True)]
        slots = np.repeat([sequence.slot for sequence in sequences], [len(own) for own in more])
        columns = np.concatenate([start + np.arange(len(own)) for start, own in zip(starts, more, strict=True)])
        values = np.concatenate([np.asarray(own, np.int64) for own in more])
        slots, columns, values = self.on_device(np.stack([slots, columns, values]), np.int64)
        self.tables[slots, columns] = values.to(torch.int32)
        for sequence in sequences:
            self._num_blocks[sequence.slot] = len(sequence.blocks)

    def on_device(self, values: Items[float] | NDArray[np.generic], dtype: Any) -> Tensor:
        """Copy values to the device without waiting for it."""
        return torch.from_numpy(np.asarray(values, dtype)).pin_memory().to(self._device, non_blocking=True)


@dataclass(slots=True)
class _Launch:
    sequences: Items[Sequence]
    buffer: int
    is_done: torch.cuda.Event
    routes: Tensor | None  # of the tokens that were read
    spans: Items[tuple[int, int]] | None  # where in `routes` those of each sequence are; None: one row for each


class InFlight:
    """Launches whose tokens the host has not read: it reads them while the device computes on."""

    def __init__(self, max_rows: int, shape: RouterShape | None, device: torch.device) -> None:
        self._shape = shape  # of the routes that are kept, if any are
        self._device = device
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)  # as drawn last
        self.log_probs = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.routes = self.empty_routes(max_rows)
        self._host_tokens = torch.zeros(_NUM_BUFFERS, max_rows, dtype=torch.int32, pin_memory=True)
        self._host_log_probs = torch.zeros(_NUM_BUFFERS, max_rows, dtype=torch.float32, pin_memory=True)
        self._launches: deque[_Launch] = deque()
        self._num_launched = 0
        self._steps: list[NDArray[np.unsignedinteger[Any]]] = []  # [sequences, layers, k] of decoding steps
        self._steps_of: Items[Sequence] = []

    def __len__(self) -> int:
        return len(self._launches)

    def clear(self) -> None:
        self._launches.clear()
        self._steps.clear()

    def empty_routes(self, num_tokens: int) -> Tensor | None:
        """Return room for routes [tokens, layers that route, k] on the device, if they are kept."""
        if self._shape is None:
            return None
        dtype = torch.uint8 if self._shape.dtype is np.uint8 else torch.int32
        return torch.zeros(num_tokens, len(self._shape.layers), self._shape.k, dtype=dtype, device=self._device)

    def add(
        self, sequences: Items[Sequence], routes: Tensor | None, spans: Items[tuple[int, int]] | None = None
    ) -> None:
        """Start the copies of what was drawn last for the sequences, and of the routes of the tokens that were read."""
        assert len(self._launches) < _NUM_BUFFERS
        buffer, num = self._num_launched % _NUM_BUFFERS, len(sequences)
        self._num_launched += 1
        self._host_tokens[buffer, :num].copy_(self.tokens[:num], non_blocking=True)
        self._host_log_probs[buffer, :num].copy_(self.log_probs[:num], non_blocking=True)
        host_routes = None
        if routes is not None:
            host_routes = torch.empty(routes.shape, dtype=routes.dtype, pin_memory=True)
            host_routes.copy_(routes, non_blocking=True)
        is_done = torch.cuda.Event()
        is_done.record()
        self._launches.append(_Launch(sequences, buffer, is_done, host_routes, spans))

    def collect(self) -> list[tuple[Sequence, int, float]]:
        """Wait for the oldest launch; return what was drawn for each of its sequences, ended ones too."""
        launch = self._launches.popleft()
        launch.is_done.synchronize()
        sequences, num = launch.sequences, len(launch.sequences)
        tokens, log_probs = self._host_tokens[launch.buffer, :num], self._host_log_probs[launch.buffer, :num]
        goes_on = [sequence.finish_reason is None for sequence in sequences]  # it has not ended in the launch before
        if np.isnan(log_probs.numpy()[goes_on]).any():
            raise TrainingError(
                "the model's logits are no longer numbers: its weights are spoilt. Go back to a checkpoint from "
                "before and lower actor.lr."
            )
        if launch.routes is not None and self._shape is not None:
            routes = launch.routes.numpy().astype(self._shape.dtype, copy=False)
            if launch.spans is None and all(goes_on):
                if self._steps_of is not sequences or len(self._steps) == _MAX_STEPS:
                    self.gather_routes()
                self._steps_of = sequences
                self._steps.append(routes)
            else:
                self._append_routes(launch, routes)
        return list(zip(sequences, tokens.tolist(), log_probs.tolist(), strict=True))

    def gather_routes(self) -> None:
        """Append the routes of the steps that were collected last to their sequences.

        They are kept step by step until then: to do it for each token would take the host longer than the device.
        """
        if self._steps:
            for sequence, own in zip(self._steps_of, np.stack(self._steps, axis=1), strict=True):
                sequence.routes.append(own.copy())
            self._steps.clear()

    def _append_routes(self, launch: _Launch, routes: NDArray[np.unsignedinteger[Any]]) -> None:
        self.gather_routes()
        spans = launch.spans or [(number, number + 1) for number in range(len(launch.sequences))]
        for sequence, (first, last) in zip(launch.sequences, spans, strict=True):
            if sequence.finish_reason is None:
                # A preempted sequence is read again: its first routes are known.
                own = routes[first:last] if launch.spans is None else routes[first:last][sequence.num_routed :]
                sequence.routes.append(own.copy())
