from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.replay.codec import decode_routes, encode_routes
from practicum.types import route_dtype

SHAPES = [(8, 2), (64, 8), (128, 8), (256, 8), (512, 10)]


def make_routes(num_experts: int, k: int, num_tokens: int, skews: list[float], seed: int = 0) -> np.ndarray:
    """The n-th most popular expert of a layer has the weight n^-skew; each layer has favourites of its own."""
    random = np.random.default_rng(seed)
    routes = np.empty((num_tokens, len(skews), k), route_dtype(num_experts))
    for layer, skew in enumerate(skews):
        weights = random.permutation(np.arange(1, num_experts + 1) ** -skew).astype(np.float32)
        # The k that arrive first when each waits a random time, the popular ones a shorter one.
        waits = random.standard_exponential((num_tokens, num_experts), np.float32) / weights
        routes[:, layer] = np.sort(np.argsort(waits, axis=1)[:, :k], axis=1)
    return routes


def round_trip(routes: np.ndarray, num_experts: int) -> bytes:
    data = encode_routes(routes, num_experts)
    back = decode_routes(data, *routes.shape, num_experts)
    assert back.dtype == route_dtype(num_experts) and np.array_equal(back, routes)
    return data


def bits_per_row(routes: np.ndarray, num_experts: int) -> float:
    return 8 * len(round_trip(routes, num_experts)) / (routes.shape[0] * routes.shape[1])


