"""The engine's kernels against plain PyTorch: on a CUDA device, or with TRITON_INTERPRET=1 on a CPU where Triton is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from practicum.rollout.engine.sampling import draw as draw_on_cpu
from practicum.rollout.engine.sequence import uniforms
from practicum.types import SamplingParams
from tests.rollout.engine.cuda.device import DEVICE, EPS, HAS_KERNELS, ints, random, rms

if not HAS_KERNELS:
    pytest.skip("no CUDA device, or no Triton", allow_module_level=True)

from practicum.rollout.engine.cuda.attention import BLOCK_SIZE, attend, rotate_and_store
from practicum.rollout.engine.cuda.elementwise import matvec, rms_norm, silu_mul
from practicum.rollout.engine.cuda.experts import Router, experts
from practicum.rollout.engine.cuda.sampling import sample

# Attention


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_sequences_attend_to_all_that_their_blocks_hold(window: int | None, splits: int) -> None:
    heads, kv_heads, width, lengths, slots = 4, 2, 32, [1, 64, 65, 130, 200], [3, 0, 7, 2, 5]
    blocks = torch.full(
        (20, 2, kv_heads, BLOCK_SIZE, width), float("nan"), device=DEVICE
    )  # what nobody wrote is no number
    tables, positions = torch.zeros(8, 6, dtype=torch.int32, device=DEVICE), ints([0] * 8)
    query, kept, free = random(5, heads, width), [], iter(range(1, 20))
    for slot, length in zip(slots, lengths, strict=True):
        own = random(2, length, kv_heads, width)
        kept.append(own)
        positions[slot] = length - 1
        for number in range(-(-length // BLOCK_SIZE)):
            block, part = next(free), own[:, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            tables[slot, number] = block
            blocks[block, :, :, : part.shape[1]] = part.transpose(1, 2)
    out = attend(query, blocks, ints(slots), positions, tables, 0.2, window, splits)
    for row, (keys, values) in enumerate(kept):
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query[row], keys) * 0.2
        if window is not None:
            scores[:, : max(0, len(keys) - window)] = float("-inf")
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        assert torch.allclose(out[row], expected, atol=1e-5)


@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_normed_rotated_and_stored(has_norm: bool) -> None:
    heads, kv_heads, width = 4, 2, 32
    whole = random(6, (heads + 2 * kv_heads) * width)
    query, key, value = (
        part.unflatten(1, (-1, width))
        for part in whole.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    )
    angles = random(200, width // 2) * 3
    positions, slots = ints([0, 3, 64, 65, 100, 10]), ints([3, 3, 2, 2, 5, 7])
    tables = torch.arange(1, 49, dtype=torch.int32, device=DEVICE).view(8, 6)
    blocks = torch.zeros(49, 2, kv_heads, BLOCK_SIZE, width, device=DEVICE)
    norms = (random(width), random(width)) if has_norm else None
    found = rotate_and_store(
        query, key, value, norms, EPS, (angles.cos(), angles.sin()), slots, positions, tables, blocks, True
    )
    own = torch.cat([angles, angles], 1)[positions.long()][:, None]
    for number, (ours, x) in enumerate(zip(found, (query, key), strict=True)):
        x = rms(x, norms[number]) if norms else x
        first, second = x.chunk(2, -1)
        assert torch.allclose(ours, x * own.cos() + torch.cat([-second, first], -1) * own.sin(), atol=1e-5)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        block = blocks[tables[slot, position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
        assert torch.equal(block[0], found[1][token])
        assert torch.equal(block[1], value[token])


# Sampling

PARAMS = [
    SamplingParams(50, 1.0),
    SamplingParams(50, 0.7),
    SamplingParams(50, 0.0),
    SamplingParams(50, 1.3, top_k=20),
    SamplingParams(50, 0.9, top_p=0.8),
    SamplingParams(50, 1.0, top_k=50, top_p=0.5),
]
SEEDS = [(2**64 - 5, 0), (7, 1), (3, 2), (1 << 40, 3), (11, 2**33), (5, 0)]


@pytest.mark.parametrize("number", [0, 1, 7, 8, 30])
def test_tokens_are_those_that_the_cpu_draws(number: int) -> None:
    """Both use NumPy's random numbers."""
    logits, slots, noise = (
        random(6, 9000) * 3,
        [4, 1, 2, 7, 0, 5],
        torch.from_numpy(np.stack([uniforms(*own, 50) for own in SEEDS])),
    )

    def by_slot(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        own = torch.zeros(9, dtype=dtype, device=DEVICE)
        own[slots] = torch.tensor(values, device=DEVICE).to(dtype)
        return own

    def signed(values: list[int]) -> list[int]:
        return [value - (1 << 64) if value >= 1 << 63 else value for value in values]

    state: Any = SimpleNamespace(
        num_slots=8,
        temperatures=by_slot([own.temperature for own in PARAMS], torch.float32),
        top_ks=by_slot([own.top_k for own in PARAMS], torch.int32),
        top_ps=by_slot([own.top_p for own in PARAMS], torch.float32),
        seeds=by_slot(signed([seed for seed, _ in SEEDS]), torch.int64),
        numbers=by_slot([own for _, own in SEEDS], torch.int64),
        num_prompts=by_slot([3] * 6, torch.int32),
        positions=by_slot([3 + number - 1] * 6, torch.int32),
        tokens=by_slot([0] * 6, torch.int64),
    )
    out_tokens, out_log_probs = ints([0] * 6), random(6)
    sample(logits, ints(slots), state, out_tokens, out_log_probs, filters=True)
    for row, params in enumerate(PARAMS):
        token, log_prob = draw_on_cpu(logits[row : row + 1].cpu(), noise[row : row + 1, number], params)
        assert out_tokens[row] == state.tokens[slots[row]] == token.item()
        assert abs(out_log_probs[row].item() - log_prob.item()) < 1e-4
        assert state.positions[slots[row]] == 3 + number


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(("vocabulary", "broken"), [(100, [7]), (9001, [9000]), (9001, list(range(9001)))])
def test_logits_that_are_nan_are_reported(temperature: float, vocabulary: int, broken: list[int]) -> None:
    logits = random(1, vocabulary)
    logits[0, broken] = float("nan")
    ones, ids, zeros = torch.ones(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE), ints([0, 0])
    state: Any = SimpleNamespace(
        num_slots=1, temperatures=ones * temperature, top_ks=zeros, top_ps=ones, seeds=ids, numbers=ids,
        num_prompts=zeros, positions=zeros.clone(), tokens=ids.clone(),
    )  # fmt: skip
    out, tokens = random(1), ints([0])
    sample(logits, ints([0]), state, tokens, out, filters=False)
    assert out.isnan().all()
    assert 0 <= tokens.item() < vocabulary  # the next step looks it up


# Experts


@pytest.mark.parametrize(
    ("tokens", "num", "inner", "k"), [(1, 8, 32, 2), (1, 6, 40, 3), (20, 8, 48, 3), (90, 6, 32, 2)]
)
@pytest.mark.parametrize("norms", [False, True])
def test_tokens_go_to_their_experts(tokens: int, num: int, inner: int, k: int, norms: bool) -> None:
    x, router, gate_up, down = random(tokens, 48), random(num, 48), random(num, 2 * inner, 48), random(num, 48, inner)
    routes = torch.zeros(tokens, 3, k, dtype=torch.uint8, device=DEVICE)
    counts = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    out = experts(x, Router(router, k, norms, True), gate_up, down, counts, routes[:, 1])
    weights, chosen = (x @ router.T).softmax(-1).topk(k)
    weights = weights / weights.sum(-1, keepdim=True) if norms else weights
    assert torch.equal(routes[:, 1].long(), chosen.sort(-1).values)
    assert counts.sum() == tokens * k
    for token in range(0, tokens, 7):
        for number in range(k):
            gate, up = (gate_up[chosen[token, number]] @ x[token]).chunk(2)
            expected = down[chosen[token, number]] @ (silu(gate) * up) * weights[token, number]
            assert torch.allclose(out[token, number], expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("num", [6, 8])
def test_logits_that_are_nan_send_a_token_to_as_many_experts_as_any(num: int) -> None:
    x, router, gate_up, down = random(3, 48), random(num, 48), random(num, 64, 48), random(num, 48, 32)
    x[1] = float("nan")
    routes = torch.zeros(3, 1, 2, dtype=torch.uint8, device=DEVICE)
    counts = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    out = experts(x, Router(router, 2, True, True), gate_up, down, counts, routes[:, 0])
    assert all(len(set(own)) == 2 and max(own) < num for own in routes[:, 0].tolist())
    assert counts.sum() == 6
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


# Elementwise


def test_norms_add_to_the_hidden_states_first() -> None:
    weight = random(48)
    for delta in (None, random(7, 48), random(7, 4, 48)):
        hidden = random(7, 48)
        added = hidden + (0 if delta is None else delta.view(7, -1, 48).sum(1))
        out = rms_norm(hidden, delta, weight, EPS)
        assert torch.allclose(hidden, added, atol=1e-5)
        assert torch.allclose(out, rms(added, weight), atol=1e-5)


def test_silu_mul() -> None:
    gate, up = random(7, 100).chunk(2, 1)
    assert torch.allclose(silu_mul(gate, up), silu(gate) * up, atol=1e-6)


def test_products_with_one_vector() -> None:
    x, weight, up, bias, norm, hidden = (random(*s) for s in [(1, 48), (33, 48), (33, 48), (33,), (48,), (1, 33)])
    up = -up.flip(0)  # equal shapes are equal numbers
    assert torch.allclose(matvec(x, weight, bias=bias), x @ weight.T + bias, atol=1e-4)
    y = rms(x, norm)
    assert torch.allclose(matvec(x, weight, up=up, norm=(norm, EPS)), silu(y @ weight.T) * (y @ up.T), atol=1e-3)
    before = hidden.clone()
    matvec(x, weight, add_to=hidden)
    assert torch.allclose(hidden, before + x @ weight.T, atol=1e-4)
