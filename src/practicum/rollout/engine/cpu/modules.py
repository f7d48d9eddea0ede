"""Matrix products of the native engine on a CPU.

PyTorch gives those of float32 to MKL, which on many machines shares few rows badly among cores: 64 rows by 256 x 1024
on two cores of an EPYC run at 83 to 122 GFLOP/s there and at 149 in oneDNN, by 1024 x 4096 at 103 and 177. oneDNN reads
the very same weights, so nothing is copied. It prepares itself for every new number of rows, which takes some 0.4 ms
once, and each call costs 10 us more: small matrices stay where they are, and so do experts with many rows, of which no
two calls have the same number.

What a decoding step does with its few rows goes through kernels of our own where they could be built: see kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from practicum.rollout.engine.cpu.kernels import Kernels

EXPERTS, KERNEL_EXPERTS = "practicum-cpu", "practicum-kernels"
_LEAST_WEIGHTS = 1 << 17
_MOST_ROWS_OF_EXPERT = 256
_MOST_NUMBERS = 1 << 18  # of a kernel's input; with more of them it is worth rearranging the weights


class OneDnnLinear(nn.Linear):
    """The class that linear layers get; they keep their parameters. It is for float32, not for training."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float32 or input.device.type != "cpu":
            return super().forward(input)
        return _product(input, self.weight, self.bias)


def speed_up(model: Any, kernels: Kernels | None) -> None:
    """Replace what is slow in a model that stays on a CPU."""
    use_onednn(model)
    if kernels is not None:
        use_kernels(model, kernels)


def use_onednn(model: Any) -> None:
    """Use oneDNN for large linear layers and experts. Does nothing where this build of PyTorch has none."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _LEAST_WEIGHTS:
            module.__class__ = OneDnnLinear
    experts = [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]
    if experts and all(map(_are_plain_experts, experts)):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, each_expert)
        model.set_experts_implementation(EXPERTS)


def each_expert(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return [tokens, width] from as much, by the chosen experts and their shares [tokens, k]: one after the other,
    each for all tokens that are sent to it. Registered with transformers' experts interface."""
    num_tokens, k = chosen.shape
    experts = chosen.flatten()
    order = experts.argsort()
    sent = hidden[order // k]
    out = torch.empty_like(sent)
    start = 0
    for expert, num in enumerate(torch.bincount(experts, minlength=module.num_experts).tolist()):
        if num:
            own = slice(start, start + num)
            product = linear if num > _MOST_ROWS_OF_EXPERT else _product
            inner = module._apply_gate(product(sent[own], module.gate_up_proj[expert]))
            out[own] = product(inner, module.down_proj[expert])
            start += num
    out *= shares.flatten()[order, None]
    return torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, k, -1).sum(1)


# With kernels of our own


def use_kernels(model: Any, kernels: Kernels) -> None:
    """Use kernels for all parts of a float32 model that compute the same, which is tried out with each.

    Parameters stay where they are, and so do hooks on the parts.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _take_over(module, partial(_linear, kernels, module), module.in_features, _MOST_NUMBERS)
        elif hasattr(module, "variance_epsilon"):
            _take_over(module, partial(_norm, kernels, module), module.weight.shape[0])
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
            _take_over(module, partial(_mlp, kernels, module), module.gate_proj.in_features, _MOST_NUMBERS)
    experts = [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]
    if experts and all(_are_plain_experts(module, least_weights=0) and _are_silu_gated(module) for module in experts):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(KERNEL_EXPERTS, partial(_experts, kernels))
        model.set_experts_implementation(KERNEL_EXPERTS)


def _take_over(module: Any, kernel: Callable[[Tensor], Tensor], width: int, most_numbers: int | None = None) -> None:
    """Send inputs of up to so many numbers through the kernel, if it gives what the module gives."""
    usual = module.forward
    if len(signature(usual).parameters) != 1:
        return
    trial = torch.randn(3, width)
    if not torch.allclose(kernel(trial), usual(trial), rtol=1e-4, atol=1e-4):
        return
    if most_numbers is None:
        module.forward = kernel
    else:
        module.forward = lambda x: kernel(x) if x.numel() <= most_numbers else usual(x)


def _linear(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.linear(x, module.weight, module.bias)


def _norm(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.rms_norm(x, module.weight, module.variance_epsilon)


def _mlp(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.linear(kernels.gated(x, module.gate_proj.weight, module.up_proj.weight), module.down_proj.weight)


def _experts(kernels: Kernels, module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Registered with transformers' experts interface."""
    if hidden.numel() * chosen.shape[-1] > _MOST_NUMBERS * module.num_experts:
        return each_expert(module, hidden, chosen, shares)
    return kernels.experts(hidden, chosen, shares, module.gate_up_proj, module.down_proj)


def _are_silu_gated(module: Any) -> bool:
    gate, up = both = torch.randn(2, 8)
    return torch.allclose(module._apply_gate(both.view(1, 16))[0], silu(gate) * up, atol=1e-6)


def _are_plain_experts(module: Any, least_weights: int | None = None) -> bool:
    marks = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in marks.items()):
        return False
    weights = module.gate_up_proj
    least = _LEAST_WEIGHTS if least_weights is None else least_weights
    return bool(weights.dtype == torch.float32 and weights[0].numel() >= least)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product
