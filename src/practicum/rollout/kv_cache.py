"""Keys and values of the native engine, and attention over them, behind transformers' own interfaces.

    Prompts(lengths)    new sequences laid end to end in one row: each attends to itself; kept under its row number
    Decode(positions)   one new token for each of the first rows: it attends to all that its row holds

Rows have room for one sequence each. Those in use are always the first ones, so that a step reads slices and gathers
nothing: when a sequence ends, the last one moves into its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.rollout.kernels import Kernels

_ROOM_STEP = 64  # rows grow by so many tokens at least


def rounded(room: int) -> int:
    """What a row of at least so many tokens has room for."""
    return -(-room // _ROOM_STEP) * _ROOM_STEP


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of a forward pass over whole sequences. `rows` says where their keys and values are kept; None: nowhere."""

    lengths: Sequence[int]
    rows: Sequence[int] | None

    def spans(self) -> list[tuple[int, int]]:
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return list(zip(starts, self.lengths, strict=False))


@dataclass(slots=True)
class Decode:
    """Of a forward pass over the next token of the first rows."""

    positions: Tensor  # [rows], where the token stands
    longest: int  # what the longest of the rows then holds
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[rows, 1, 1, longest], added to the scores; None where all rows are full."""
        if window not in self._masks:
            columns = torch.arange(self.longest, device=self.positions.device)[None]
            hidden = columns > self.positions[:, None]
            if window is not None:
                hidden |= columns <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None] if hidden.any() else None
        return self._masks[window]


class KVCache:
    """As far as transformers' models ask for one of their caches. `step` is set before each forward pass."""

    is_compileable = False
    is_sliding: Sequence[bool] = ()

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.step: Prompts | Decode
        self._kernels = kernels
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [rows, heads, room, width] each
        self.num_rows = self.room = 0
        self.windows: set[int | None] = set()  # that layers have asked for
        self.asked: dict[int, tuple[int | None, float]] = {}  # window and scaling, by layer

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, for one token of one row. Known once a sequence was kept."""
        return sum(
            part.element_size() * part.shape[1] * part.shape[3] for pair in self._layers.values() for part in pair
        )

    def reserve(self, num_rows: int, room: int, most_rows: int) -> None:
        """Have at least so many rows with room for so many tokens; the first ones keep what they hold.

        `most_rows` is how many with that much room the memory holds.
        """
        room = rounded(room)
        if num_rows <= self.num_rows and room <= self.room:
            return
        kept_rows = min(num_rows, self.num_rows)
        kept_room = min(room, self.room)
        # Twice as many as before, so that growing one by one does not copy each time.
        self.num_rows, self.room = max(num_rows, min(2 * self.num_rows, most_rows)), room
        for index, (keys, values) in self._layers.items():
            self._layers[index] = self._empty(keys), self._empty(values)
            for part, larger in zip((keys, values), self._layers[index], strict=True):
                larger[:kept_rows, :, :kept_room] = part[:kept_rows, :, :kept_room]

    def copy(self, row: int, to: int, length: int) -> None:
        for pair in self._layers.values():
            for part in pair:
                part[to, :, :length] = part[row, :, :length]

    def kept(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys and values, [rows, heads, room, width] each."""
        return self._layers[layer]

    def clear(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self.num_rows = self.room = 0

    # What transformers' models call

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [batch, heads, tokens, width]; those that the step attends to."""
        step = self.step
        if isinstance(step, Prompts) and step.rows is None:
            return key, value
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer_idx]
        if isinstance(step, Prompts):
            assert step.rows is not None
            for row, (start, length) in zip(step.rows, step.spans(), strict=True):
                keys[row, :, :length] = key[0, :, start : start + length]
                values[row, :, :length] = value[0, :, start : start + length]
            return key, value
        num = len(step.positions)
        if self._kernels is not None:
            self._kernels.keep(key, step.positions, keys)
            self._kernels.keep(value, step.positions, values)
        else:
            rows = torch.arange(num, device=key.device)
            keys[rows, :, step.positions] = key[:, :, 0]
            values[rows, :, step.positions] = value[:, :, 0]
        return keys[:num, :, : step.longest], values[:num, :, : step.longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def _empty(self, like: Tensor) -> Tensor:
        # Not just any memory: what is masked counts nothing times its value, and that must be a number.
        return like.new_zeros(self.num_rows, like.shape[1], self.room, like.shape[3])

    # Registered with transformers' attention interface

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[batch, tokens, heads, width] from a query [batch, heads, tokens, width]."""
        if softcap is not None or s_aux is not None:
            raise NotImplementedError("attention with capped scores or with sinks")
        self.windows.add(sliding_window)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if (layer := getattr(module, "layer_idx", None)) is not None:
            self.asked[layer] = sliding_window, scaling
        if isinstance(self.step, Decode) and self._kernels is not None:
            out = self._kernels.attend(query, key, value, self.step.positions, sliding_window, scaling)
            return out[:, None], None
        if isinstance(self.step, Decode):
            out = _decoded(query, key, value, self.step.mask(sliding_window), scaling)
        else:
            out = _each_by_itself(query, key, value, self.step, sliding_window, scaling)
        return out.transpose(1, 2), None


def _decoded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """One token a row. Heads that share keys are so many queries to them: nothing is repeated."""
    rows, heads, _, width = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    if query.device.type == "cpu" and query.dtype == torch.float32:
        out = _attended(grouped, key, value, mask, scaling or width**-0.5)
    else:
        mask = None if mask is None else mask.to(query.dtype)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, 1, value.shape[-1])


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """As products of many small matrices: with few queries, faster on several cores than PyTorch's fused kernel."""
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).mul_(scaling)
    if mask is not None:
        scores.unflatten(0, query.shape[:2]).add_(mask)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1))


def _each_by_itself(
    query: Tensor, key: Tensor, value: Tensor, step: Prompts, window: int | None, scaling: float | None
) -> Tensor:
    """Sequences of one length that stand side by side are computed together."""
    parts: list[Tensor] = []
    for length, same in groupby(step.spans(), key=lambda span: span[1]):
        spans = list(same)
        start = spans[0][0]
        q, k, v = (
            part[0, :, start : start + length * len(spans)].unflatten(1, (len(spans), length)).transpose(0, 1)
            for part in (query, key, value)
        )
        mask = None
        if window is not None and length > window:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        parts.append(out.transpose(0, 1).flatten(1, 2))
    return torch.cat(parts, dim=1)[None]
