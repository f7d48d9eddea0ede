"""The experts of a layer as Triton kernels, without sorting and without the host waiting.

    route   compute probabilities, take the k largest of each token, and append the token to the lists of its experts
    up      silu(x @ gate) * (x @ up), for each expert the tokens in its list
    down    the product with down, times the routing weight, for each of the k by itself: the caller adds them up

A list has room for all tokens, since a token chooses an expert at most once; its length stays on the device. The order
in a list is arbitrary, and no result depends on it. A single token needs no lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, sigmoid
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from practicum.rollout.engine.cuda.elementwise import MAX_WIDTH, launches_early, matvec, silu_mul

_FEW_TOKENS, _SOME_TOKENS = 16, 1024


@triton.jit
def _route_kernel(
    logits, routing_weights, choices, lists, counts, routes, route_stride, capacity,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    NORMS: tl.constexpr, ROUNDS: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    which = tl.arange(0, K_BLOCK)
    x = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf")).to(tl.float32)
    shared = tl.exp(x - tl.max(x, 0))
    left = tl.where(at < EXPERTS, shared / tl.sum(shared, 0), -2.0)
    # NaN must not send a token beyond the existing experts, or twice to one: it is passed on as its routing weight.
    broken = tl.sum(tl.where(left == left, 0, 1), 0)
    left = tl.where(left == left, left, -1.0)
    own = tl.zeros([K_BLOCK], tl.float32)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    for number in tl.static_range(K):
        routing_weight, expert = tl.max(left, 0, return_indices=True)
        own = tl.where(which == number, routing_weight, own)
        chosen = tl.where(which == number, expert, chosen)
        left = tl.where(at == expert, -2.0, left)
    is_one = which < K
    own = tl.where(broken > 0, float("nan"), own)
    if NORMS:
        own = own / tl.sum(own, 0)
    if ROUNDS:
        own = own.to(logits.dtype.element_ty).to(tl.float32)
    tl.store(routing_weights + token * K + which, own, mask=is_one)
    tl.store(choices + token * K + which, chosen, mask=is_one)
    place = tl.atomic_add(counts + chosen, 1, mask=is_one)
    tl.store(lists + chosen.to(tl.int64) * capacity + place, (token * K + which).to(tl.int32), mask=is_one)
    if RECORDS:  # in ascending order
        is_less = (chosen[None, :] < chosen[:, None]) & is_one[None, :]
        rank = tl.sum(is_less.to(tl.int32), 1)
        tl.store(routes + token * route_stride + rank, chosen.to(routes.dtype.element_ty), mask=is_one)


@triton.jit
def _up_kernel(
    x, gate_up, lists, counts, out, num_inner, width, capacity,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        part = tl.arange(0, PART)
        is_row, is_column = row < count, column < num_inner
        pair = tl.load(lists + expert * capacity + row, mask=is_row, other=0).to(tl.int64)
        inputs = x + (pair // K)[:, None] * width
        weights = gate_up + expert * (2 * num_inner * width) + column.to(tl.int64)[None, :] * width
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, width, PART):
            at = begin + part
            valid = at < width
            a = tl.load(inputs + at[None, :], mask=is_row[:, None] & valid[None, :], other=0.0)
            mask = valid[:, None] & is_column[None, :]
            gate = tl.load(weights + at[:, None], mask=mask, other=0.0)
            up = tl.load(weights + num_inner * width + at[:, None], mask=mask, other=0.0)
            gates = tl.dot(a, gate, gates, input_precision=PRECISION)
            ups = tl.dot(a, up, ups, input_precision=PRECISION)
        dtype = out.dtype.element_ty
        gates = gates.to(dtype).to(tl.float32)
        activated = (gates / (1 + tl.exp(-gates))).to(dtype).to(tl.float32)
        y = (activated * ups.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out + pair[:, None] * num_inner + column[None, :], y, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down_kernel(
    inner, down, lists, counts, routing_weights, out, num_inner, width, capacity,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        part = tl.arange(0, PART)
        is_row, is_column = row < count, column < width
        pair = tl.load(lists + expert * capacity + row, mask=is_row, other=0).to(tl.int64)
        weights = down + expert * (num_inner * width) + column.to(tl.int64)[None, :] * num_inner
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, num_inner, PART):
            at = begin + part
            valid = at < num_inner
            where = pair[:, None] * num_inner + at[None, :]
            a = tl.load(inner + where, mask=is_row[:, None] & valid[None, :], other=0.0)
            b = tl.load(weights + at[:, None], mask=valid[:, None] & is_column[None, :], other=0.0)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)
        dtype = out.dtype.element_ty
        routing_weight = tl.load(routing_weights + pair, mask=is_row, other=0.0)
        y = (sums.to(dtype).to(tl.float32) * routing_weight[:, None]).to(dtype)
        tl.store(out + pair[:, None] * width + column[None, :], y, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _up_of_one_kernel(
    x, gate_up, choices, out, num_inner, width, BLOCK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, PART)
    expert = tl.load(choices + number).to(tl.int64)
    where = expert * (2 * num_inner * width) + place.to(tl.int64)[:, None] * width + at[None, :]
    mask = (place < num_inner)[:, None] & (at < width)[None, :]
    gates = tl.load(gate_up + where, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + num_inner * width + where, mask=mask, other=0.0).to(tl.float32)
    piece = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gate = tl.sum(gates * piece, 1).to(dtype).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    y = activated * tl.sum(ups * piece, 1).to(dtype).to(tl.float32)
    tl.store(out + number * num_inner + place, y.to(dtype), mask=place < num_inner)


@triton.jit
def _down_of_one_kernel(
    inner, down, choices, routing_weights, out, num_inner, width,
    BLOCK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, PART)
    expert = tl.load(choices + number).to(tl.int64)
    where = expert * (num_inner * width) + place.to(tl.int64)[:, None] * num_inner + at[None, :]
    mask = (place < width)[:, None] & (at < num_inner)[None, :]
    weights = tl.load(down + where, mask=mask, other=0.0).to(tl.float32)
    piece = tl.load(inner + number * num_inner + at, mask=at < num_inner, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    y = tl.sum(weights * piece[None, :], 1).to(dtype).to(tl.float32) * tl.load(routing_weights + number)
    tl.store(out + number * width + place, y.to(dtype), mask=place < width)


@dataclass(frozen=True, slots=True)
class Router:
    """The router of a layer, and how it computes routing weights."""

    weight: Tensor
    k: int
    norms: bool  # the k routing weights of a token are normalised
    rounds: bool  # routing weights are rounded to the dtype of the model

    @classmethod
    def of(cls, module: Any, family: str) -> Router:
        is_mixtral = family == "mixtral"
        return cls(module.weight, module.top_k, is_mixtral or bool(module.norm_topk_prob), not is_mixtral)


def experts(x: Tensor, router: Router, gate_up: Tensor, down: Tensor, counts: Tensor, routes: Tensor | None) -> Tensor:
    """Return the weighted outputs [tokens, k, width] of the k experts of each token, from x [tokens, width].

    `counts` [experts] must be zero. The chosen experts are written to `routes` [tokens, k], where that is given, in
    ascending order.
    """
    tokens, width = x.shape
    num, _, num_inner = down.shape
    k = router.k
    is_one = tokens == 1 and max(width, num_inner) <= MAX_WIDTH
    logits = matvec(x, router.weight) if is_one else linear(x, router.weight)
    choices = torch.empty((tokens, k), dtype=torch.int32, device=x.device)
    routing_weights = torch.empty((tokens, k), dtype=torch.float32, device=x.device)
    lists = torch.empty((num, tokens), dtype=torch.int32, device=x.device)
    _route_kernel[(tokens,)](
        logits, routing_weights, choices, lists, counts, lists if routes is None else routes,
        0 if routes is None else routes.stride(0), tokens,
        num, triton.next_power_of_2(num), k, triton.next_power_of_2(k), router.norms, router.rounds, routes is not None,
        num_warps=1,
    )  # fmt: skip
    inner = torch.empty((tokens * k, num_inner), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, k, width), dtype=x.dtype, device=x.device)
    if is_one:
        early = launches_early(x.device)
        _up_of_one_kernel[(triton.cdiv(num_inner, 4), k)](
            x, gate_up, choices, inner, num_inner, width, 4, triton.next_power_of_2(width), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
        _down_of_one_kernel[(triton.cdiv(width, 8), k)](
            inner, down, choices, routing_weights, out, num_inner, width, 8, triton.next_power_of_2(num_inner), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
        return out
    if tokens <= _FEW_TOKENS:
        rows, columns, part, warps, stages = 16, 16, 128, 4, 3
    elif tokens <= _SOME_TOKENS:
        rows, columns, part, warps, stages = 64, 64, 64, 4, 3
    else:
        rows, columns, part, warps, stages = 128, 64, 64, 8, 3
    part = min(part, max(16, triton.next_power_of_2(min(width, num_inner))))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    blocks = triton.cdiv(tokens, rows)
    _up_kernel[(triton.cdiv(num_inner, columns), num, blocks)](
        x, gate_up, lists, counts, inner, num_inner, width, tokens,
        k, rows, columns, part, precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns = columns if columns < 64 or tokens <= _SOME_TOKENS else 128
    _down_kernel[(triton.cdiv(width, columns), num, blocks)](
        inner, down, lists, counts, routing_weights, out, num_inner, width, tokens,
        rows, columns, part, precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def shared_expert(x: Tensor, module: Any, gate: Any) -> Tensor:
    """Return the gated output [tokens, width] of the expert that every token is sent to."""
    inner = silu_mul(linear(x, module.gate_proj.weight), linear(x, module.up_proj.weight))
    return sigmoid(linear(x, gate.weight)) * linear(inner, module.down_proj.weight)
