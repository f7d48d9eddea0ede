"""Faster layers of a transformers model, with gradients: norms, rotations, activations and attention in few passes.

Parameters, names and hooks stay. Attention is flash attention over all sequences of a micro-batch end to end, each by
itself, so no mask is built.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from practicum.train.cuda.kernels import rotate, silu_mul

_GATED = ("gate_proj", "up_proj", "down_proj")
_NAME = "practicum-packed"


def use_fast_layers(model: Any) -> None:
    """Make the model compute with fast layers. Its passes must then be given `ends` and `longest` of the sequences."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _never_called)
    AttentionMaskInterface.register(_NAME, _no_mask)
    model.set_attn_implementation(_NAME)
    config = model.config.get_text_config()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            _replace(module, partial(_normed, module))
        elif hasattr(module, "q_proj") and hasattr(module, "o_proj"):
            module.forward = partial(_attended, module, _window(module, config))
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in _GATED):
            module.forward = partial(_mlp, module)


def _replace(norm: Any, kernel: Any) -> None:
    """Replace the forward of a norm by the kernel, if both give the same."""
    usual = norm.forward
    trial = torch.randn(3, norm.weight.shape[0], generator=torch.Generator().manual_seed(0))
    if len(signature(usual).parameters) == 1 and torch.allclose(kernel(trial), usual(trial), rtol=1e-4, atol=1e-4):
        norm.forward = kernel


def _normed(module: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    down: Tensor = module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))
    return down


def _attended(
    module: Any,
    window: int | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    ends: Tensor,
    longest: int,
    **__: Any,
) -> tuple[Tensor, None]:
    x = hidden_states.flatten(0, 1)  # rows are parts of one
    query, key, value = (
        project(x).unflatten(1, (-1, module.head_dim)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if getattr(module, "q_norm", None) is not None:
        query, key = module.q_norm(query), module.k_norm(key)
    cosines, sines = (part.flatten(0, 1).contiguous() for part in position_embeddings)
    query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, True, False,
        scale=module.scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return module.o_proj(out.flatten(1)).view(hidden_states.shape), None


def _window(module: Any, config: Any) -> int | None:
    of_all = config.sliding_window if config.model_type in ("mistral", "mixtral") else None
    window: int | None = getattr(module, "sliding_window", of_all)
    return window


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: attention knows what a token may see."""


def _never_called(*_: Any, **__: Any) -> None:
    raise AssertionError("attention of a layer that was not taken over")
