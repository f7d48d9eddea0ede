from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.replay.combinations import pack_bits, packed_size, slice_bits, unpack_bits, unslice_bits


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 62), num=st.integers(0, 200), seed=st.integers(0, 99))
def test_numbers_of_any_width_are_packed_end_to_end(bits: int, num: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, num, np.int64)
    data = pack_bits(numbers, bits)
    assert len(data) == packed_size(num, bits) == -(-num * bits // 8)
    assert np.array_equal(unpack_bits(memoryview(data), num, bits), numbers)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(0, 62), num=st.integers(0, 200), seed=st.integers(0, 99))
def test_numbers_of_any_width_are_sliced_without_gaps(bits: int, num: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, num, np.int64)
    data = slice_bits(numbers, bits)
    assert len(data) == packed_size(num, bits)
    assert np.array_equal(unslice_bits(memoryview(data), num, bits), numbers)


@pytest.mark.parametrize(("pack", "unpack"), [(pack_bits, unpack_bits), (slice_bits, unslice_bits)])
@pytest.mark.parametrize("bits", [5, 41, 62])
def test_many_numbers_come_back(
    pack: Callable[[np.ndarray, int], bytes], unpack: Callable[[memoryview, int, int], np.ndarray], bits: int
) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, 100_001, np.int64)
    assert np.array_equal(unpack(memoryview(pack(numbers, bits)), len(numbers), bits), numbers)


def test_pieces_of_64_numbers_can_be_cut_out_and_joined() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 41, 64 * 3, np.int64)
    assert b"".join(pack_bits(piece, 41) for piece in np.split(numbers, 3)) == pack_bits(numbers, 41)
