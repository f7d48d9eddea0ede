"""Log-probs in parts against all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from practicum.train import head as module
from practicum.train.head import log_probs_of
from practicum.train.model import LogProbModel
from tests.train.test_model import tiny


def plain(hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, temperature: float) -> Any:
    log_probs = (head(hidden) / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("most", [1, 60, 1 << 20])
def test_parts_give_what_the_whole_gives(bias: bool, learns: bool, most: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_LOGITS", most)
    torch.manual_seed(0)
    head = nn.Linear(8, 17, bias=bias).double()
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 17, (11,))
    weights = torch.randn(2, 11)
    found: list[list[torch.Tensor]] = []
    for way in (
        lambda: log_probs_of(hidden, head, targets, 0.7, learns),
        lambda: plain(hidden, head, targets, 0.7),
    ):
        log_probs, entropies = way()
        loss = (log_probs * weights[0]).sum() + ((entropies * weights[1]).sum() if learns else 0)
        grads = torch.autograd.grad(loss, [hidden, *head.parameters()])
        found.append([log_probs, entropies, *grads])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_entropies_that_are_not_learnt_have_no_gradient() -> None:
    head, hidden = nn.Linear(4, 9), torch.randn(3, 4, requires_grad=True)
    log_probs, entropies = log_probs_of(hidden, head, torch.tensor([0, 1, 8]), 1.0, False)
    assert log_probs.requires_grad and not entropies.requires_grad


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_answers_the_same_in_parts(family: str, monkeypatch: Any) -> None:
    model = LogProbModel(tiny(family), learns_entropy=True)
    ids = torch.randint(4, 12, (2, 9))
    at = torch.tensor([0, 3, 9, 15])
    asked = (ids, torch.arange(9).expand(2, 9), at, torch.tensor([4, 5, 6, 7]), 0.9)
    found = []
    for most in (1 << 28, 5):
        monkeypatch.setattr("practicum.train.model.MAX_LOGITS", most)
        monkeypatch.setattr(module, "MAX_LOGITS", most)
        model.zero_grad()
        log_probs, entropies = model(*asked)
        (log_probs.sum() + entropies.sum()).backward()
        found.append((log_probs, entropies, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for ours, theirs in zip(found[0][2], found[1][2], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)
