"""Forward passes of a transformers model with the engine's own kernels, past transformers' forward.

    embedding ─▶ for each layer: norm, projections, rotate and store, attention, norm, MLP or experts ─▶ norm ─▶ logits
                                                                        │
              PrefillBatch: over the new tokens, sequences end to end; over blocks too where a sequence has some
              DecodeBatch:  one token of each sequence, over its blocks

Weights stay where they are; projections of one input are one product where their weights are adjacent in memory.
Modules only give their weights: hooks on them are not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from practicum.rollout.engine.cuda.attention import BLOCK_SIZE, attend, rotate_and_store
from practicum.rollout.engine.cuda.elementwise import MAX_WIDTH, matvec, rms_norm, silu_mul
from practicum.rollout.engine.cuda.experts import Router, experts, shared_expert
from practicum.rollout.engine.cuda.weights import as_one

_FLASH_TYPES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class PrefillBatch:
    """New tokens of sequences, end to end. A sequence with a start has so many tokens in its blocks already."""

    lengths: Sequence[int]  # of the new tokens
    starts: Sequence[int]
    ends: Tensor  # [sequences + 1], among the new tokens
    ends_of_all: Tensor  # [sequences + 1], among new and earlier tokens
    slots: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    tables: Tensor | None  # by slot; None: keys and values are not kept
    routes: Tensor | None = None  # [tokens, layers that route, k], to be written


@dataclass(slots=True)
class DecodeBatch:
    """One new token for the sequence in each slot."""

    slots: Tensor  # [rows]
    positions: Tensor  # by slot
    tables: Tensor  # by slot
    num_splits: int
    routes: Tensor | None = None  # [rows, layers that route, k], to be written


@dataclass(slots=True)
class _Layer:
    before_attention: Any
    attention: Any
    before_mlp: Any
    mlp: Any
    projections: list[tuple[Tensor, Tensor | None]]  # three, or all as one
    gates: list[Tensor]  # two, or both as one; none where there are experts
    router: Router | None
    norms: tuple[Tensor, Tensor] | None
    eps: float
    window: int | None


class FusedModel:
    """A model of a family that is computed here. `bind` and `prepare_rotations` come before the first pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        base = model.base_model
        self._embedding, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, base.norm
        self._head = model.get_output_embeddings()
        self.num_layers = len(base.layers)
        attention = base.layers[0].self_attn
        self.width = attention.head_dim
        self.heads, self.kv_heads = (p.out_features // self.width for p in (attention.q_proj, attention.k_proj))
        self._layers: list[_Layer] = []
        self._angles: tuple[Tensor, Tensor] | None = None

    def bind(self) -> None:
        """Take the weights from where they are now: again whenever they have moved."""
        config = self._model.config.get_text_config()
        self._layers = [_bind_layer(layer, config) for layer in self._model.base_model.layers]
        self._fits_matvec = max(config.hidden_size, config.intermediate_size, self.heads * self.width) <= MAX_WIDTH

    @torch.inference_mode()
    def prepare_rotations(self, num_positions: int) -> None:
        positions = torch.arange(num_positions, device=self._head.weight.device)[None]
        parts = self._rotary(self._head.weight[:1, None], positions)
        assert parts[0].shape[-1] == self.width, "only a part of each head is rotated"
        cosines, sines = (part[0, :, : self.width // 2].contiguous() for part in parts)
        self._angles = cosines, sines

    @property
    def values_per_token(self) -> int:
        """The number of values that are kept for each token: its keys and values in all layers."""
        return int(2 * self.num_layers * self.kv_heads * self.width)

    def prefill(self, tokens: Tensor, batch: PrefillBatch, blocks: Tensor | None, keep: Tensor | None) -> Tensor:
        """Return the logits [kept, vocabulary] of tokens [tokens] at the indices `keep`; None keeps all."""
        attention = _PrefillAttention(batch)
        hidden = self._body(tokens, batch.positions, batch.slots, batch.tables, blocks, attention, batch.routes)
        return self._logits(hidden if keep is None else hidden[keep])

    def decode(self, tokens: Tensor, batch: DecodeBatch, blocks: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] after the last token of each sequence; `tokens` are indexed by slot."""
        slots = batch.slots.long()
        now = batch.positions[slots]
        if len(slots) == 1 and self._fits_matvec:
            return self._decode_one(tokens[slots], now, batch, blocks)
        return self._logits(self._body(tokens[slots], now, batch.slots, batch.tables, blocks, batch, batch.routes))

    def _body(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor | None, blocks: Tensor | None,
        attention: _PrefillAttention | DecodeBatch, routes: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the hidden states [tokens, hidden], normed for the output layer."""
        assert self._angles is not None, "a pass before prepare_rotations"
        hidden = self._embedding(tokens)
        delta: Tensor | None = None  # what is to be added to `hidden`
        gives_keys = isinstance(attention, _PrefillAttention)
        routing = _Routing(self._layers, hidden, routes)
        for number, layer in enumerate(self._layers):
            x = rms_norm(hidden, delta, layer.before_attention.weight, layer.before_attention.variance_epsilon)
            query, key, value = self._split([linear(x, weight, bias) for weight, bias in layer.projections])
            own = None if blocks is None else blocks[:, number]
            query, key = rotate_and_store(
                query, key, value, layer.norms, layer.eps, self._angles, slots, positions, tables, own, gives_keys
            )
            if isinstance(attention, _PrefillAttention):
                attended = attention(query, key, value, own, layer)
            else:
                assert own is not None
                attended = _decode_attention(query, own, attention, layer)
            delta = linear(attended.flatten(1), layer.attention.o_proj.weight, layer.attention.o_proj.bias)
            x = rms_norm(hidden, delta, layer.before_mlp.weight, layer.before_mlp.variance_epsilon)
            delta = routing(layer, x) if layer.router is not None else _mlp(layer, x)
        return rms_norm(hidden, delta, self._norm.weight, self._norm.variance_epsilon)

    def _decode_one(self, tokens: Tensor, positions: Tensor, batch: DecodeBatch, blocks: Tensor) -> Tensor:
        """Return the logits of a single row: the time goes into reading weights and launching kernels."""
        assert self._angles is not None, "a pass before prepare_rotations"
        hidden = self._embedding(tokens)
        routing = _Routing(self._layers, hidden, batch.routes)
        delta: Tensor | None = None  # of experts: it is not in `hidden` yet
        for number, layer in enumerate(self._layers):
            x, norm = _input_and_norm(hidden, delta, layer.before_attention)
            parts = [matvec(x, weight, bias=bias, norm=norm) for weight, bias in layer.projections]
            query, key, value = self._split(parts)
            query, _ = rotate_and_store(
                query, key, value, layer.norms, layer.eps, self._angles, batch.slots, positions, batch.tables,
                blocks[:, number], False,
            )  # fmt: skip
            attended = _decode_attention(query, blocks[:, number], batch, layer).flatten(1)
            matvec(attended, layer.attention.o_proj.weight, bias=layer.attention.o_proj.bias, add_to=hidden)
            own = layer.before_mlp
            if layer.router is not None:
                delta = routing(layer, rms_norm(hidden, None, own.weight, own.variance_epsilon))
                continue
            delta = None
            gate, up = layer.gates if len(layer.gates) == 2 else layer.gates[0].chunk(2)
            inner = matvec(hidden, gate, up=up, norm=(own.weight, own.variance_epsilon))
            matvec(inner, layer.mlp.down_proj.weight, add_to=hidden)
        x, norm = _input_and_norm(hidden, delta, self._norm)
        return matvec(x, self._head.weight, bias=self._head.bias, norm=norm)

    def _split(self, parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [tokens, heads, width]."""
        if len(parts) == 1:
            sizes = [heads * self.width for heads in (self.heads, self.kv_heads, self.kv_heads)]
            parts = list(parts[0].split(sizes, dim=1))
        query, key, value = (part.unflatten(1, (-1, self.width)) for part in parts)
        return query, key, value

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = linear(hidden, self._head.weight, self._head.bias)
        return logits


def _input_and_norm(hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, tuple[Tensor, float] | None]:
    """Return the input of a `matvec` and the norm that it applies; the input is normed here if something is added."""
    if delta is None:
        return hidden, (norm.weight, norm.variance_epsilon)
    return rms_norm(hidden, delta, norm.weight, norm.variance_epsilon), None


class _PrefillAttention:
    """Attention of new sequences, laid end to end."""

    def __init__(self, batch: PrefillBatch) -> None:
        self._batch = batch
        self._longest_new = max(batch.lengths)
        self._longest = max(a + b for a, b in zip(batch.lengths, batch.starts, strict=True))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, layer: _Layer) -> Tensor:
        """Return [tokens, heads, width] for queries of that shape, and keys and values [tokens, kv heads, width]."""
        batch = self._batch
        if any(batch.starts):
            assert blocks is not None
            key, value = self._with_earlier(key, value, blocks)
        scaling, window = layer.attention.scaling, layer.window
        if query.dtype not in _FLASH_TYPES:
            spans = list(zip(batch.lengths, batch.starts, strict=True))
            return _masked_attention(query, key, value, spans, window, scaling)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, batch.ends, batch.ends_of_all, self._longest_new, self._longest, 0.0, True, False,
            scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
        return out

    def _with_earlier(self, key: Tensor, value: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Put what the blocks hold of each sequence in front of its new keys and values."""
        batch, kept = self._batch, []
        assert batch.tables is not None
        begin = 0
        for length, start in zip(batch.lengths, batch.starts, strict=True):
            table = batch.tables[batch.slots[begin].long(), : -(-start // BLOCK_SIZE)].long()
            earlier = (
                blocks[table].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :start]
            )  # [2, tokens, heads, width]
            new = torch.stack([key[begin : begin + length], value[begin : begin + length]])
            kept.append(torch.cat([earlier, new], 1))
            begin += length
        both = torch.cat(kept, 1)
        return both[0], both[1]


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: list[tuple[int, int]], window: int | None, scaling: float
) -> Tensor:
    """Attend in a dtype that flash attention does not take."""
    parts, new, at = [], 0, 0
    for length, start in spans:
        q = query[new : new + length].transpose(0, 1)[None]
        k, v = (part[at : at + start + length].transpose(0, 1)[None] for part in (key, value))
        seen = torch.ones(length, start + length, dtype=torch.bool, device=query.device).tril(start)
        if window is not None:
            seen = seen.triu(start + 1 - window)
        enable_gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=enable_gqa)
        parts.append(out[0].transpose(0, 1))
        new, at = new + length, at + start + length
    return torch.cat(parts)


def _decode_attention(query: Tensor, blocks: Tensor, batch: DecodeBatch, layer: _Layer) -> Tensor:
    scaling = layer.attention.scaling
    return attend(query, blocks, batch.slots, batch.positions, batch.tables, scaling, layer.window, batch.num_splits)


class _Routing:
    """The experts of one pass, layer after layer; it records what they choose."""

    def __init__(self, layers: list[_Layer], hidden: Tensor, routes: Tensor | None) -> None:
        self._number = 0
        self._routes = routes
        routers = [layer for layer in layers if layer.router is not None]
        if routers:
            num = routers[0].mlp.experts.down_proj.shape[0]
            self._counts = torch.zeros((len(routers), num), dtype=torch.int32, device=hidden.device)

    def __call__(self, layer: _Layer, x: Tensor) -> Tensor:
        """Return what is to be added to the hidden states: [tokens, k, width], or [tokens, width]."""
        assert layer.router is not None
        number, self._number = self._number, self._number + 1
        own, mlp = layer.mlp.experts, layer.mlp
        routes = None if self._routes is None else self._routes[:, number]
        parts = experts(x, layer.router, own.gate_up_proj, own.down_proj, self._counts[number], routes)
        if hasattr(mlp, "shared_expert"):
            return parts.sum(1) + shared_expert(x, mlp.shared_expert, mlp.shared_expert_gate)
        return parts


def _mlp(layer: _Layer, x: Tensor) -> Tensor:
    parts = [linear(x, weight) for weight in layer.gates]
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=1)
    return linear(silu_mul(gate, up), layer.mlp.down_proj.weight)


def _bind_layer(layer: Any, config: Any) -> _Layer:
    own, mlp = layer.self_attn, layer.mlp
    linears = own.q_proj, own.k_proj, own.v_proj
    weight = as_one([one.weight for one in linears])
    has_bias = own.q_proj.bias is not None
    bias = as_one([one.bias for one in linears]) if has_bias else None
    projections = [(one.weight, one.bias) for one in linears]
    if weight is not None and (bias is not None or not has_bias):
        projections = [(weight, bias)]
    gates: list[Tensor] = []
    router = Router.of(mlp.gate, config.model_type) if hasattr(mlp, "experts") else None
    if isinstance(getattr(mlp, "gate_proj", None), nn.Linear):
        pair = [mlp.gate_proj.weight, mlp.up_proj.weight]
        joined = as_one(pair)
        gates = pair if joined is None else [joined]
    norms = (own.q_norm.weight, own.k_norm.weight) if getattr(own, "q_norm", None) is not None else None
    eps = own.q_norm.variance_epsilon if norms else 0.0
    of_all = config.sliding_window if config.model_type in ("mistral", "mixtral") else None
    window = getattr(own, "sliding_window", of_all)
    return _Layer(
        layer.input_layernorm, own, layer.post_attention_layernorm, mlp, projections, gates, router, norms, eps, window
    )
