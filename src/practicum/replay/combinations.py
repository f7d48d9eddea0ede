"""Which k of E experts, in hardly more bits than there are possibilities.

    experts [rows, k] ── sorted ─▶ the number of the combination, 0 ... C(E, k) - 1 ── so many bits each ─▶ bytes

A sorted combination a < b < c ... has the number C(a, 1) + C(b, 2) + C(c, 3) + ..., and every number is that of one
combination. The order in which a router names its experts is not kept: their weights are computed anew in replay.

Numbers of more than 62 bits go in two words. Everything works on whole columns, in blocks that stay in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.replay.bits import pack_bits, packed_size, unpack_bits
from practicum.types import route_dtype

Ids = NDArray[np.unsignedinteger[Any]]
Mask = NDArray[np.bool_]

BLOCK = 1 << 13  # rows: their columns stay in the cache
WORD_BITS = 62
_LOW_BITS = 48  # of a number in two words
_MOST_BITS = WORD_BITS + _LOW_BITS
_CELL_BITS = 8  # of the fraction of a float that find a place in the table of guesses
_FRACTION_BITS = 52
_ONE = 1023 << _CELL_BITS  # the cell of 1.0


class Combinations:
    """Those of `k` among `num_experts`. Made once and kept: see `combinations_of`."""

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
        self._one_word = np.array([[min(n, 1 << WORD_BITS) for n in row] for row in whole], np.int64)
        self._low = self._one_word
        if self._in_two:
            self._high = np.array([[min(n >> _LOW_BITS, 1 << WORD_BITS) for n in row] for row in whole], np.int64)
            self._low = np.array([[n & mask for n in row] for row in whole], np.int64)
        self._guesses = [_Guesses(row, least=j) for j, row in enumerate(whole)]

    def encode(self, experts: Ids) -> bytes:
        """Of [rows, k]. Raises ValueError for a row that is no combination."""
        parts = [self._numbers(experts[start : start + BLOCK], start) for start in range(0, len(experts), BLOCK)]
        words = zip(*parts, strict=True) if parts else [()] * len(self.widths)
        return b"".join(
            pack_bits(np.concatenate(word) if word else np.empty(0, np.int64), width)
            for word, width in zip(words, self.widths, strict=True)
        )

    def decode(self, data: bytes | memoryview, num_rows: int) -> Ids:
        """[rows, k], each row in ascending order. Raises ValueError for bytes that `encode` cannot have made."""
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
            self._experts([word[start : start + BLOCK] for word in words], found[start : start + BLOCK])
        return found

    def table(self, j: int) -> NDArray[np.int64]:
        """What an expert in the j-th place adds to a number of one word."""
        table: NDArray[np.int64] = self._one_word[j]
        return table

    def columns(self, numbers: NDArray[np.int64], num: int) -> list[NDArray[np.int64]]:
        """The combinations of `num` experts that have these numbers, which fit one word."""
        rest, found = numbers, []
        for j in reversed(range(1, num)):
            expert = self._guesses[j](rest.astype(np.float64))
            for _ in range(self._guesses[j].most_steps):
                expert += self._one_word[j].take(expert + 1) <= rest
            rest = rest - self._one_word[j].take(expert)
            found.append(expert)
        return [rest, *reversed(found)]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each word of a number."""
        return (_LOW_BITS, self.bits - _LOW_BITS) if self._in_two else (self.bits,)

    def size(self, num_rows: int) -> int:
        """Bytes of so many rows."""
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

    def _experts(self, words: list[NDArray[np.int64]], found: Ids) -> None:
        """From the last expert down: the largest one whose own number is not above what is left."""
        rest = [word.copy() for word in words]
        if self._are_beyond(rest).any():
            raise ValueError(f"no {self.k} of {self.num_experts} experts have such a number: the bytes are spoilt")
        for j in reversed(range(self.k)):
            expert = self._guesses[j](self._as_float(rest))
            for _ in range(self._guesses[j].most_steps):
                expert += self._reaches(j, expert + 1, rest)
            self._subtract(j, expert, rest)
            found[:, j] = expert

    def _are_beyond(self, numbers: list[NDArray[np.int64]]) -> Mask:
        if not self._in_two:
            return numbers[0] >= self.num
        high, low = divmod(self.num, 1 << _LOW_BITS)
        beyond: Mask = (numbers[1] > high) | ((numbers[1] == high) & (numbers[0] >= low))
        return beyond

    def _as_float(self, rest: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        if not self._in_two:
            return rest[0].astype(np.float64)
        return rest[1].astype(np.float64) * float(1 << _LOW_BITS) + rest[0]

    def _reaches(self, j: int, expert: NDArray[np.int64], rest: list[NDArray[np.int64]]) -> Mask:
        """Whether what is left is at least the number of an expert there."""
        reaches: Mask = self._low[j].take(expert) <= rest[0]
        if self._in_two:
            high = self._high[j].take(expert)
            reaches = (high < rest[1]) | ((high == rest[1]) & reaches)
        return reaches

    def _subtract(self, j: int, expert: NDArray[np.int64], rest: list[NDArray[np.int64]]) -> None:
        rest[0] -= self._low[j].take(expert)
        if self._in_two:
            rest[1] -= self._high[j].take(expert)
            borrows = rest[0] < 0
            rest[0] += borrows.astype(np.int64) << _LOW_BITS
            rest[1] -= borrows


class _Guesses:
    """For a number as a float: an expert that is not too large, and at most `most_steps` too small.

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
    """The columns of [rows, k] with each row in ascending order."""
    columns: list[Ids] = list(np.ascontiguousarray(rows.T))
    for a, b in _sorting_network(rows.shape[1]):
        columns[a], columns[b] = np.minimum(columns[a], columns[b]), np.maximum(columns[a], columns[b])
    return columns


@functools.lru_cache(maxsize=32)
def _sorting_network(size: int) -> tuple[tuple[int, int], ...]:
    return tuple(_in_turn(size))


def _in_turn(size: int) -> Iterator[tuple[int, int]]:
    """Which places to put in order, one pair after the other (Batcher's merge of odds and evens)."""
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
