"""Numbers of so many bits each, without gaps.

    pack_bits    end to end: 64 numbers begin and end with a byte, so that such pieces can be cut out and joined
    slice_bits   the lowest 32 bits of all, then the next 16, then 8, then what is over: quicker for few numbers

Both take ceil(num * bits / 8) bytes.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15  # numbers: what is shuffled at once stays in the cache
_SLICES = ((32, "<u4"), (16, "<u2"), (8, "u1"))


def packed_size(num: int, bits: int) -> int:
    return -(-num * bits // 8)


def pack_bits(numbers: NDArray[np.int64], bits: int) -> bytes:
    """64 numbers fill `bits` words exactly: so the i-th of every 64 goes to the same place, for all at once."""
    chunks = [_pack_chunk(numbers[at : at + _CHUNK].view(np.uint64), bits) for at in range(0, len(numbers), _CHUNK)]
    return b"".join(chunks)[: packed_size(len(numbers), bits)]


def unpack_bits(data: memoryview, num: int, bits: int) -> NDArray[np.int64]:
    numbers = np.empty(num, np.uint64)
    size = packed_size(_CHUNK, bits)
    for i, at in enumerate(range(0, num, _CHUNK)):
        _unpack_chunk(data[i * size : (i + 1) * size], bits, numbers[at : at + _CHUNK])
    return numbers.view(np.int64)


def _pack_chunk(numbers: NDArray[np.uint64], bits: int) -> bytes:
    groups = -(-len(numbers) // 64)
    whole = np.zeros(groups * 64, np.uint64)
    whole[: len(numbers)] = numbers
    columns = np.ascontiguousarray(whole.reshape(groups, 64).T)
    words = np.zeros((bits, groups), np.uint64)
    for i, column in enumerate(columns):
        word, shift = divmod(i * bits, 64)
        words[word] |= column << np.uint64(shift)
        if shift + bits > 64:
            words[word + 1] |= column >> np.uint64(64 - shift)
    return words.T.astype("<u8", order="C").tobytes()


def _unpack_chunk(data: memoryview, bits: int, found: NDArray[np.uint64]) -> None:
    groups = -(-len(found) // 64)
    filled = np.zeros(groups * bits, "<u8")
    filled.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    words = filled.reshape(groups, bits).T.astype(np.uint64, order="C")
    numbers = np.empty((64, groups), np.uint64)
    mask = np.uint64((1 << bits) - 1)
    for i in range(64):
        word, shift = divmod(i * bits, 64)
        np.right_shift(words[word], np.uint64(shift), out=numbers[i])
        if shift + bits > 64:
            numbers[i] |= words[word + 1] << np.uint64(64 - shift)
    numbers &= mask
    found[:] = np.ascontiguousarray(numbers.T).reshape(-1)[: len(found)]


def slice_bits(numbers: NDArray[np.int64], bits: int) -> bytes:
    found = []
    for width, dtype in _SLICES:
        if bits & width:
            found.append(numbers.astype(dtype).tobytes())
            numbers = numbers >> width
    over = bits % 8
    if over:
        lasts = np.zeros(-(-len(numbers) // 8) * 8, np.uint8)
        lasts[: len(numbers)] = numbers
        eights = lasts.view("<u8").astype(np.uint64, copy=False)
        for shift, lower, upper in _squeezes(over):
            eights = (eights & lower) | ((eights >> shift) & upper)
        squeezed = eights.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :over]
        found.append(squeezed.tobytes()[: packed_size(len(numbers), over)])
    return b"".join(found)


def unslice_bits(data: memoryview, num: int, bits: int) -> NDArray[np.int64]:
    found = np.zeros(num, np.int64)
    above = 0
    for width, dtype in _SLICES:
        if bits & width:
            size = num * width // 8
            found |= np.frombuffer(data[:size], dtype).astype(np.int64) << above
            data, above = data[size:], above + width
    over = bits % 8
    if over:
        groups = -(-num // 8)
        squeezed = np.zeros(groups * over, np.uint8)
        squeezed[: len(data)] = np.frombuffer(data, np.uint8)
        spread = np.zeros((groups, 8), np.uint8)
        spread[:, :over] = squeezed.reshape(groups, over)
        eights = spread.view("<u8").reshape(-1).astype(np.uint64, copy=False)
        for shift, lower, upper in reversed(_squeezes(over)):
            eights = (eights & lower) | ((eights & upper) << shift)
        found |= eights.astype("<u8", copy=False).view(np.uint8)[:num].astype(np.int64) << above
    return found


@functools.cache
def _squeezes(over: int) -> tuple[tuple[np.uint64, np.uint64, np.uint64], ...]:
    """Of eight bytes with `over` bits each: two become neighbours, then two pairs, then two fours.

    By how much the upper one comes down, the bits of the lower ones and those of the upper ones then.
    """
    steps = []
    for num in (1, 2, 4):
        lower = sum(((1 << num * over) - 1) << at for at in range(0, 64, 16 * num))
        steps.append((np.uint64(num * (8 - over)), np.uint64(lower), np.uint64(lower << num * over)))
    return tuple(steps)
