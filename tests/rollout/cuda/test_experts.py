"""Routing and experts against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from tests.rollout.cuda.kernels import DEVICE, random

from practicum.rollout.cuda.experts import Router, experts  # isort: skip


@pytest.mark.parametrize(
    ("tokens", "num", "inner", "k"), [(1, 8, 32, 2), (1, 6, 40, 3), (20, 8, 48, 3), (90, 6, 32, 2)]
)
@pytest.mark.parametrize("norms", [False, True])
def test_tokens_go_to_their_experts(tokens: int, num: int, inner: int, k: int, norms: bool) -> None:
    x, router, gate_up, down = random(tokens, 48), random(num, 48), random(num, 2 * inner, 48), random(num, 48, inner)
    routes = torch.zeros(tokens, 3, k, dtype=torch.uint8, device=DEVICE)
    counts = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    out = experts(x, Router(router, k, norms, True), gate_up, down, counts, routes[:, 1])
    shares, chosen = (x @ router.T).softmax(-1).topk(k)
    shares = shares / shares.sum(-1, keepdim=True) if norms else shares
    assert torch.equal(routes[:, 1].long(), chosen)
    assert counts.sum() == tokens * k
    for token in range(0, tokens, 7):
        for number in range(k):
            gate, up = (gate_up[chosen[token, number]] @ x[token]).chunk(2)
            expected = down[chosen[token, number]] @ (silu(gate) * up) * shares[token, number]
            assert torch.allclose(out[token, number], expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("num", [6, 8])
def test_logits_that_are_no_numbers_send_a_token_to_as_many_experts_as_ever(num: int) -> None:
    x, router, gate_up, down = random(3, 48), random(num, 48), random(num, 64, 48), random(num, 48, 32)
    x[1] = float("nan")
    routes = torch.zeros(3, 1, 2, dtype=torch.uint8, device=DEVICE)
    counts = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    out = experts(x, Router(router, 2, True, True), gate_up, down, counts, routes[:, 0])
    assert all(len(set(own)) == 2 and max(own) < num for own in routes[:, 0].tolist())
    assert counts.sum() == 6
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
