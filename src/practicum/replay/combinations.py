"""Which k of E experts, in hardly more bits than there are possibilities.

    experts [rows, k] ── sorted ─▶ the number of the combination, 0 ... C(E, k) - 1 ── so many bits each ─▶ bytes

A sorted combination a < b < c ... has the number C(a, 1) + C(b, 2) + C(c, 3) + ..., and every number is that of one
combination. The order in which a router names its experts is not kept: their weights are computed anew in replay.

Numbers of more than 62 bits go in two words. Everything works on whole columns, in blocks that stay in the cache.

Numbers of so many bits each are written without gaps, in ceil(num * bits / 8) bytes:

    pack_bits    end to end: 64 numbers begin and end with a byte, so that such pieces can be cut out and joined
    slice_bits   the lowest 32 bits of all, then the next 16, then 8, then what is over: quicker for few numbers
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.types import route_dtype

_CHUNK = 1 << 15  # numbers: what is shuffled at once stays in the cache
_SLICES = ((32, "<u4"), (16, "<u2"), (8, "u1"))


def packed_size(num: int, bits: int) -> int:
    return -(-num * bits // 8)


def pack_bits(numbers: NDArray[np.int64], bits: int) -> bytes:
    """Pack numbers end to end.

    64 of them fill `bits` words exactly: so the i-th of every 64 goes to the same place, for all at once.
    """
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
    """Return the steps that squeeze eight bytes with `over` bits each: to neighbours, then two pairs, then two fours.

    Each step: how far the upper ones come down, the bits of the lower ones, and those of the upper ones then.
    """
    steps = []
    for num in (1, 2, 4):
        lower = sum(((1 << num * over) - 1) << at for at in range(0, 64, 16 * num))
        steps.append((np.uint64(num * (8 - over)), np.uint64(lower), np.uint64(lower << num * over)))
    return tuple(steps)


Ids = NDArray[np.unsignedinteger[Any]]

BLOCK = 1 << 13  # rows: their columns stay in the cache
WORD_BITS = 62
_LOW_BITS = 48  # of a number in two words
_MOST_BITS = WORD_BITS + _LOW_BITS
_CELL_BITS = 8  # of the fraction of a float that find a place in the table of guesses
_FRACTION_BITS = 52
_ONE = 1023 << _CELL_BITS  # the cell of 1.0


class Combinations:
    """The combinations of `k` among `num_experts`. They are made once and kept: see `combinations_of`."""

    def __init__(self, num_experts: int, k: int) -> None:
        if not 1 <= k <= num_experts <= 1 << 16:
            raise ValueError(f"{k} of {num_experts} experts")
        self.num_experts = num_experts
        self.k = k
        self.num = math.comb(num_experts, k)
        self.bits = max(1, (self.num - 1).bit_length())
        if self.bits > _MOST_BITS:
            raise ValueError(f"{k} of {num_experts} experts have {self.num:.3g} combinations, too many to number")
        whole = [[math.comb(expert, j + 1) for expert in range(num_experts + 1)] for j in range(k)]
        self._in_two = self.bits > WORD_BITS
        mask = (1 << _LOW_BITS) - 1
        self.tables = np.array([[min(n, 1 << WORD_BITS) for n in row] for row in whole], np.int64)
        """What an expert in the j-th place adds to a number of one word, [k, experts + 1]."""
        self._low = self.tables
        if self._in_two:
            self._high = np.array([[min(n >> _LOW_BITS, 1 << WORD_BITS) for n in row] for row in whole], np.int64)
            self._low = np.array([[n & mask for n in row] for row in whole], np.int64)
        self._guesses = [_Guesses(row, least=j) for j, row in enumerate(whole)]

    def encode(self, experts: Ids) -> bytes:
        """Return the code of [rows, k]. Raises ValueError for a row that is no combination."""
        parts = [self._numbers(experts[start : start + BLOCK], start) for start in range(0, len(experts), BLOCK)]
        words = zip(*parts, strict=True) if parts else [()] * len(self.widths)
        return b"".join(
            pack_bits(np.concatenate(word) if word else np.empty(0, np.int64), width)
            for word, width in zip(words, self.widths, strict=True)
        )

    def decode(self, data: bytes | memoryview, num_rows: int) -> Ids:
        """Return [rows, k], ascending in each row. Raises ValueError for bytes that `encode` cannot have made."""
        if len(data) != self.size(num_rows):
            raise ValueError(f"{len(data)} bytes for {num_rows} rows, which take {self.size(num_rows)}")
        view = memoryview(data)
        words = []
        for width in self.widths:
            size = packed_size(num_rows, width)
            words.append(unpack_bits(view[:size], num_rows, width))
            view = view[size:]
        found = np.empty((num_rows, self.k), route_dtype(self.num_experts))
        for start in range(0, num_rows, BLOCK):
            block = [word[start : start + BLOCK] for word in words]
            self._check_numbers(block)
            columns = self._columns_of_two(*block) if self._in_two else self.columns(block[0], self.k)
            for j, column in enumerate(columns):
                found[start : start + BLOCK, j] = column
        return found

    def columns(self, numbers: NDArray[np.int64], num: int) -> list[NDArray[np.int64]]:
        """Return the combinations of `num` experts that have these numbers, which fit one word.

        From the last place down, it is the largest expert whose own number is not above what is left.
        """
        rest, found = numbers, []
        for j in reversed(range(1, num)):
            expert = self._guesses[j](rest.astype(np.float64))
            for _ in range(self._guesses[j].most_steps):
                expert += self.tables[j].take(expert + 1) <= rest
            rest = rest - self.tables[j].take(expert)
            found.append(expert)
        return [rest, *reversed(found)]

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of each word of a number."""
        return (_LOW_BITS, self.bits - _LOW_BITS) if self._in_two else (self.bits,)

    def size(self, num_rows: int) -> int:
        """Return the bytes that so many rows take."""
        return sum(packed_size(num_rows, width) for width in self.widths)

    def _numbers(self, experts: Ids, first: int) -> tuple[NDArray[np.int64], ...]:
        columns = sort_columns(experts)
        wrong = columns[-1] >= self.num_experts
        for lower, upper in pairwise(columns):
            wrong |= lower == upper
        if wrong.any():
            at = int(wrong.argmax())
            named = experts[at].tolist()
            raise ValueError(f"row {first + at}: {named} are not {self.k} of {self.num_experts} experts")
        low = self._low[0].take(columns[0])
        for column, table in zip(columns[1:], self._low[1:], strict=True):
            low += table.take(column)
        if not self._in_two:
            return (low,)
        high = self._high[0].take(columns[0])
        for column, table in zip(columns[1:], self._high[1:], strict=True):
            high += table.take(column)
        high += low >> _LOW_BITS
        return low & ((1 << _LOW_BITS) - 1), high

    def _check_numbers(self, words: list[NDArray[np.int64]]) -> None:
        if self._in_two:
            high, low = divmod(self.num, 1 << _LOW_BITS)
            beyond = (words[1] > high) | ((words[1] == high) & (words[0] >= low))
        else:
            beyond = words[0] >= self.num
        if beyond.any():
            raise ValueError(f"no {self.k} of {self.num_experts} experts have such a number: the bytes are damaged")

    def _columns_of_two(self, low: NDArray[np.int64], high: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the combinations of `k` experts that have these numbers of two words."""
        low, high, found = low.copy(), high.copy(), []
        for j in reversed(range(self.k)):
            expert = self._guesses[j](high.astype(np.float64) * float(1 << _LOW_BITS) + low)
            for _ in range(self._guesses[j].most_steps):
                next_low, next_high = self._low[j].take(expert + 1), self._high[j].take(expert + 1)
                expert += (next_high < high) | ((next_high == high) & (next_low <= low))
            low -= self._low[j].take(expert)
            high -= self._high[j].take(expert)
            borrows = low < 0
            low += borrows.astype(np.int64) << _LOW_BITS
            high -= borrows
            found.append(expert)
        return found[::-1]


class _Guesses:
    """A table that gives for a number, as a float, an expert that is not too large, and at most `most_steps` too small.

    The first bits of a float, exponent and some of the fraction, name a cell of numbers that are nearly equal. The
    smallest expert that can stand in this place is `least`.
    """

    def __init__(self, row: list[int], least: int) -> None:
        num_cells = ((max(row[-2], 1)).bit_length() + 1) << _CELL_BITS
        cells = np.arange(num_cells + 1, dtype=np.int64)
        starts = ((cells + _ONE) << (_FRACTION_BITS - _CELL_BITS)).view(np.float64)
        numbers = np.array([float(n) for n in row[:-1]])
        # A little less than where the cell begins: numbers above 2^53 have been rounded, maybe up.
        lowest = np.searchsorted(numbers, starts[:-1] - 1 - starts[:-1] * 2.0**-50, side="right") - 1
        highest = np.searchsorted(numbers, starts[1:] - 1 + starts[1:] * 2.0**-50, side="right") - 1
        self._table = np.maximum(lowest, least)
        self.most_steps = int((np.maximum(highest, least) - self._table).max())

    def __call__(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        numbers += 1.0
        cells = numbers.view(np.int64)
        cells >>= _FRACTION_BITS - _CELL_BITS
        cells -= _ONE
        return self._table.take(cells)


@functools.lru_cache(maxsize=32)
def combinations_of(num_experts: int, k: int) -> Combinations:
    return Combinations(num_experts, k)


def sort_columns(rows: Ids) -> list[Ids]:
    """Return the columns of [rows, k] with each row in ascending order."""
    columns: list[Ids] = list(np.ascontiguousarray(rows.T))
    for a, b in _sorting_network(rows.shape[1]):
        columns[a], columns[b] = np.minimum(columns[a], columns[b]), np.maximum(columns[a], columns[b])
    return columns


@functools.lru_cache(maxsize=32)
def _sorting_network(size: int) -> tuple[tuple[int, int], ...]:
    return tuple(_in_turn(size))


def _in_turn(size: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of places to put in order, one after the other (Batcher's merge of odds and evens)."""
    p = 1
    while p < size:
        q = p
        while q:
            for j in range(q % p, size - q, 2 * q):
                for i in range(min(q, size - j - q)):
                    if (i + j) // (2 * p) == (i + j + q) // (2 * p):
                        yield i + j, i + j + q
            q //= 2
        p *= 2