def entropy_of_popularity(routes: np.ndarray, num_experts: int) -> float:
    """Bits a row, if experts were chosen by nothing but their popularity: of the law with the most entropy among those
    of k experts that are each as popular as here."""
    num_tokens, num_layers, k = routes.shape
    total = 0.0
    for layer in range(num_layers):
        popularity = np.bincount(routes[:, layer].reshape(-1), minlength=num_experts) / num_tokens
        popularity = np.clip(popularity, 1e-6, 1 - 1e-6)
        odds = popularity / (1 - popularity)
        for _ in range(20):
            odds /= odds.mean()
            before = np.zeros((num_experts + 1, k + 1))
            after = np.zeros((num_experts + 1, k + 1))
            before[0, 0] = after[-1, 0] = 1
            for i, odd in enumerate(odds):
                before[i + 1] = before[i] + odd * np.append(0, before[i, :-1])
            for i, odd in reversed(list(enumerate(odds))):
                after[i] = after[i + 1] + odd * np.append(0, after[i + 1, :-1])
            now = odds * (before[:-1, :k] * after[1:, k - 1 :: -1]).sum(axis=1) / before[-1, k]
            odds = odds * (popularity / now) * (1 - now) / (1 - popularity)
        total += math.log2(before[-1, k]) - float((now * np.log2(odds)).sum())
    return total / num_layers


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([*SHAPES, (1, 1), (3, 3), (5, 1), (20, 3), (40, 20), (300, 2)]),
    num_tokens=st.integers(0, 3000),
    skews=st.lists(st.floats(0, 4), max_size=4),
    seed=st.integers(0, 99),
)
def test_what_was_recorded_comes_back(shape: tuple[int, int], num_tokens: int, skews: list[float], seed: int) -> None:
    round_trip(make_routes(*shape, min(num_tokens, 200_000 // shape[0]), skews, seed), shape[0])


@pytest.mark.parametrize(("num_experts", "k"), SHAPES)
def test_random_routing_takes_hardly_more_bits_than_there_are_possibilities(num_experts: int, k: int) -> None:
    bits = bits_per_row(make_routes(num_experts, k, 1500, [0.0] * 4), num_experts)
    assert bits <= 1.05 * math.log2(math.comb(num_experts, k))


# What share of the bits of random routing remains, at most.
SKEWED = [(8, 2, 0.90), (64, 8, 0.87), (128, 8, 0.85), (256, 8, 0.84), (512, 10, 0.83)]


@pytest.mark.parametrize(("num_experts", "k", "share"), SKEWED)
def test_skewed_routing_takes_less_near_the_entropy_of_popularity(num_experts: int, k: int, share: float) -> None:
    routes = make_routes(num_experts, k, 6000, [1.0] * 6)
    bits = bits_per_row(routes, num_experts)
    assert bits <= share * math.log2(math.comb(num_experts, k))
    assert bits <= 1.12 * entropy_of_popularity(routes[:, :1], num_experts)


def test_the_more_skewed_the_smaller() -> None:
    sizes = [bits_per_row(make_routes(64, 8, 4000, [skew] * 4), 64) for skew in (0.0, 0.7, 1.4, 3.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.5 * sizes[0]


def test_layers_are_skewed_or_not_each_by_itself() -> None:
    even, skewed = (bits_per_row(make_routes(64, 8, 8000, [skew] * 4), 64) for skew in (0.0, 1.2))
    mixed = bits_per_row(make_routes(64, 8, 8000, [0.0, 1.2, 0.0, 1.2, 1.2, 0.0]), 64)
    assert mixed == pytest.approx((even + skewed) / 2, rel=0.02)


def test_one_row_for_every_token_takes_hardly_anything() -> None:
    routes = np.broadcast_to(np.array([3, 5, 11, 200], np.uint8), (20_000, 2, 4))
    assert bits_per_row(routes, 256) < 2


def test_a_wider_type_is_taken_too() -> None:
    routes = make_routes(64, 8, 50, [1.0])
    assert encode_routes(routes.astype(np.int64), 64) == encode_routes(routes, 64)


@pytest.mark.parametrize("row", [[1, 1, 2], [0, 1, 8], [3, 2, 7], [-1, 2, 3]])
def test_what_is_no_combination_is_refused_by_place(row: list[int]) -> None:
    routes = make_routes(8, 3, 9000, [0.0, 1.0]).astype(np.int64)
    routes[8111, 1] = row
    with pytest.raises(ValueError, match=r"token 8111, layer 1: .* are not 3 of 8 experts, ascending"):
        encode_routes(routes, 8)


RECORDINGS = {
    "few": (8, make_routes(8, 2, 500, [1.0, 0.0])),
    "even": (64, make_routes(64, 8, 300, [0.0, 0.0])),
    "grouped": (64, make_routes(64, 8, 6000, [1.5, 0.0, 2.0])),
    "of two words": (512, make_routes(512, 10, 5000, [1.0, 1.0])),
}


def seal(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.parametrize("name", RECORDINGS)
@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_damaged_bytes_are_refused(name: str, where: float, flip: int, cut: bool) -> None:
    num_experts, routes = RECORDINGS[name]
    data = bytearray(encode_routes(routes, num_experts))
    at = int(where * len(data))
    if cut:
        del data[at:]
    else:
        data[at] ^= flip
    with pytest.raises(ValueError, match="damaged"):
        decode_routes(bytes(data), *routes.shape, num_experts)


@pytest.mark.parametrize("name", RECORDINGS)
@settings(max_examples=150, deadline=None)
@given(
    where=st.floats(0, 1, exclude_max=True),
    near_start=st.booleans(),
    flip=st.integers(1, 255),
    change=st.sampled_from(["flip", "cut", "add"]),
)
def test_no_bytes_give_rows_that_are_no_combinations(
    name: str, where: float, near_start: bool, flip: int, change: str
) -> None:
    """Also such as pass the check sum."""
    num_experts, routes = RECORDINGS[name]
    data = bytearray(encode_routes(routes, num_experts)[:-4])
    at = int(where * (min(200, len(data)) if near_start else len(data)))
    if change == "flip":
        data[at] ^= flip
    elif change == "cut":
        del data[at:]
    else:
        data.insert(at, flip)
    try:
        back = decode_routes(seal(bytes(data)), *routes.shape, num_experts)
    except ValueError:
        return
    assert back.shape == routes.shape
    assert (np.diff(back.astype(np.int64), axis=-1) > 0).all() and back.max() < num_experts


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), form=st.integers(0, 3))
def test_made_up_bytes_are_refused(data: bytes, form: int) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_routes(seal(bytes([form]) + data), 10_000, 4, 8, 64)


def test_bytes_for_other_numbers_of_tokens_are_refused_before_memory_is_taken() -> None:
    for num_experts, routes in RECORDINGS.values():
        num_tokens, num_layers, k = routes.shape
        data = encode_routes(routes, num_experts)
        for asked in (num_tokens + 100, 10**12):
            with pytest.raises(ValueError, match="rows"):
                decode_routes(data, asked, num_layers, k, num_experts)
