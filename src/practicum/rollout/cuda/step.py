"""Passes of models made of the usual parts on a CUDA device: part by part, past transformers' forward.

    embedding ─▶ for each layer: norm, projections, place, attention, product, norm, MLP or experts ─▶ norm ─▶ logits
                                                      │
                      Prompts: over the new tokens themselves, sequences end to end; over pages too where one goes on
                      Rows:    one token each, over the pages of its row

Weights stay where they are; products of one input are one where their weights lie side by side. Modules are asked for
their weights alone: hooks on them hear nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from practicum.rollout.cuda.attention import WIDTHS, attend, place
from practicum.rollout.cuda.experts import Router, experts, shared_expert
from practicum.rollout.cuda.pages import PAGE
from practicum.rollout.cuda.parts import LARGEST_WIDTH, gated, normed, product

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
"""Whose layers are made of the parts below and compute nothing else: each is tested."""
_FLASH_TYPES = (torch.bfloat16, torch.float16)
_STILL_ROTATIONS = ("default", "linear", "llama3", "yarn")  # that depend on nothing but the position


def unusual(config: Any) -> str:
    """Why a model with this config cannot be computed here; empty if it can."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"the family {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width not in WIDTHS:
        return f"its heads have {width} numbers, not {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _STILL_ROTATIONS:
        return f"its positions are rotated in the way {kind!r}"
    if getattr(config, "mlp_bias", False):
        return "its MLPs have biases"
    if config.hidden_act != "silu":
        return f"its MLPs use {config.hidden_act!r}"
    return ""


@dataclass(slots=True)
class Prompts:
    """New tokens of sequences, end to end. Those that go on have tokens in pages already."""

    lengths: Sequence[int]  # of the new ones
    starts: Sequence[int]  # how many each has already
    ends: Tensor  # [sequences + 1], among the new tokens
    ends_of_all: Tensor  # [sequences + 1], among all
    slots: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    tables: Tensor | None  # by slot; None: nothing is kept
    routes: Tensor | None = None  # [tokens, layers that route, k], to be written


@dataclass(slots=True)
class Rows:
    """One new token for the row in each slot."""

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
    projections: list[tuple[Tensor, Tensor | None]]  # one after the other, or all as one
    gates: list[Tensor]  # likewise; none where there are experts
    router: Router | None
    norms: tuple[Tensor, Tensor] | None
    eps: float
    window: int | None


class LeanModel:
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
        """To where the weights are now: before the first pass, and whenever they have moved."""
        config = self._model.config.get_text_config()
        self._layers = [_bound(layer, config) for layer in self._model.base_model.layers]
        self._is_narrow = max(config.hidden_size, config.intermediate_size, self.heads * self.width) <= LARGEST_WIDTH

    @torch.inference_mode()
    def turn(self, num_positions: int) -> None:
        """Make ready for so many positions."""
        positions = torch.arange(num_positions, device=self._head.weight.device)[None]
        parts = self._rotary(self._head.weight[:1, None], positions)
        assert parts[0].shape[-1] == self.width, "parts of a head are not turned"
        cosines, sines = (part[0, :, : self.width // 2].contiguous() for part in parts)
        self._angles = cosines, sines

    @property
    def numbers_per_token(self) -> int:
        """Of keys and values."""
        return int(2 * self.num_layers * self.kv_heads * self.width)

    def logits_of_prompts(self, tokens: Tensor, prompts: Prompts, pages: Tensor | None, keep: Tensor | None) -> Tensor:
        """[kept, vocabulary] of tokens [tokens]; of all of them if none are named."""
        attention = _Reading(prompts)
        hidden = self._body(
            tokens, prompts.positions, prompts.slots, prompts.tables, pages, attention, prompts.routes
        )  # fmt: skip
        return self._logits(hidden if keep is None else hidden[keep])

    def logits_of_rows(self, tokens: Tensor, rows: Rows, pages: Tensor) -> Tensor:
        """[rows, vocabulary] of the next token of each, of tokens by slot."""
        slots = rows.slots.long()
        now = rows.positions[slots]
        if len(slots) == 1 and self._is_narrow:
            return self._logits_of_one(tokens[slots], now, rows, pages)
        return self._logits(self._body(tokens[slots], now, rows.slots, rows.tables, pages, rows, rows.routes))

    def _body(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor | None, pages: Tensor | None,
        attention: _Reading | Rows, routes: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[tokens, hidden], normed for the head."""
        assert self._angles is not None, "a pass before `turn`"
        hidden = self._embedding(tokens)
        more: Tensor | None = None
        gives_keys = isinstance(attention, _Reading)
        routing = _Routing(self._layers, hidden, routes)
        for number, layer in enumerate(self._layers):
            x = normed(hidden, more, layer.before_attention.weight, layer.before_attention.variance_epsilon)
            query, key, value = self._projected(layer, x)
            own = None if pages is None else pages[:, number]
            query, key = place(
                query, key, value, layer.norms, layer.eps, self._angles, slots, positions, tables, own, gives_keys
            )
            if isinstance(attention, _Reading):
                attended = attention(query, key, value, own, layer)
            else:
                assert own is not None
                attended = _decoded(query, own, attention, layer)
            more = linear(attended.flatten(1), layer.attention.o_proj.weight, layer.attention.o_proj.bias)
            x = normed(hidden, more, layer.before_mlp.weight, layer.before_mlp.variance_epsilon)
            more = routing(layer, x) if layer.router is not None else _mlp(layer, x)
        return normed(hidden, more, self._norm.weight, self._norm.variance_epsilon)

    def _logits_of_one(self, tokens: Tensor, positions: Tensor, rows: Rows, pages: Tensor) -> Tensor:
        """Of a single row: there all that counts is how fast weights are read, and how few kernels there are."""
        assert self._angles is not None, "a pass before `turn`"
        hidden = self._embedding(tokens)
        routing = _Routing(self._layers, hidden, rows.routes)
        more: Tensor | None = None  # what experts add, which is not in `hidden` yet
        for number, layer in enumerate(self._layers):
            x, norm = _to_norm(hidden, more, layer.before_attention)
            parts = [product(x, weight, bias=bias, norm=norm) for weight, bias in layer.projections]
            query, key, value = self._split(parts)
            query, _ = place(
                query, key, value, layer.norms, layer.eps, self._angles, rows.slots, positions, rows.tables,
                pages[:, number], False,
            )  # fmt: skip
            attended = _decoded(query, pages[:, number], rows, layer).flatten(1)
            product(attended, layer.attention.o_proj.weight, bias=layer.attention.o_proj.bias, added_to=hidden)
            own = layer.before_mlp
            if layer.router is not None:
                more = routing(layer, normed(hidden, None, own.weight, own.variance_epsilon))
                continue
            more = None
            gate, up = layer.gates if len(layer.gates) == 2 else layer.gates[0].chunk(2)
            inner = product(hidden, gate, up=up, norm=(own.weight, own.variance_epsilon))
            product(inner, layer.mlp.down_proj.weight, added_to=hidden)
        x, norm = _to_norm(hidden, more, self._norm)
        return product(x, self._head.weight, bias=self._head.bias, norm=norm)

    def _projected(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split([linear(x, weight, bias) for weight, bias in layer.projections])

    def _split(self, parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if len(parts) == 1:
            sizes = [heads * self.width for heads in (self.heads, self.kv_heads, self.kv_heads)]
            parts = list(parts[0].split(sizes, dim=1))
        query, key, value = (part.unflatten(1, (-1, self.width)) for part in parts)
        return query, key, value

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = linear(hidden, self._head.weight, self._head.bias)
        return logits


def _to_norm(hidden: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, tuple[Tensor, float] | None]:
    """What a product is of, and what it norms that by; normed already where something had to be added first."""
    if more is None:
        return hidden, (norm.weight, norm.variance_epsilon)
    return normed(hidden, more, norm.weight, norm.variance_epsilon), None


class _Reading:
    """Attention of new sequences, laid end to end."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._longest_new = max(prompts.lengths)
        self._longest = max(a + b for a, b in zip(prompts.lengths, prompts.starts, strict=True))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, pages: Tensor | None, layer: _Layer) -> Tensor:
        """[tokens, heads, width] of as much, and keys and values [tokens, kv heads, width]."""
        if any(self._prompts.starts):
            assert pages is not None
            key, value = self._with_earlier(key, value, pages)
        scaling, window = layer.attention.scaling, layer.window
        if query.dtype not in _FLASH_TYPES:
            spans = list(zip(self._prompts.lengths, self._prompts.starts, strict=True))
            return _plain(query, key, value, spans, window, scaling)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, self._prompts.ends, self._prompts.ends_of_all, self._longest_new, self._longest,
            0.0, True, False,
            scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
        return out

    def _with_earlier(self, key: Tensor, value: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """With what the pages hold of each sequence in front of its new tokens."""
        prompts, kept = self._prompts, []
        assert prompts.tables is not None
        begin = 0
        for length, start in zip(prompts.lengths, prompts.starts, strict=True):
            table = prompts.tables[prompts.slots[begin].long(), : -(-start // PAGE)].long()
            earlier = pages[table].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :start]  # [2, tokens, heads, width]
            new = torch.stack([key[begin : begin + length], value[begin : begin + length]])
            kept.append(torch.cat([earlier, new], 1))
            begin += length
        both = torch.cat(kept, 1)
        return both[0], both[1]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, spans: list[tuple[int, int]], window: int | None, scaling: float
) -> Tensor:
    """For numbers that flash attention does not take."""
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


def _decoded(query: Tensor, pages: Tensor, rows: Rows, layer: _Layer) -> Tensor:
    return attend(
        query, pages, rows.slots, rows.positions, rows.tables, layer.attention.scaling, layer.window, rows.num_splits
    )


class _Routing:
    """Of one pass: where it counts and records, layer after layer."""

    def __init__(self, layers: list[_Layer], hidden: Tensor, routes: Tensor | None) -> None:
        self._number = 0
        self._routes = routes
        routers = [layer for layer in layers if layer.router is not None]
        if routers:
            num = routers[0].mlp.experts.down_proj.shape[0]
            self._counts = torch.zeros((len(routers), num), dtype=torch.int32, device=hidden.device)

    def __call__(self, layer: _Layer, x: Tensor) -> Tensor:
        """[tokens, k, width], or [tokens, width]."""
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
    return linear(gated(gate, up), layer.mlp.down_proj.weight)


def _bound(layer: Any, config: Any) -> _Layer:
    own, mlp = layer.self_attn, layer.mlp
    linears = own.q_proj, own.k_proj, own.v_proj
    weight = side_by_side([one.weight for one in linears])
    has_bias = own.q_proj.bias is not None
    bias = side_by_side([one.bias for one in linears]) if has_bias else None
    projections = [(one.weight, one.bias) for one in linears]
    if weight is not None and (bias is not None or not has_bias):
        projections = [(weight, bias)]
    gates: list[Tensor] = []
    router = Router.of(mlp.gate, config.model_type) if hasattr(mlp, "experts") else None
    if isinstance(getattr(mlp, "gate_proj", None), nn.Linear):
        pair = [mlp.gate_proj.weight, mlp.up_proj.weight]
        joined = side_by_side(pair)
        gates = pair if joined is None else [joined]
    norms = (own.q_norm.weight, own.k_norm.weight) if getattr(own, "q_norm", None) is not None else None
    eps = own.q_norm.variance_epsilon if norms else 0.0
    of_all = config.sliding_window if config.model_type in ("mistral", "mixtral") else None
    window = getattr(own, "sliding_window", of_all)
    return _Layer(
        layer.input_layernorm, own, layer.post_attention_layernorm, mlp, projections, gates, router, norms, eps, window
    )


def side_by_side(tensors: list[Tensor]) -> Tensor | None:
    """Weights [num, ...] that lie one behind the other in memory, as one; None if they do not."""
    at = tensors[0].data_ptr()
    for one in tensors:
        if one.data_ptr() != at or not one.is_contiguous():
            return None
        at += one.nbytes
    first = tensors[0].detach()
    whole = first.as_strided((sum(len(one) for one in tensors), *first.shape[1:]), first.stride())
    return whole
