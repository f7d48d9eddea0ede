from __future__ import annotations

import pytest
import torch
from torch import nn

from practicum.rollout.engine.cpu import modules


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_layer_gives_the_same_product_and_keeps_its_parameters(bias: bool) -> None:
    layer = nn.Linear(256, 512, bias=bias).requires_grad_(False)
    model = nn.Sequential(layer, nn.Linear(512, 8).requires_grad_(False))
    given = torch.randn(3, 2, 256)
    expected, weight = layer(given), layer.weight
    modules.use_onednn(model)
    assert type(layer) is modules.OneDnnLinear and type(model[1]) is nn.Linear and layer.weight is weight
    assert torch.allclose(layer(given), expected, atol=1e-5)
    layer.weight.data = layer.weight.data * 2  # others may have given it new weights
    assert torch.allclose(layer(given), nn.functional.linear(given, layer.weight, layer.bias), atol=1e-5)
    assert layer.to(torch.bfloat16)(given.bfloat16()).dtype == torch.bfloat16


class Experts(nn.Module):
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 5), requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(4, 5, 6), requires_grad=False)

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


@pytest.mark.parametrize("num_tokens", [1, 10, 1000])  # few and many go different ways
def test_experts_give_each_token_what_its_own_would_one_by_one(num_tokens: int) -> None:
    module, hidden = Experts(), torch.randn(num_tokens, 5)
    shares, chosen = torch.rand(num_tokens, 3).topk(2)  # the last expert gets nothing
    expected = [
        sum(
            share * module.down_proj[expert] @ module._apply_gate(module.gate_up_proj[expert] @ token)
            for expert, share in zip(experts, own, strict=True)
        )
        for token, experts, own in zip(hidden, chosen.tolist(), shares, strict=True)
    ]
    assert torch.allclose(modules.each_expert(module, hidden, chosen, shares), torch.stack(expected), atol=1e-4)
