from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.rollout.engine.cpu.kernels import BLOCK, load_kernels
from practicum.rollout.engine.kv_cache import Decode, KVCache, Prefill

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def vectors(num_heads: int, num_tokens: int, seed: int) -> Tensor:
    return torch.randn(1, num_heads, num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def attended(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """[tokens, heads, width] by the book: each token sees itself and those before it, within the window."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    repeated = [part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value)]
    return scaled_dot_product_attention(query, *repeated, attn_mask=seen)[0].transpose(0, 1)


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["gathered", "kernels"])
@pytest.mark.parametrize("window", [None, 3])
def test_prompts_end_to_end_and_tokens_one_by_one_see_what_they_would_alone(window: int | None, kernels: Any) -> None:
    lengths, num_new = [4, BLOCK - 3, BLOCK - 3, 1], 6
    whole = [[vectors(n, length + num_new, seed) for n in (HEADS, KEY_HEADS, KEY_HEADS)] for seed, length in
             enumerate(lengths)]  # fmt: skip
    cache = KVCache(kernels)
    cache.num_blocks = 8
    tables = torch.tensor([[3, 0], [5, 8], [1, 2], [6, 0]])
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    cache.step = Prefill(lengths, tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK)
    query, key, value = (
        torch.cat([one[part][:, :, :length] for one, length in zip(whole, lengths, strict=True)], 2)
        for part in range(3)
    )
    first, _ = cache.attend(None, query, *cache.update(key, value, 0), None, sliding_window=window)
    found = [[part] for part in first[0].split(lengths)]
    for new in range(num_new):
        positions = torch.tensor(lengths) + new
        cache.step = Decode.of(tables, positions, int(positions.max()) + 1)
        query, key, value = (
            torch.cat([one[part][:, :, at : at + 1] for one, at in zip(whole, positions.tolist(), strict=True)])
            for part in range(3)
        )
        out, _ = cache.attend(None, query, *cache.update(key, value, 0), None, sliding_window=window)
        for own, row in zip(found, out, strict=True):
            own.append(row)
    for own, (query, key, value) in zip(found, whole, strict=True):
        assert torch.allclose(torch.cat(own), attended(query, key, value, window), atol=1e-5)


def test_blocks_are_copied_and_their_memory_given_back() -> None:
    cache = KVCache()
    cache.num_blocks = 4
    cache.step = Prefill([5], torch.arange(BLOCK, BLOCK + 5))
    for layer in range(2):
        cache.update(vectors(KEY_HEADS, 5, layer), vectors(KEY_HEADS, 5, layer + 5), layer)
    cache.copy([1, 1], [3, 4])
    for layer in range(2):
        for part in cache.kept(layer):
            assert part[1].abs().sum() > 0 and not part[2].any()
            assert torch.equal(part[3], part[1]) and torch.equal(part[4], part[1])
    assert cache.bytes_per_token == 2 * 2 * KEY_HEADS * WIDTH * 4
    cache.clear()
    assert cache.bytes_per_token == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_nobody_has_take_no_memory(dtype: torch.dtype) -> None:
    cache = KVCache()
    cache.num_blocks = 1 << 15
    cache.step = Prefill([5], torch.arange(BLOCK, BLOCK + 5))
    process = psutil.Process()
    before = process.memory_info().rss
    cache.update(vectors(KEY_HEADS, 5, 0).to(dtype), vectors(KEY_HEADS, 5, 1).to(dtype), 0)
    assert sum(part.nbytes for part in cache.kept(0)) > 100e6
    assert process.memory_info().rss - before < 50e6


def test_attention_that_does_more_is_refused() -> None:
    cache = KVCache()
    cache.step = Prefill([2], None)
    one, two = vectors(HEADS, 2, 0), vectors(KEY_HEADS, 2, 1)
    with pytest.raises(NotImplementedError, match="sinks"):
        cache.attend(None, one, two, two, None, s_aux=torch.zeros(HEADS))
    with pytest.raises(NotImplementedError, match="capped"):
        cache.attend(None, one, two, two, None, softcap=30.0)
