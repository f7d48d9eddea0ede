from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from practicum.replay.combinations import Combinations, combinations_of, unpack_bits

SHAPES = [(8, 2), (64, 8), (128, 8), (256, 8), (512, 10)]


def random_routes(num_experts: int, k: int, rows: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    chosen = np.argsort(random.random((rows, num_experts)), axis=1)[:, :k]
    return chosen.astype(np.uint8 if num_experts <= 256 else np.uint16)


@pytest.mark.parametrize(("num_experts", "k"), [*SHAPES, (1, 1), (3, 3), (5, 1), (257, 2), (60, 6), (384, 8)])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 20_000])
def test_rows_come_back_sorted(num_experts: int, k: int, rows: int) -> None:
    routes = random_routes(num_experts, k, rows)
    codec = combinations_of(num_experts, k)
    data = codec.encode(routes)
    assert len(data) == codec.size(rows)
    back = codec.decode(data, rows)
    assert back.dtype == routes.dtype and np.array_equal(back, np.sort(routes, axis=1))


@pytest.mark.parametrize(("num_experts", "k"), [(7, 3), (9, 9), (10, 1), (12, 6)])
def test_every_combination_has_a_number_of_its_own(num_experts: int, k: int) -> None:
    every = np.array(list(itertools.combinations(range(num_experts), k)), np.uint8)
    codec = Combinations(num_experts, k)
    numbers = unpack_bits(memoryview(codec.encode(every)), len(every), codec.bits)
    assert sorted(numbers.tolist()) == list(range(math.comb(num_experts, k)))
    assert np.array_equal(codec.decode(codec.encode(every), len(every)), every)


@pytest.mark.parametrize(("num_experts", "k"), SHAPES)
def test_the_extremes_come_back(num_experts: int, k: int) -> None:
    """The largest numbers are rounded most on their way to a first guess."""
    ends = [[*range(start, start + k)] for start in (0, 1, num_experts - k - 1, num_experts - k)]
    gaps = [[*range(k - 1), last] for last in range(k - 1, num_experts)]
    routes = np.array([*ends, *gaps], np.uint16)
    codec = combinations_of(num_experts, k)
    assert np.array_equal(codec.decode(codec.encode(routes), len(routes)), routes)


@pytest.mark.parametrize(("num_experts", "k"), SHAPES)
def test_it_takes_hardly_more_bits_than_there_are_possibilities(num_experts: int, k: int) -> None:
    rows = 64 * 100
    bits = 8 * combinations_of(num_experts, k).size(rows) / rows
    assert bits <= 1.05 * math.log2(math.comb(num_experts, k))


@pytest.mark.parametrize("row", [[1, 1, 2], [0, 1, 8], [7, 3, 7]])
def test_what_is_no_combination_is_refused_by_row(row: list[int]) -> None:
    routes = random_routes(8, 3, 20_000)
    routes[17_001] = row
    with pytest.raises(ValueError, match=r"row 17001: .* are not 3 of 8 experts"):
        combinations_of(8, 3).encode(routes)


@pytest.mark.parametrize(("num_experts", "k"), [(9, 4), (512, 10)])
def test_damaged_bytes_are_refused_or_give_other_combinations(num_experts: int, k: int) -> None:
    codec = combinations_of(num_experts, k)
    with pytest.raises(ValueError, match="damaged"):
        codec.decode(b"\xff" * codec.size(64), 64)
    with pytest.raises(ValueError, match="bytes for 64 rows"):
        codec.decode(b"\x00", 64)


@pytest.mark.parametrize(("num_experts", "k"), [(4, 5), (4, 0), (1 << 17, 2), (4096, 64)])
def test_what_cannot_be_numbered_is_refused(num_experts: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"{k} of {num_experts} experts"):
        Combinations(num_experts, k)
