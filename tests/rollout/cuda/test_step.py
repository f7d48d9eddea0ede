"""Which models are computed past transformers' forward."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoConfig

if find_spec("triton") is None:
    pytest.skip("no Triton", allow_module_level=True)

from practicum.rollout.cuda.step import side_by_side, unusual


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
def test_what_cannot_be_computed_is_said(family: str, changes: dict[str, Any], reason: str) -> None:
    found = unusual(AutoConfig.for_model(family, **changes))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_weights_side_by_side_are_one() -> None:
    block = torch.arange(24.0)
    parts = [block[:8].view(2, 4), block[8:12].view(1, 4), block[12:].view(3, 4)]
    whole = side_by_side(parts)
    assert whole is not None and torch.equal(whole, block.view(6, 4))
    assert side_by_side([parts[0], parts[2]]) is None
