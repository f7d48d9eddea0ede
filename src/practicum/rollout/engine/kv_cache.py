"""Keys and values in blocks, and attention over them, behind transformers' own interfaces.

    Prefill(lengths, places)    new sequences laid end to end in one row: each attends to itself; kept in its blocks
    Decode(tables, positions)   one new token for each row: it attends to all that the blocks of its row hold

Which blocks belong to whom is the scheduler's; block 0 is nobody's, so that a table may be filled up with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.rollout.engine.cpu.kernels import BLOCK, Kernels


@dataclass(frozen=True, slots=True)
class Prefill:
    """A forward pass over whole sequences. `places` [tokens] are a block times BLOCK and where in it; None: nowhere."""

    lengths: Sequence[int]
    places: Tensor | None

    def spans(self) -> list[tuple[int, int]]:
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return list(zip(starts, self.lengths, strict=False))


@dataclass(slots=True)
class Decode:
    """A forward pass over the next token of each row."""

    tables: Tensor  # [rows, blocks], the blocks of each row, those of its next token too
    positions: Tensor  # [rows], where the token stands
    places: Tensor  # [rows], where it is kept
    longest: int  # tokens that the longest row then holds
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: Tensor, positions: Tensor, longest: int) -> Decode:
        own = tables.gather(1, (positions // BLOCK)[:, None])[:, 0]
        return cls(tables, positions, own * BLOCK + positions % BLOCK, longest)

    def mask(self, window: int | None) -> Tensor | None:
        """Return what is added to the scores [rows, 1, 1, tokens]; None where all rows are full."""
        if window not in self._masks:
            columns = torch.arange(self.longest, device=self.positions.device)[None]
            hidden = columns > self.positions[:, None]
            if window is not None:
                hidden |= columns <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None] if hidden.any() else None
        return self._masks[window]


class KVCache:
    """A cache as transformers' models need it. `step` is set before each forward pass."""

    is_compileable = False
    is_sliding: Sequence[bool] = ()

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.step: Prefill | Decode
        self.num_blocks = 0  # beside block 0; memory is taken when something is first kept
        self.gathers = kernels is None  # for a step, what the rows' blocks hold; or kernels attend to the blocks
        self._kernels = kernels
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [1 + blocks, heads, BLOCK, width] each
        self.windows: set[int | None] = set()  # that layers have asked for
        self.asked: dict[int, tuple[int | None, float]] = {}  # window and scaling, by layer

    @property
    def bytes_per_token(self) -> int:
        """The size of keys and values in all layers; known once something was kept."""
        return sum(
            part.element_size() * part.shape[1] * part.shape[3] for pair in self._layers.values() for part in pair
        )

    def copy(self, blocks: Sequence[int], to: Sequence[int]) -> None:
        """Copy what the first blocks hold to the second."""
        for pair in self._layers.values():
            for part in pair:
                part[list(to)] = part[list(blocks)]

    def kept(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, [1 + blocks, heads, BLOCK, width] each."""
        return self._layers[layer]

    def clear(self) -> None:
        """Give the memory back."""
        self._layers.clear()

    # What transformers' models call

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [batch, heads, tokens, width]; return what the step attends to."""
        step = self.step
        if step.places is None:
            return key, value
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._empty(key), self._empty(value))
        kept = self._layers[layer_idx]
        for part, given in zip(kept, (key, value), strict=True):
            rows = given[0].transpose(0, 1) if isinstance(step, Prefill) else given[:, :, 0]
            if self._kernels is not None:
                self._kernels.keep(rows, step.places, part)
            else:
                part[step.places // BLOCK, :, step.places % BLOCK] = rows
        if isinstance(step, Prefill):
            return key, value
        return (_gathered(kept[0], step), _gathered(kept[1], step)) if self.gathers else kept

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
        shape = 1 + self.num_blocks, like.shape[1], BLOCK, like.shape[3]
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # NumPy's zeros are taken from the system when they are first written to: blocks that nobody has cost nothing.
        zeros = np.zeros(int(np.prod(shape)) * like.element_size(), np.uint8)
        return torch.from_numpy(zeros).view(like.dtype).view(shape)

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
        """Return the attention [batch, tokens, heads, width] of a query [batch, heads, tokens, width]."""
        if softcap is not None or s_aux is not None:
            raise NotImplementedError("attention with capped scores or with sinks")
        self.windows.add(sliding_window)
        step, scaling = self.step, query.shape[-1] ** -0.5 if scaling is None else scaling
        if (layer := getattr(module, "layer_idx", None)) is not None:
            self.asked[layer] = sliding_window, scaling
        if isinstance(step, Prefill):
            out = _each_by_itself(query, key, value, step, sliding_window, scaling)
        elif self._kernels is not None and not self.gathers:
            out = self._kernels.attend(query, key, value, step.tables, step.positions, sliding_window, scaling)
            return out[:, None], None
        else:
            out = _decoded(query, key, value, step.mask(sliding_window), scaling)
        return out.transpose(1, 2), None


def _gathered(kept: Tensor, step: Decode) -> Tensor:
    """Return what the blocks of each row hold, [rows, heads, tokens, width]: no more tokens than the longest row has,
    since in bfloat16 their number changes how sums are rounded."""
    heads = torch.arange(kept.shape[1], device=kept.device)[None, :, None]
    return kept[step.tables[:, None], heads].flatten(2, 3)[:, :, : step.longest]


def _decoded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend with one token a row. Heads that share keys are so many queries to them: nothing is repeated."""
    rows, heads, _, width = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    if query.device.type == "cpu" and query.dtype == torch.float32:
        out = _attended(grouped, key, value, mask, scaling or width**-0.5)
    else:
        mask = None if mask is None else mask.to(query.dtype)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, 1, value.shape[-1])


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend by products of many small matrices: faster for few queries on several cores than PyTorch's kernel."""
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).mul_(scaling)
    if mask is not None:
        scores.unflatten(0, query.shape[:2]).add_(mask)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1))


def _each_by_itself(
    query: Tensor, key: Tensor, value: Tensor, step: Prefill, window: int | None, scaling: float | None
) -> Tensor:
    """Attend within each sequence; adjacent ones of one length are computed together."""
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
