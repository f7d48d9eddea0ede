"""Drawing tokens on the device, each row in its own way: what sampling.py does for rows of one way at a time.

    narrow   (where some row has top-k or top-p) the least logit that may be drawn, found by halving
    look     largest logit and sums of probabilities, by stretches of the vocabulary
    draw     the uniform number of the row's next token, the stretch it falls into, the token there, its log-prob

A row's uniform numbers are those of sampling.uniforms: NumPy's Philox, computed here for the one that is wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 4096
_EVERYTHING = -(1 << 31)  # a least logit that rules nothing out


@triton.jit
def _order(x):
    """Integers in the order of floats."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _uniform(seed, answer, number):
    """The number-th float32 that NumPy's Philox with this key draws."""
    one: tl.uint64 = seed
    two: tl.uint64 = answer
    a = (number // 8 + 1).to(tl.uint64)
    b = a * 0
    c = a * 0
    d = a * 0
    for _ in tl.static_range(10):
        high_a = tl.umulhi(a, tl.full((), 0xD2E7470EE14C6C93, tl.uint64))
        low_a = a * tl.full((), 0xD2E7470EE14C6C93, tl.uint64)
        high_c = tl.umulhi(c, tl.full((), 0xCA5A826395121157, tl.uint64))
        low_c = c * tl.full((), 0xCA5A826395121157, tl.uint64)
        a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ two, low_a
        one = one + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        two = two + tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    word = number % 8
    which = word // 2
    drawn = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    half = tl.where(word % 2 == 0, drawn & 0xFFFFFFFF, drawn >> 32)
    return (half >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _narrow(logits, num, slots, temperatures, top_ks, top_ps, least, BLOCK: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    temperature = tl.load(temperatures + slot)
    logits += row * num
    at = tl.arange(0, BLOCK)
    shift: tl.constexpr = 32 - BITS
    bound = tl.full((), -(1 << (BITS - 1)), tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        if (top_k > 0) & (top_k < num):
            for bit in range(BITS - 1, -1, -1):
                trial = bound + (tl.full((), 1, tl.int32) << bit)
                count = tl.zeros([BLOCK], tl.int32)
                for begin in range(0, num, BLOCK):
                    is_there = begin + at < num
                    x = tl.load(logits + begin + at, mask=is_there, other=float("-inf"))
                    count += (is_there & ((_order(x) >> shift) >= trial)).to(tl.int32)
                bound = tl.where(tl.sum(count, 0) >= top_k, trial, bound)
        if top_p < 1.0:
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            for begin in range(0, num, BLOCK):
                x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                top = tl.maximum(top, x.to(tl.float32))
            largest = tl.max(top, 0)
            mass = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, num, BLOCK):
                x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                share = tl.exp((x.to(tl.float32) - largest) / temperature)
                mass += tl.where((_order(x) >> shift) >= bound, share, 0.0)
            wanted = tl.sum(mass, 0) * top_p
            above = tl.full((), -(1 << (BITS - 1)), tl.int32)
            for bit in range(BITS - 1, -1, -1):
                trial = above + (tl.full((), 1, tl.int32) << bit)
                mass = tl.zeros([BLOCK], tl.float32)
                for begin in range(0, num, BLOCK):
                    x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                    share = tl.exp((x.to(tl.float32) - largest) / temperature)
                    mass += tl.where((_order(x) >> shift) >= trial, share, 0.0)
                above = tl.where(tl.sum(mass, 0) >= wanted, trial, above)
            bound = tl.maximum(bound, above)
    tl.store(least + row, bound << shift)


@triton.jit
def _look(logits, num, num_stretches, slots, temperatures, least, seen, BLOCK: tl.constexpr, NARROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    at = stretch * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * num + at, mask=at < num, other=float("-inf"))
    y = x.to(tl.float32) / temperature
    largest, place = tl.max(y, 0, return_indices=True)
    share = tl.where(at < num, tl.exp(y - largest), 0.0)
    total = tl.sum(share, 0)
    open = total
    if NARROWS:
        open = tl.sum(tl.where(_order(x) >= tl.load(least + row), share, 0.0), 0)
    base = seen + (row * num_stretches + stretch) * 4
    tl.store(base, largest)
    tl.store(base + 1, total)
    tl.store(base + 2, open)
    tl.store(base + 3, place.to(tl.float32))


@triton.jit
def _draw(
    logits, num, num_stretches, slots, num_slots, temperatures, seeds, answers, prompts, positions, tokens, least, seen,
    out_tokens, out_log_probs, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, NARROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    warm = tl.load(temperatures + slot)
    temperature = tl.where(warm > 0, warm, 1.0)
    position = tl.load(positions + slot)
    each = tl.arange(0, STRETCHES)
    is_there = each < num_stretches
    base = seen + (row * num_stretches + each) * 4
    tops = tl.load(base, mask=is_there, other=float("-inf"))
    largest, top_stretch = tl.max(tops, 0, return_indices=True)
    scale = tl.where(is_there, tl.exp(tops - largest), 0.0)
    total = tl.sum(tl.load(base + 1, mask=is_there, other=0.0) * scale, 0)
    open = tl.load(base + 2, mask=is_there, other=0.0) * scale
    running = tl.cumsum(open, 0)
    seed = tl.load(seeds + slot).to(tl.uint64, bitcast=True)
    answer = tl.load(answers + slot).to(tl.uint64, bitcast=True)
    uniform = _uniform(seed, answer, position + 1 - tl.load(prompts + slot))
    target = uniform * tl.sum(tl.where(each == num_stretches - 1, running, 0.0), 0)
    # The first stretch, and in it the first token, at which the running sum passes the target; rounding must not carry
    # it beyond the last that may be drawn.
    last_open = tl.max(tl.where(open > 0, each, 0), 0)
    stretch = tl.minimum(tl.sum((is_there & (running <= target)).to(tl.int32), 0), last_open)
    before = tl.sum(tl.where(each == stretch, running - open, 0.0), 0)
    at = stretch * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * num + at, mask=at < num, other=float("-inf"))
    share = tl.where(at < num, tl.exp(x.to(tl.float32) / temperature - largest), 0.0)
    if NARROWS:
        share = tl.where(_order(x) >= tl.load(least + row), share, 0.0)
    within = before + tl.cumsum(share, 0)
    inner = tl.arange(0, BLOCK)
    passed = tl.min(tl.where((share > 0) & (within > target), inner, BLOCK), 0)
    place = tl.minimum(passed, tl.max(tl.where(share > 0, inner, 0), 0))
    token = stretch * BLOCK + place
    top = tl.sum(tl.where(each == top_stretch, tl.load(base + 3, mask=is_there, other=0.0), 0.0), 0)
    token = tl.where(warm > 0, token, top_stretch * BLOCK + top.to(tl.int32))
    token = tl.minimum(token, num - 1)  # where logits are no numbers
    chosen = tl.load(logits + row * num + token).to(tl.float32) / temperature
    tl.store(out_tokens + row, token)
    tl.store(out_log_probs + row, chosen - largest - tl.log(total))
    if slot < num_slots:  # the others are there to fill a batch up
        tl.store(tokens + slot, token.to(tl.int64))
        tl.store(positions + slot, position + 1)


def draw(
    logits: Tensor,
    slots: Tensor,
    num_slots: int,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    answers: Tensor,
    prompts: Tensor,
    positions: Tensor,
    tokens: Tensor,
    out_tokens: Tensor,
    out_log_probs: Tensor,
    *,
    narrows: bool,
) -> None:
    """The next token of each row from logits [rows, vocabulary], and its log-prob before top-k and top-p.

    What rows are drawn by is kept by slot; so are the token and position of each, which go on. `narrows`: some row has
    a top-k or top-p. A row whose logits are no numbers gets a log-prob that is none.
    """
    rows, num = logits.shape
    num_stretches = triton.cdiv(num, _STRETCH)
    seen = torch.empty((rows, num_stretches, 4), dtype=torch.float32, device=logits.device)
    least = slots
    if narrows:
        least = torch.empty(rows, dtype=torch.int32, device=logits.device)
        bits = 16 if logits.dtype == torch.bfloat16 else 32  # a bfloat16 is the upper half of a float32
        _narrow[(rows,)](
            logits, num, slots, temperatures, top_ks, top_ps, least, _STRETCH, bits, num_warps=8
        )  # fmt: skip
    _look[(rows, num_stretches)](
        logits, num, num_stretches, slots, temperatures, least, seen, _STRETCH, narrows, num_warps=8
    )  # fmt: skip
    _draw[(rows,)](
        logits, num, num_stretches, slots, num_slots, temperatures, seeds, answers, prompts, positions, tokens, least,
        seen, out_tokens, out_log_probs, _STRETCH, triton.next_power_of_2(num_stretches), narrows, num_warps=8,
    )  # fmt: skip
