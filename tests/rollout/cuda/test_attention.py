"""Placing and attending against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.rollout.cuda.kernels import DEVICE, EPS, ints, random, rms

from practicum.rollout.cuda.attention import attend, place  # isort: skip
from practicum.rollout.cuda.pages import PAGE, num_pages  # isort: skip


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
