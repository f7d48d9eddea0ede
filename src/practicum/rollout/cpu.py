"""Matrix products of the native engine on a CPU.

PyTorch gives those of float32 to MKL, which on many machines shares few rows badly among cores: 64 rows by 256 x 1024
on two cores of an EPYC run at 83 to 122 GFLOP/s there and at 149 in oneDNN, by 1024 x 4096 at 103 and 177. oneDNN reads
the very same weights, so nothing is copied. It prepares itself for every new number of rows, which takes some 0.4 ms
once, and each call costs 10 us more: small matrices stay where they are, and so do experts with many rows, of which no
two calls have the same number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

EXPERTS = "practicum-cpu"
_LEAST_WEIGHTS = 1 << 17
_MOST_ROWS_OF_EXPERT = 256


class OneDnnLinear(nn.Linear):
    """What modules become: they keep their parameters. For float32, and not for training."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float32 or input.device.type != "cpu":
            return super().forward(input)
        return _product(input, self.weight, self.bias)


def use_onednn(model: Any) -> None:
    """For all linear layers and experts that are large enough. Does nothing where this build of PyTorch has none."""
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
    """[tokens, width] from as much, by the experts [tokens, k] that were chosen and their shares: one after the other,
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


def _are_plain_experts(module: Any) -> bool:
    marks = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in marks.items()):
        return False
    weights = module.gate_up_proj
    return bool(weights.dtype == torch.float32 and weights[0].numel() >= _LEAST_WEIGHTS)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product
