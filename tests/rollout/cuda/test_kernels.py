"""The kernels against plain PyTorch: on a CUDA device; with TRITON_INTERPRET=1 on a CPU, where Triton is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

if find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("no CUDA device, or no Triton", allow_module_level=True)

from practicum.rollout.cuda.attention import attend, place
from practicum.rollout.cuda.drawing import draw
from practicum.rollout.cuda.experts import Router, experts
from practicum.rollout.cuda.pages import PAGE, num_pages
from practicum.rollout.cuda.parts import gated, normed, product
from practicum.rollout.sampling import draw as slow_draw
from practicum.rollout.sampling import uniforms
from practicum.types import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_rows_attend_to_all_that_their_pages_hold(window: int | None, splits: int) -> None:
    heads, kv_heads, width, lengths, slots = 4, 2, 32, [1, 64, 65, 130, 200], [3, 0, 7, 2, 5]
    pages = torch.full((20, 2, kv_heads, PAGE, width), float("nan"), device=DEVICE)  # what nobody wrote is no number
    tables, positions = torch.zeros(8, 6, dtype=torch.int32, device=DEVICE), ints([0] * 8)
    query, kept, free = random(5, heads, width), [], iter(range(1, 20))
    for slot, length in zip(slots, lengths, strict=True):
        own = random(2, length, kv_heads, width)
        kept.append(own)
        positions[slot] = length - 1
        for number in range(num_pages(length)):
            page, part = next(free), own[:, number * PAGE : (number + 1) * PAGE]
            tables[slot, number] = page
            pages[page, :, :, : part.shape[1]] = part.transpose(1, 2)
    out = attend(query, pages, ints(slots), positions, tables, 0.2, window, splits)
    for row, (keys, values) in enumerate(kept):
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query[row], keys) * 0.2
        if window is not None:
            scores[:, : max(0, len(keys) - window)] = float("-inf")
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        assert torch.allclose(out[row], expected, atol=1e-5)


@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_normed_rotated_and_kept(has_norm: bool) -> None:
    heads, kv_heads, width = 4, 2, 32
    whole = random(6, (heads + 2 * kv_heads) * width)
    query, key, value = (
        part.unflatten(1, (-1, width))
        for part in whole.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    )
    angles = random(200, width // 2) * 3
    positions, slots = ints([0, 3, 64, 65, 100, 10]), ints([3, 3, 2, 2, 5, 7])
    tables = torch.arange(1, 49, dtype=torch.int32, device=DEVICE).view(8, 6)
    pages = torch.zeros(49, 2, kv_heads, PAGE, width, device=DEVICE)
    norms = (random(width), random(width)) if has_norm else None
    found = place(query, key, value, norms, EPS, (angles.cos(), angles.sin()), slots, positions, tables, pages, True)
    own = torch.cat([angles, angles], 1)[positions.long()][:, None]
    for number, (ours, x) in enumerate(zip(found, (query, key), strict=True)):
        x = rms(x, norms[number]) if norms else x
        first, second = x.chunk(2, -1)
        assert torch.allclose(ours, x * own.cos() + torch.cat([-second, first], -1) * own.sin(), atol=1e-5)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        page = pages[tables[slot, position // PAGE], :, :, position % PAGE]
        assert torch.equal(page[0], found[1][token])
        assert torch.equal(page[1], value[token])


def test_norms_add_what_comes_first() -> None:
    weight = random(48)
    for more in (None, random(7, 48), random(7, 4, 48)):
        hidden = random(7, 48)
        added = hidden + (0 if more is None else more.view(7, -1, 48).sum(1))
        out = normed(hidden, more, weight, EPS)
        assert torch.allclose(hidden, added, atol=1e-5)
        assert torch.allclose(out, rms(added, weight), atol=1e-5)


def test_gates_open_as_far_as_silu_says() -> None:
    gate, up = random(7, 100).chunk(2, 1)
    assert torch.allclose(gated(gate, up), silu(gate) * up, atol=1e-6)


def test_products_of_one_row() -> None:
    x, weight, up, bias, norm, hidden = (random(*s) for s in [(1, 48), (33, 48), (33, 48), (33,), (48,), (1, 33)])
    assert torch.allclose(product(x, weight, bias=bias), x @ weight.T + bias, atol=1e-4)
    y = rms(x, norm)
    assert torch.allclose(product(x, weight, up=up, norm=(norm, EPS)), silu(y @ weight.T) * (y @ up.T), atol=1e-3)
    before = hidden.clone()
    product(x, weight, added_to=hidden)
    assert torch.allclose(hidden, before + x @ weight.T, atol=1e-4)


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


WAYS = [
    SamplingParams(50, 1.0),
    SamplingParams(50, 0.7),
    SamplingParams(50, 0.0),
    SamplingParams(50, 1.3, top_k=20),
    SamplingParams(50, 0.9, top_p=0.8),
    SamplingParams(50, 1.0, top_k=50, top_p=0.5),
]
SEEDS = [(2**64 - 5, 0), (7, 1), (3, 2), (1 << 40, 3), (11, 2**33), (5, 0)]


@pytest.mark.parametrize("number", [0, 1, 7, 8, 30])
def test_tokens_are_drawn_as_ever(number: int) -> None:
    """With NumPy's own random numbers: the same tokens as one way at a time."""
    logits, slots, noise = random(6, 9000) * 3, [4, 1, 2, 7, 0, 5], uniforms(SEEDS, 50)

    def by_slot(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        own = torch.zeros(9, dtype=dtype, device=DEVICE)
        own[slots] = torch.tensor(values, device=DEVICE).to(dtype)
        return own

    def signed(values: list[int]) -> list[int]:
        return [value - (1 << 64) if value >= 1 << 63 else value for value in values]

    positions, tokens = by_slot([3 + number - 1] * 6, torch.int32), by_slot([0] * 6, torch.int64)
    out_tokens, out_log_probs = ints([0] * 6), random(6)
    draw(
        logits, ints(slots), 8,
        by_slot([way.temperature for way in WAYS], torch.float32), by_slot([way.top_k for way in WAYS], torch.int32),
        by_slot([way.top_p for way in WAYS], torch.float32),
        by_slot(signed([seed for seed, _ in SEEDS]), torch.int64), by_slot([a for _, a in SEEDS], torch.int64),
        by_slot([3] * 6, torch.int32), positions, tokens, out_tokens, out_log_probs, narrows=True,
    )  # fmt: skip
    for row, way in enumerate(WAYS):
        token, log_prob = slow_draw(logits[row : row + 1].cpu(), noise[row : row + 1, number], way)
        assert out_tokens[row] == tokens[slots[row]] == token.item()
        assert abs(out_log_probs[row].item() - log_prob.item()) < 1e-4
        assert positions[slots[row]] == 3 + number


def test_logits_that_are_no_numbers_are_told() -> None:
    logits = random(1, 100)
    logits[0, 7] = float("nan")
    one, zero = torch.ones(2, device=DEVICE), ints([0, 0])
    seeds, out = torch.zeros(2, dtype=torch.int64, device=DEVICE), random(1)
    draw(
        logits, ints([0]), 1, one, zero, one, seeds, seeds, zero, zero.clone(), seeds.clone(), ints([0]), out,
        narrows=False,
    )  # fmt: skip
    assert out.isnan().all()
