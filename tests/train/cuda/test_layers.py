"""Fast layers on a CUDA device: what they compute, and their gradients, against the model as it is in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model
from practicum.train.batch import spans_of
from practicum.train.cuda import speed_up
from practicum.train.model import LogProbModel
from tests.models import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
LENGTHS = [5, 1, 21, 13, 30]


def asked() -> tuple[Any, ...]:
    """Sequences end to end, and for each token but the first of each the one before it."""
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 18, len(positions)))
    at = torch.from_numpy(np.flatnonzero(positions[1:]))
    return ids[None], torch.from_numpy(positions)[None], at, ids[at + 1], 0.9


def passed(model: Any, device: torch.device, dtype: torch.dtype, *, fast: bool) -> tuple[torch.Tensor, ...]:
    own = LogProbModel(model, learns_entropy=True).train()
    inputs = asked()
    is_fast = speed_up(model, device, dtype) if fast else False
    assert is_fast == fast
    own.to(device, dtype)
    spans = spans_of(inputs[1].numpy(), device) if fast else {}
    log_probs, entropies = own(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs), **spans)
    (log_probs.sum() + 0.1 * entropies.sum()).backward()
    grads = torch.cat([p.grad.float().flatten().cpu() for p in own.parameters() if p.grad is not None])
    return log_probs.detach().float().cpu(), entropies.detach().float().cpu(), grads


@pytest.mark.parametrize("most", [1 << 28, 500])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_they_are_no_further_from_float32_than_the_usual_ones(
    family: str, most: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("practicum.train.model.MAX_LOGITS", most)
    monkeypatch.setattr("practicum.train.head.MAX_LOGITS", most)
    folder = str(save_family(family, tmp_path))
    exact = passed(load_model(folder), torch.device("cpu"), torch.float32, fast=False)
    usual = passed(load_model(folder), CUDA, torch.bfloat16, fast=False)
    fast = passed(load_model(folder), CUDA, torch.bfloat16, fast=True)
    for true, theirs, ours in zip(exact, usual, fast, strict=True):
        error, usual_error = (ours - true).norm() / true.norm(), (theirs - true).norm() / true.norm()
        assert error < 1.5 * usual_error + 0.01
