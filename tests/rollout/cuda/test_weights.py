"""Weights at addresses that stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.models import load_model
from practicum.rollout.cuda.weights import ArenaWeights, copy_weights
from practicum.weights import WeightUpdate
from tests.rollout.families import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_weights_are_the_same_after_sleep_and_lie_side_by_side(family: str, tmp_path: Path) -> None:
    folder = str(save_family(family, tmp_path))
    model, expected = load_model(folder), dict(load_model(folder).named_parameters())
    weights = ArenaWeights(model, torch.device("cuda"))
    weights.map()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    own = model.base_model.layers[0].self_attn
    assert own.q_proj.weight.data_ptr() + own.q_proj.weight.nbytes == own.k_proj.weight.data_ptr()
    for _ in range(2):
        weights.sleep()
        weights.map()
        weights.fill()
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == addresses[name]
            assert torch.equal(parameter.cpu(), expected[name])
    weights.sleep()
    weights.map()
    tensors = [(name, parameter * 2) for name, parameter in expected.items()]
    copy_weights(model, WeightUpdate(1, tensors, shared=False))
    weights.changed()
    weights.sleep()
    weights.map()
    weights.fill()
    assert all(torch.equal(p.cpu(), expected[name] * 2) for name, p in model.named_parameters())
    weights.close()
