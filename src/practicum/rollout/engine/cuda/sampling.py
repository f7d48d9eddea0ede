"""Sampling on the device, each row with its own parameters: the same tokens as `engine/sampling.py` draws on a CPU.

    filter   (where some row has top-k or top-p) find the least logit that may be drawn, by bisection
    reduce   the largest logit and the sums of probabilities of each block of the vocabulary
    sample   the uniform number of the row's next token, the block it falls into, the token there, its log-prob

The uniform numbers are those of `uniforms` on a CPU: NumPy's Philox, computed here for the one number that is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from practicum.rollout.engine.cuda.device_state import DeviceState

_BLOCK = 4096


@triton.jit
def _ordered(x):
    """Map floats to integers of the same order."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _uniform(seed, trajectory, number):
    """Return the number-th float32 that NumPy's Philox with this key draws."""
    one: tl.uint64 = seed
    two: tl.uint64 = trajectory
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
def _filter_kernel(
    logits, num, slots, temperatures, top_ks, top_ps, thresholds, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    temperature = tl.load(temperatures + slot)
    logits += row * num
    at = tl.arange(0, BLOCK)
    shift: tl.constexpr = 32 - BITS
    threshold = tl.full((), -(1 << (BITS - 1)), tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        if (top_k > 0) & (top_k < num):
            for bit in range(BITS - 1, -1, -1):
                trial = threshold + (tl.full((), 1, tl.int32) << bit)
                count = tl.zeros([BLOCK], tl.int32)
                for begin in range(0, num, BLOCK):
                    valid = begin + at < num
                    x = tl.load(logits + begin + at, mask=valid, other=float("-inf"))
                    count += (valid & ((_ordered(x) >> shift) >= trial)).to(tl.int32)
                threshold = tl.where(tl.sum(count, 0) >= top_k, trial, threshold)
        if top_p < 1.0:
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            for begin in range(0, num, BLOCK):
                x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                top = tl.maximum(top, x.to(tl.float32))
            largest = tl.max(top, 0)
            mass = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, num, BLOCK):
                x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                weight = tl.exp((x.to(tl.float32) - largest) / temperature)
                mass += tl.where((_ordered(x) >> shift) >= threshold, weight, 0.0)
            wanted = tl.sum(mass, 0) * top_p
            above = tl.full((), -(1 << (BITS - 1)), tl.int32)
            for bit in range(BITS - 1, -1, -1):
                trial = above + (tl.full((), 1, tl.int32) << bit)
                mass = tl.zeros([BLOCK], tl.float32)
                for begin in range(0, num, BLOCK):
                    x = tl.load(logits + begin + at, mask=begin + at < num, other=float("-inf"))
                    weight = tl.exp((x.to(tl.float32) - largest) / temperature)
                    mass += tl.where((_ordered(x) >> shift) >= trial, weight, 0.0)
                above = tl.where(tl.sum(mass, 0) >= wanted, trial, above)
            threshold = tl.maximum(threshold, above)
    tl.store(thresholds + row, threshold << shift)


@triton.jit
def _reduce_kernel(
    logits, num, num_blocks, slots, temperatures, thresholds, partials, BLOCK: tl.constexpr, FILTERS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * num + at, mask=at < num, other=float("-inf"))
    y = x.to(tl.float32) / temperature
    largest, place = tl.max(y, 0, return_indices=True)
    weight = tl.where(at < num, tl.exp(y - largest), 0.0)
    total = tl.sum(weight, 0)
    kept = total
    if FILTERS:
        kept = tl.sum(tl.where(_ordered(x) >= tl.load(thresholds + row), weight, 0.0), 0)
    base = partials + (row * num_blocks + block) * 4
    tl.store(base, largest)
    tl.store(base + 1, total)
    tl.store(base + 2, kept)
    tl.store(base + 3, place.to(tl.float32))


@triton.jit
def _sample_kernel(
    logits, num, num_blocks, slots, num_slots, temperatures, seeds, numbers, prompts, positions, tokens, thresholds,
    partials, out_tokens, out_log_probs, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    warm = tl.load(temperatures + slot)
    temperature = tl.where(warm > 0, warm, 1.0)
    position = tl.load(positions + slot)
    each = tl.arange(0, NUM_BLOCKS)
    valid = each < num_blocks
    base = partials + (row * num_blocks + each) * 4
    tops = tl.load(base, mask=valid, other=float("-inf"))
    largest, top_block = tl.max(tops, 0, return_indices=True)
    scale = tl.where(valid, tl.exp(tops - largest), 0.0)
    total = tl.sum(tl.load(base + 1, mask=valid, other=0.0) * scale, 0)
    kept = tl.load(base + 2, mask=valid, other=0.0) * scale
    running = tl.cumsum(kept, 0)
    seed = tl.load(seeds + slot).to(tl.uint64, bitcast=True)
    trajectory = tl.load(numbers + slot).to(tl.uint64, bitcast=True)
    uniform = _uniform(seed, trajectory, position + 1 - tl.load(prompts + slot))
    target = uniform * tl.sum(tl.where(each == num_blocks - 1, running, 0.0), 0)
    # The first block, and in it the first token, at which the running sum passes the target; rounding must not carry
    # it beyond the last that may be drawn.
    last_kept = tl.max(tl.where(kept > 0, each, 0), 0)
    block = tl.minimum(tl.sum((valid & (running <= target)).to(tl.int32), 0), last_kept)
    before = tl.sum(tl.where(each == block, running - kept, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * num + at, mask=at < num, other=float("-inf"))
    weight = tl.where(at < num, tl.exp(x.to(tl.float32) / temperature - largest), 0.0)
    if FILTERS:
        weight = tl.where(_ordered(x) >= tl.load(thresholds + row), weight, 0.0)
    within = before + tl.cumsum(weight, 0)
    inner = tl.arange(0, BLOCK)
    passed = tl.min(tl.where((weight > 0) & (within > target), inner, BLOCK), 0)
    place = tl.minimum(passed, tl.max(tl.where(weight > 0, inner, 0), 0))
    token = block * BLOCK + place
    top = tl.sum(tl.where(each == top_block, tl.load(base + 3, mask=valid, other=0.0), 0.0), 0)
    token = tl.where(warm > 0, token, top_block * BLOCK + top.to(tl.int32))
    token = tl.minimum(token, num - 1)  # where logits are no numbers
    chosen = tl.load(logits + row * num + token).to(tl.float32) / temperature
    tl.store(out_tokens + row, token)
    tl.store(out_log_probs + row, chosen - largest - tl.log(total))
    if slot < num_slots:  # the others are padding
        tl.store(tokens + slot, token.to(tl.int64))
        tl.store(positions + slot, position + 1)


def sample(
    logits: Tensor, slots: Tensor, state: DeviceState, out_tokens: Tensor, out_log_probs: Tensor, *, filters: bool
) -> None:
    """Draw the next token of each row of logits [rows, vocabulary], and its log-prob before top-k and top-p.

    `state` has the sampling parameters, and the tokens and positions, which are advanced. `filters` says that some row
    has a top-k or top-p. The log-prob of a row whose logits are NaN is NaN.
    """
    rows, num = logits.shape
    num_blocks = triton.cdiv(num, _BLOCK)
    partials = torch.empty((rows, num_blocks, 4), dtype=torch.float32, device=logits.device)
    thresholds = slots
    if filters:
        thresholds = torch.empty(rows, dtype=torch.int32, device=logits.device)
        bits = 16 if logits.dtype == torch.bfloat16 else 32  # a bfloat16 is the upper half of a float32
        _filter_kernel[(rows,)](
            logits, num, slots, state.temperatures, state.top_ks, state.top_ps, thresholds, _BLOCK, bits, num_warps=8
        )  # fmt: skip
    _reduce_kernel[(rows, num_blocks)](
        logits, num, num_blocks, slots, state.temperatures, thresholds, partials, _BLOCK, filters, num_warps=8
    )  # fmt: skip
    _sample_kernel[(rows,)](
        logits, num, num_blocks, slots, state.num_slots, state.temperatures, state.seeds, state.numbers,
        state.num_prompts, state.positions, state.tokens, thresholds, partials, out_tokens, out_log_probs, _BLOCK,
        triton.next_power_of_2(num_blocks), filters, num_warps=8,
    )  # fmt: skip
