"""Which models the runner computes, and how it finds their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from practicum.rollout.engine.cuda import unsupported_reason
from practicum.rollout.engine.cuda.weights import as_one


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {"head_dim": 128}, ""),
        ("deepseek_v3", {}, "the family 'deepseek_v3' is not one of llama, "),
        ("qwen3", {"head_dim": 80}, "its heads have 80 numbers, not 16, 32, 64, 128 or 256"),
        ("llama", {"hidden_size": 256, "num_attention_heads": 4, "mlp_bias": True}, "its MLPs have biases"),
        ("llama", {"hidden_size": 256, "num_attention_heads": 4, "hidden_act": "gelu"}, "its MLPs use 'gelu'"),
    ],
)
def test_the_reason_why_a_model_is_not_supported(family: str, changes: dict[str, Any], reason: str) -> None:
    found = unsupported_reason(AutoConfig.for_model(family, **changes))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_adjacent_weights_are_one() -> None:
    block = torch.arange(24.0)
    parts = [block[:8].view(2, 4), block[8:12].view(1, 4), block[12:].view(3, 4)]
    whole = as_one(parts)
    assert whole is not None and torch.equal(whole, block.view(6, 4))
    assert as_one([parts[0], parts[2]]) is None
