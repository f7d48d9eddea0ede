from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.rollout.engine.kv_cache import Decode, KVCache, Prompts

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


@pytest.mark.parametrize("window", [None, 3])
def test_prompts_end_to_end_and_tokens_one_by_one_see_what_they_would_alone(window: int | None) -> None:
    lengths, num_new = [4, 7, 7, 1], 6
    whole = [[vectors(n, length + num_new, seed) for n in (HEADS, KEY_HEADS, KEY_HEADS)] for seed, length in
             enumerate(lengths)]  # fmt: skip
    cache = KVCache()
    cache.reserve(4, 13, most_rows=4)
    cache.step = Prompts(lengths, [0, 1, 2, 3])
    query, key, value = (
        torch.cat([one[part][:, :, :length] for one, length in zip(whole, lengths, strict=True)], 2)
        for part in range(3)
    )
    first, _ = cache.attend(None, query, *cache.update(key, value, 0), None, sliding_window=window)
    found = [[part] for part in first[0].split(lengths)]
    for new in range(num_new):
        positions = torch.tensor(lengths) + new
        cache.step = Decode(positions, int(positions.max()) + 1)
        query, key, value = (
            torch.cat([one[part][:, :, at : at + 1] for one, at in zip(whole, positions.tolist(), strict=True)])
            for part in range(3)
        )
        out, _ = cache.attend(None, query, *cache.update(key, value, 0), None, sliding_window=window)
        for own, row in zip(found, out, strict=True):
            own.append(row)
    for own, (query, key, value) in zip(found, whole, strict=True):
        assert torch.allclose(torch.cat(own), attended(query, key, value, window), atol=1e-5)


def kept(cache: KVCache, row: int, length: int) -> Any:
    return [part[row, :, :length].clone() for pair in cache._layers.values() for part in pair]


def test_growing_and_moving_keep_what_rows_hold() -> None:
    cache = KVCache()
    cache.reserve(2, 5, most_rows=100)
    cache.step = Prompts([5, 3], [0, 1])
    for layer in range(2):
        cache.update(vectors(KEY_HEADS, 8, layer), vectors(KEY_HEADS, 8, layer + 5), layer)
    held = kept(cache, 1, 3)
    assert any(part.abs().sum() > 0 for part in held)
    cache.reserve(3, 200, most_rows=3)
    assert cache.num_rows == 3
    assert cache.room >= 200
    assert all(map(torch.equal, kept(cache, 1, 3), held))
    cache.copy(1, 2, 3)
    assert all(map(torch.equal, kept(cache, 2, 3), held))
    cache.reserve(4, 10, most_rows=50)  # more rows of less room each
    assert (cache.num_rows, cache.room) == (6, 64)
    assert all(map(torch.equal, kept(cache, 2, 3), held))
    assert cache.bytes_per_token == 2 * 2 * KEY_HEADS * WIDTH * 4
    cache.clear()
    assert cache.num_rows == cache.bytes_per_token == 0


def test_attention_that_does_more_is_refused() -> None:
    cache = KVCache()
    cache.step = Prompts([2], None)
    one, two = vectors(HEADS, 2, 0), vectors(KEY_HEADS, 2, 1)
    with pytest.raises(NotImplementedError, match="sinks"):
        cache.attend(None, one, two, two, None, s_aux=torch.zeros(HEADS))
    with pytest.raises(NotImplementedError, match="capped"):
        cache.attend(None, one, two, two, None, softcap=30.0)
