"""A decoding step of models made of the usual parts: those are called one after the other, past transformers' forward.

    embedding ─▶ for each layer: norm, attention by our kernels, norm, its MLP or experts ─▶ norm ─▶ logits

What transformers does around its parts (arguments, masks, outputs, a dozen small operations to rotate queries and keys)
takes about as long as the parts when rows are few. Whether a model is made so is seen by its parts and then tried out
by the engine: one that computes anything else goes the usual way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from practicum.rollout.engine.cpu.kernels import Kernels, Projection
from practicum.rollout.engine.kv_cache import Decode, KVCache

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class FusedDecode:
    """A step over a model's own modules: parameters stay where they are; hooks on embedding, MLPs and routers work."""

    def __init__(self, model: Any, kernels: Kernels, cache: KVCache) -> None:
        base = model.base_model
        self._embedding, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, base.norm
        self._head = model.get_output_embeddings()
        self._layers = [_FusedLayer(layer) for layer in base.layers]
        self._kernels = kernels
        self._cache = cache

    @classmethod
    def of(cls, model: Any, kernels: Kernels, cache: KVCache) -> FusedDecode | None:
        """Return None if the model has other parts."""
        base = model.base_model
        if not all(hasattr(base, name) for name in ("embed_tokens", "rotary_emb", "norm", "layers")):
            return None
        return cls(model, kernels, cache) if all(map(_is_usual, base.layers)) else None

    def __call__(self, tokens: Tensor, step: Decode) -> Tensor:
        """Return the logits [rows, 1, vocabulary] of tokens [rows, 1]."""
        hidden = self._embedding(tokens).transpose(0, 1)  # all rows as if they were one sequence
        angles = self._rotary(hidden, step.positions[None])
        for layer in self._layers:
            hidden = hidden + self._attended(layer, layer.before_attention.forward(hidden), angles, step)
            hidden = hidden + layer.mlp(layer.before_mlp.forward(hidden))
        logits: Tensor = self._head(self._norm(hidden))
        return logits.transpose(0, 1)

    def _attended(self, layer: _FusedLayer, x: Tensor, angles: tuple[Tensor, Tensor], step: Decode) -> Tensor:
        number = layer.attention.layer_idx
        keys, values = self._cache.kept(number)
        window, scaling = self._cache.asked[number]
        query = self._kernels.project(x[0], layer.projections(), layer.eps, angles, step.places, keys, values)
        attended = self._kernels.attend(query, keys, values, step.tables, step.positions, window, scaling)
        out: Tensor = layer.attention.o_proj.forward(attended.view(1, len(attended), -1))
        return out


@dataclass(slots=True)
class _FusedLayer:
    before_attention: Any
    attention: Any
    before_mlp: Any
    mlp: Any
    eps: float

    def __init__(self, layer: Any) -> None:
        self.before_attention, self.attention, self.before_mlp, self.mlp = (getattr(layer, name) for name in _PARTS)
        self.eps = getattr(getattr(self.attention, "q_norm", None), "variance_epsilon", 0.0)

    def projections(self) -> list[Projection]:
        """Return those of queries, keys and values, made anew each time: parameters may have moved."""
        own, width = self.attention, self.attention.head_dim
        norms = (getattr(own, "q_norm", None), getattr(own, "k_norm", None), None)
        return [
            Projection.of(linear.weight, linear.bias, None if norm is None else norm.weight, width)
            for linear, norm in zip((own.q_proj, own.k_proj, own.v_proj), norms, strict=True)
        ]


def _is_usual(layer: Any) -> bool:
    if not all(hasattr(layer, name) for name in _PARTS):
        return False
    own = layer.self_attn
    if not all(isinstance(getattr(own, name, None), nn.Linear) for name in _PROJECTIONS):
        return False
    norms = [getattr(own, name) for name in ("q_norm", "k_norm") if getattr(own, name, None) is not None]
    width = getattr(own, "head_dim", None)
    return len(norms) in (0, 2) and all(
        hasattr(norm, "variance_epsilon") and norm.weight.shape == (width,) for norm in norms
    )
