"""Experts in groups of like popularity, and rows in classes: how many of each group.

    row ── renumbered, popular first ─▶ a class: 2 of group 0, 5 of group 1, 1 of group 2
                                      └▶ a number within the class: which 2, which 5, which 1

All rows of a class are about equally likely, so the number takes as many bits as the class has rows, and what routing
has of skew is in the classes. Those that hold too few rows to be worth a place of their own go to the class `ANY`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from practicum.replay.combinations import BLOCK, WORD_BITS, Ids, combinations_of

ANY = 0  # the class of rows that are numbered as if there were no groups
_MOST_KEYS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """So many experts of one group, in the places from `place`."""

    start: int  # of the group
    size: int
    place: int
    num: int


@dataclass(frozen=True, slots=True)
class Word:
    """Some groups' parts of a row, as one number below `limit`."""

    parts: tuple[Part, ...]
    limit: int

    @property
    def bits(self) -> int:
        return (self.limit - 1).bit_length()


@dataclass(frozen=True)
class Groups:
    """Experts numbered by popularity, `sizes[0]` in the most popular group and so on."""

    num_experts: int
    k: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.sizes) != self.num_experts or min(self.sizes) < 1 or len(self.sizes) > most_groups(self.k):
            raise ValueError(f"groups of {self.sizes} for {self.k} of {self.num_experts} experts")

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def num_keys(self) -> int:
        return int((self.k + 1) ** (len(self.sizes) - 1))

    def keys(self, rows: Ids) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Of [rows, k] in any order: how many are in a group or a later one, for each group but the first.

        And how many rows have each key.
        """
        keys = np.empty(len(rows), np.uint16)
        counts = np.zeros(self.num_keys, np.int64)
        for start in range(0, len(rows), BLOCK):
            columns = np.ascontiguousarray(rows[start : start + BLOCK].T)
            key = np.zeros(columns.shape[1], np.uint16)
            for least in reversed(self.starts[1:]):
                key *= np.uint16(self.k + 1)
                key += np.add.reduce((columns >= least).view(np.uint8), axis=0, dtype=np.uint8)
            keys[start : start + BLOCK] = key
            counts += np.bincount(key, minlength=self.num_keys)
        return keys, counts

    def nums(self, key: int) -> list[int]:
        """Of each group. Raises ValueError for a key that no row has."""
        beyond = [self.k]
        for _ in self.sizes[1:]:
            key, num = divmod(key, self.k + 1)
            beyond.append(num)
        nums = [a - b for a, b in pairwise([*beyond, 0])]
        if key or not all(0 <= num <= size for num, size in zip(nums, self.sizes, strict=True)):
            raise ValueError(f"no rows have {nums} of groups of {self.sizes}")
        return nums

    def can_number(self, key: int) -> bool:
        """Whether each group's part of such a row fits a word."""
        ways = [math.comb(size, num) for size, num in zip(self.sizes, self.nums(key), strict=True)]
        return max(ways) <= 1 << WORD_BITS

    def words(self, key: int) -> tuple[Word, ...]:
        """How rows of a key are numbered: as many groups to a word as fit."""
        if not self.can_number(key):
            raise ValueError(f"rows with {self.nums(key)} of groups of {self.sizes} are too many to number")
        words: list[Word] = []
        place = 0
        for start, size, num in zip(self.starts, self.sizes, self.nums(key), strict=True):
            part, ways = Part(start, size, place, num), math.comb(size, num)
            if num and words and words[-1].limit * ways <= 1 << WORD_BITS:
                words[-1] = Word((*words[-1].parts, part), words[-1].limit * ways)
            elif num:
                words.append(Word((part,), ways))
            place += num
        return tuple(words)

    def number(self, word: Word, columns: list[Ids], number: NDArray[np.int64]) -> None:
        """Into `number`, of sorted columns."""
        number[:] = 0
        radix = 1
        for part in word.parts:
            tables = _tables(self.num_experts, self.k, part.start)
            within = columns[part.place].astype(np.int64)
            within -= part.start
            for j in range(1, part.num):
                within += tables[j].take(columns[part.place + j])
            number += within * radix if radix > 1 else within
            radix *= math.comb(part.size, part.num)

    def columns(self, word: Word, numbers: NDArray[np.int64], found: Ids) -> None:
        """Into the columns of `found` [k, rows]."""
        if (numbers >= word.limit).any():
            raise ValueError("no row has such a number: the bytes are spoilt")
        numbering = combinations_of(self.num_experts, self.k)
        for i, part in enumerate(word.parts):
            rest = numbers
            if i < len(word.parts) - 1:
                radix = math.comb(part.size, part.num)
                numbers = rest // radix
                rest = rest - numbers * radix
            for j, column in enumerate(numbering.columns(rest, part.num)):
                found[part.place + j] = column
            found[part.place : part.place + part.num] += found.dtype.type(part.start)


@functools.lru_cache(maxsize=64)
def _tables(num_experts: int, k: int, start: int) -> NDArray[np.int64]:
    """What an expert adds to a number as the j-th of the group that begins there, [j, experts]."""
    tables = np.zeros((k, num_experts), np.int64)
    for j, table in enumerate(tables):
        table[start:] = combinations_of(num_experts, k).table(j)[: num_experts - start]
    return tables


def most_groups(k: int) -> int:
    """For which a key fits 16 bits, and the number of a row's experts in a group fits a byte."""
    return 1 + int(math.log(_MOST_KEYS, k + 1) + 1e-9) if k < 256 else 1


def group_sizes(popularity: NDArray[np.float64], num_groups: int) -> tuple[int, ...]:
    """Of experts in descending popularity: the groups that are each most even within.

    A group of n experts that get a share p costs p * log2(n / p) bits a row; the least total is found group by group.
    """
    num = len(popularity)
    ends = np.unique(np.round(np.geomspace(1, num, 40)).astype(np.int64))
    bounds = np.concatenate([[0], ends])
    share = np.concatenate([[0.0], np.cumsum(popularity)])[bounds]
    sizes = bounds[None, :] - bounds[:, None]
    shares = np.maximum(share[None, :] - share[:, None], 1e-9)
    cost = np.where(sizes > 0, shares * np.log2(np.maximum(sizes, 1) / shares), np.inf)
    least = [cost[0]]
    came: list[NDArray[np.int64]] = []
    for _ in range(num_groups - 1):
        total = least[-1][:, None] + cost
        came.append(total.argmin(axis=0))
        least.append(total.min(axis=0))
    best = int(np.argmin([costs[-1] for costs in least]))
    at, found = len(bounds) - 1, [num]
    for g in reversed(range(best)):
        at = int(came[g][at])
        found.append(int(bounds[at]))
    found.append(0)
    return tuple(a - b for a, b in pairwise(found))[::-1]
