"""A recording of routing as bytes: near its entropy, and refused when it is damaged.

    experts [tokens, layers, k]
       ├─ few combinations: the number of each row, a byte ── Huffman ─────────────────────┐
       ├─ layers with even routing: the number of each row, so many bits ──────────────────┤
       └─ layers with skewed routing: experts grouped by popularity                        ├─▶ form, body, check sum
             ├─ the class of each row, a byte ── Huffman ──────────────────────────────────┤
             └─ the number of each row within its class, so many bits ─────────────────────┘

    row ── renumbered, popular first ─▶ a class: 2 of group 0, 5 of group 1, 1 of group 2
                                      └▶ a number within the class: which 2, which 5, which 1

Which layers are skewed is estimated from some of the tokens. Rows of all layers are coded together, so that there are
many of each class. All rows of a class are about equally likely, so the number takes as many bits as the class has
rows, and the skew of the routing is in the classes. Those that hold too few rows to be worth a place of their own go to
the class `ANY`.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from practicum.replay.combinations import (
    BLOCK,
    WORD_BITS,
    Combinations,
    Ids,
    combinations_of,
    packed_size,
    slice_bits,
    sort_columns,
    unslice_bits,
)
from practicum.types import route_dtype

ANY = 0  # the class of rows that are numbered as if there were no groups
_MOST_KEYS = 1 << 16
_EVEN, _FEW, _GROUPED = range(3)  # forms of a body
_FEW_COMBINATIONS = 256  # those that a byte can number
_SAMPLE_TOKENS = 512
_LEAST_SAVING = 1.0  # bits a row, for classes to be worth their time
_LEAST_SYMBOLS = 2048  # with a Huffman code of their own
_MOST_CLASSES = 255
_LEAST_ROWS = 1024  # of a class of its own, in a recording of many
_LEAST_SHARE = 1 / 128  # of all rows, in a small one
_MANY_ROWS = 1 << 20  # fill the classes of four groups: 1 % smaller than with three
_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a row: `num` experts of one group, in the places from `place`."""

    start: int  # of the group
    size: int
    place: int
    num: int


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a row: some groups' parts of it, as one number below `limit`."""

    parts: tuple[Part, ...]
    limit: int

    @property
    def bits(self) -> int:
        return (self.limit - 1).bit_length()


@dataclass(frozen=True)
class Groups:
    """The groups of experts that are numbered by popularity, `sizes[0]` in the most popular one and so on."""

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
        """Return the key of each of [rows, k], in any order, and how many rows have each key.

        A key counts the experts that are in a group or a later one, for each group but the first.
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
        """Return how many experts of each group a key has. Raises ValueError for a key that no row has."""
        beyond = [self.k]
        for _ in self.sizes[1:]:
            key, num = divmod(key, self.k + 1)
            beyond.append(num)
        nums = [a - b for a, b in pairwise([*beyond, 0])]
        if key or not all(0 <= num <= size for num, size in zip(nums, self.sizes, strict=True)):
            raise ValueError(f"no rows have {nums} of groups of {self.sizes}")
        return nums

    def can_number(self, key: int) -> bool:
        """Return whether each group's part of such a row fits a word."""
        ways = [math.comb(size, num) for size, num in zip(self.sizes, self.nums(key), strict=True)]
        return max(ways) <= 1 << WORD_BITS

    def words(self, key: int) -> tuple[Word, ...]:
        """Return the words that number the rows of a key: as many groups to a word as fit."""
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
        """Write the numbers of sorted columns into `number`."""
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
        """Write the experts that have these numbers into the columns of `found` [k, rows]."""
        if (numbers >= word.limit).any():
            raise ValueError("no row has such a number: the bytes are damaged")
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
    """Return what an expert adds to a number as the j-th of the group that begins there, [j, experts]."""
    tables = np.zeros((k, num_experts), np.int64)
    for j, table in enumerate(tables):
        table[start:] = combinations_of(num_experts, k).tables[j, : num_experts - start]
    return tables


def most_groups(k: int) -> int:
    """Return the most groups for which a key fits 16 bits, and the number of a row's experts in a group a byte."""
    return 1 + int(math.log(_MOST_KEYS, k + 1) + 1e-9) if k < 256 else 1


def group_sizes(popularity: NDArray[np.float64], num_groups: int) -> tuple[int, ...]:
    """Return the sizes of the groups that are each most even within, of experts in descending popularity.

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


def encode_routes(experts: Ids, num_experts: int) -> bytes:
    """Return the code of [tokens, layers, k], ascending in each row.

    Raises ValueError for a row that is not k of the experts.
    """
    num_tokens, num_layers, k = experts.shape
    codec = combinations_of(num_experts, k)
    experts = _checked(experts, num_experts)
    form, body = _EVEN, b""
    if codec.num <= _FEW_COMBINATIONS:
        form, body = _FEW, _encode_few(experts, codec)
    else:
        skewed, popularity = _skewed_layers(experts, num_experts)
        if skewed.any():
            form, body = _GROUPED, _encode_grouped(experts, codec, skewed, popularity[skewed])
    if form == _EVEN or len(body) > codec.size(num_tokens * num_layers):
        form, body = _EVEN, codec.encode(experts.reshape(-1, k))
    data = bytes([form]) + body
    return data + zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")


def decode_routes(data: bytes | memoryview, num_tokens: int, num_layers: int, k: int, num_experts: int) -> Ids:
    """Return [tokens, layers, k]. Raises ValueError for bytes that `encode_routes` cannot have made of such."""
    view = memoryview(data)
    body = view[1:-_CHECK_BYTES]
    if len(view) <= _CHECK_BYTES or zlib.crc32(view[:-_CHECK_BYTES]) != int.from_bytes(view[-_CHECK_BYTES:], "little"):
        raise ValueError(f"{len(view)} bytes of routes are damaged: their check sum is not theirs")
    codec = combinations_of(num_experts, k)
    if view[0] == _FEW and codec.num <= _FEW_COMBINATIONS:
        return _decode_few(body, codec, num_tokens, num_layers)
    if view[0] == _GROUPED:
        return _decode_grouped(body, codec, num_tokens, num_layers)
    if view[0] == _EVEN:
        return codec.decode(body, num_tokens * num_layers).reshape(num_tokens, num_layers, k)
    raise ValueError(f"routes of form {view[0]} are not known for {k} of {num_experts} experts")


def _checked(experts: Ids, num_experts: int) -> Ids:
    """Return experts that have been checked, in the type of routes and in one piece."""
    k = experts.shape[-1]
    flat = np.ascontiguousarray(experts).reshape(-1)
    for start in range(0, len(flat), k * BLOCK):
        part = flat[start : start + k * BLOCK]
        right = np.empty(len(part), np.bool_)
        np.less(part[:-1], part[1:], out=right[:-1])
        right[k - 1 :: k] = part[k - 1 :: k] < num_experts
        if flat.dtype.kind != "u":
            right[::k] &= part[::k] >= 0
        if not right.all():
            row = (start + int(right.argmin())) // k
            token, layer = divmod(row, experts.shape[1])
            named = flat[row * k : row * k + k].tolist()
            raise ValueError(f"token {token}, layer {layer}: {named} are not {k} of {num_experts} experts, ascending")
    return flat.astype(route_dtype(num_experts), copy=False).reshape(experts.shape)


# Few combinations: the number of a row is a byte


def _encode_few(experts: Ids, codec: Combinations) -> bytes:
    num_tokens, num_layers, k = experts.shape
    numbers = np.zeros(num_tokens * num_layers, np.uint8)
    # What passes a byte is never added: no expert can be there.
    tables = [table.astype(np.uint8) for table in codec.tables]
    for start in range(0, len(numbers), BLOCK):
        for column, table in zip(experts.reshape(-1, k)[start : start + BLOCK].T, tables, strict=True):
            numbers[start : start + BLOCK] += table.take(column)
    return _huffman(np.ascontiguousarray(numbers.reshape(num_tokens, num_layers).T))


def _decode_few(body: memoryview, codec: Combinations, num_tokens: int, num_layers: int) -> Ids:
    numbers = _unhuffman(body, num_layers * num_tokens).reshape(num_layers, num_tokens)
    if numbers.size and numbers.max() >= codec.num:
        raise ValueError("no row has such a number: the bytes are damaged")
    every = np.stack(codec.columns(np.arange(codec.num), codec.k), axis=1).astype(route_dtype(codec.num_experts))
    return every.take(np.ascontiguousarray(numbers.T), axis=0)


# Skewed layers: classes, and numbers within them


@dataclass(frozen=True, slots=True)
class _Head:
    """The groups and classes that the rows of skewed layers are coded with."""

    skewed: NDArray[np.bool_]  # [layers]
    groups: Groups
    keys: tuple[int, ...]  # of the classes from 1
    group_of: NDArray[np.uint8]  # [skewed layers, experts]

    def to_bytes(self) -> bytes:
        sizes = np.array(self.groups.sizes, "<u4")
        keys = np.array(self.keys, "<u2")
        lengths = struct.pack("<BB", len(sizes), len(keys))
        return b"".join([lengths, self.skewed.tobytes(), sizes.tobytes(), keys.tobytes(), self.group_of.tobytes()])

    @classmethod
    def from_bytes(cls, data: bytes, num_layers: int, num_experts: int, k: int) -> _Head:
        reader = _Reader(memoryview(data))
        num_groups, num_keys = reader.take(2)
        flags = np.frombuffer(reader.take(num_layers), np.uint8)
        sizes = np.frombuffer(reader.take(4 * num_groups), "<u4").tolist()
        keys = np.frombuffer(reader.take(2 * num_keys), "<u2").tolist()
        group_of = np.frombuffer(reader.rest(), np.uint8)
        if (flags > 1).any() or group_of.size != flags.sum() * num_experts:
            raise ValueError("the groups of experts are damaged")
        return cls(
            flags.astype(np.bool_), Groups(num_experts, k, tuple(sizes)), tuple(keys), group_of.reshape(-1, num_experts)
        )

    def popular_first(self) -> NDArray[np.int64]:
        """Return the experts by group, [skewed layers, experts]."""
        found = np.argsort(self.group_of, axis=1, kind="stable")
        for groups in self.group_of:
            if tuple(np.bincount(groups, minlength=len(self.groups.sizes))) != self.groups.sizes:
                raise ValueError("the groups of a layer are not of the sizes of all")
        return found


def _skewed_layers(experts: Ids, num_experts: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which layers are worth their groups, and how often a row has each expert, [layers, experts]."""
    num_tokens, num_layers, k = experts.shape
    sample = experts[:: max(1, num_tokens // _SAMPLE_TOKENS)]
    places = sample + (np.arange(num_layers, dtype=np.int64) * num_experts)[:, None]
    counts = np.bincount(places.reshape(-1), minlength=num_layers * num_experts).reshape(num_layers, num_experts)
    popularity = counts / max(len(sample), 1)
    # Bits a row that experts of their own popularity save over even ones, less what chance alone would show.
    saving = (popularity * np.log2(np.maximum(popularity, 1e-9) * num_experts / k)).sum(axis=1)
    saving -= num_experts / (2 * math.log(2) * max(len(sample), 1))
    cost = 3 * num_experts / max(num_tokens, 1)  # of naming the group of each expert
    return saving > _LEAST_SAVING + cost, popularity


def _encode_grouped(
    experts: Ids, codec: Combinations, skewed: NDArray[np.bool_], popularity: NDArray[np.float64]
) -> bytes:
    k = codec.k
    groups, group_of = _choose_groups(popularity, k, len(popularity) * len(experts))
    number_of = np.argsort(np.argsort(group_of, axis=1, kind="stable"), axis=1).astype(experts.dtype)
    by_layer = np.empty((len(number_of), len(experts), k), experts.dtype)
    for i, layer in enumerate(np.flatnonzero(skewed)):
        _whole(by_layer)[i] = _whole(experts)[:, layer]
        by_layer[i] = _renamed(by_layer[i], number_of[i])
    rows = by_layer.reshape(-1, k)

    row_keys, counts = groups.keys(rows)
    keys, class_of = _choose_classes(groups, counts)
    classes = np.concatenate([class_of.take(row_keys[at : at + BLOCK]) for at in range(0, len(rows), BLOCK)])
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=len(keys) + 1)).tolist()
    numbers = []
    for key, start, end in zip(keys, ends[:-1], ends[1:], strict=True):
        numbers.extend(_encode_class(groups, groups.words(key), rows.take(order[start:end], axis=0)))
    head = zlib.compress(_Head(skewed, groups, keys, group_of).to_bytes(), level=1)
    named = _huffman(classes.reshape(len(number_of), -1))
    return b"".join(
        [
            struct.pack("<II", len(head), len(named)),
            head,
            named,
            *numbers,
            codec.encode(rows.take(order[: ends[ANY]], axis=0)),
            codec.encode(experts[:, ~skewed].reshape(-1, k)),
        ]
    )


def _choose_groups(popularity: NDArray[np.float64], k: int, num_rows: int) -> tuple[Groups, NDArray[np.uint8]]:
    """Return groups of the same sizes for all layers, and the group of each expert, [layers, experts]."""
    wanted = min(4 if num_rows >= _MANY_ROWS else 3, most_groups(k))
    sizes = group_sizes(np.sort(popularity, axis=1)[:, ::-1].mean(axis=0), wanted)
    by_rank = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    group_of = np.empty(popularity.shape, np.uint8)
    np.put_along_axis(group_of, np.argsort(-popularity, axis=1, kind="stable"), by_rank[None], axis=1)
    return Groups(popularity.shape[1], k, sizes), group_of


def _choose_classes(groups: Groups, counts: NDArray[np.int64]) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
    """Return the keys that get a class of their own, and the class of every key."""
    least = min(_LEAST_ROWS, _LEAST_SHARE * counts.sum())
    often = [key for key in np.argsort(-counts, kind="stable").tolist() if counts[key] >= max(least, 1)]
    keys = tuple(key for key in often if groups.can_number(key))[:_MOST_CLASSES]
    class_of = np.full(len(counts), ANY, np.uint8)
    class_of[list(keys)] = np.arange(1, len(keys) + 1)
    return keys, class_of


def _encode_class(groups: Groups, words: tuple[Word, ...], rows: Ids) -> list[bytes]:
    numbers = np.empty((len(words), len(rows)), np.int64)
    for start in range(0, len(rows), BLOCK):
        columns = sort_columns(rows[start : start + BLOCK])
        for number, word in zip(numbers, words, strict=True):
            groups.number(word, columns, number[start : start + BLOCK])
    return [slice_bits(number, word.bits) for number, word in zip(numbers, words, strict=True)]


def _decode_grouped(body: memoryview, codec: Combinations, num_tokens: int, num_layers: int) -> Ids:
    k, num_experts = codec.k, codec.num_experts
    reader = _Reader(body)
    head_size, named_size = struct.unpack("<II", reader.take(8))
    most = 2 + num_layers + 4 * 255 + 2 * 255 + num_layers * num_experts  # bytes of a `_Head`
    head = _Head.from_bytes(_inflate(reader.take(head_size), most, zlib.MAX_WBITS), num_layers, num_experts, k)
    popular_first = head.popular_first().astype(route_dtype(num_experts))
    num_skewed = len(popular_first)
    classes = _unhuffman(reader.take(named_size), num_skewed * num_tokens)
    counts = np.bincount(classes, minlength=len(head.keys) + 1).tolist()
    if len(counts) > len(head.keys) + 1:
        raise ValueError("a row has a class that is not known: the bytes are damaged")
    rows: Ids = np.empty((len(classes), k), route_dtype(num_experts))
    at = counts[ANY]
    for key, count in zip(head.keys, counts[1:], strict=True):
        _decode_class(head.groups, head.groups.words(key), reader, rows[at : at + count])
        at += count
    rows[: counts[ANY]] = codec.decode(reader.take(codec.size(counts[ANY])), counts[ANY])
    num_even = (num_layers - num_skewed) * num_tokens
    even = codec.decode(reader.rest(), num_even)

    by_layer = np.empty((num_skewed, num_tokens, k), rows.dtype)
    np.put(_whole(by_layer), np.argsort(classes, kind="stable"), _whole(rows))
    found: Ids = np.empty((num_tokens, num_layers, k), rows.dtype)
    found[:, ~head.skewed] = even.reshape(num_tokens, -1, k)
    for i, layer in enumerate(np.flatnonzero(head.skewed)):
        for start in range(0, num_tokens, BLOCK):
            columns = sort_columns(_renamed(by_layer[i, start : start + BLOCK], popular_first[i]))
            _whole(found)[start : start + BLOCK, layer] = _whole(np.stack(columns, axis=1))
    return found


def _whole(rows: Ids) -> NDArray[np.void]:
    """Return [..., k] with each row as one item, which is moved at once and not expert by expert."""
    return rows.view(f"V{rows.shape[-1] * rows.itemsize}")[..., 0]


def _renamed(rows: Ids, names: Ids) -> Ids:
    if names.dtype == np.uint8:  # twice as quick as `take`, which makes indices of 8 bytes first
        table = names.tobytes().ljust(256, b"\0")
        return np.frombuffer(rows.tobytes().translate(table), np.uint8).reshape(rows.shape)
    return names.take(rows)


def _decode_class(groups: Groups, words: tuple[Word, ...], reader: _Reader, found: Ids) -> None:
    numbers = [unslice_bits(reader.take(packed_size(len(found), word.bits)), len(found), word.bits) for word in words]
    for start in range(0, len(found), BLOCK):
        block = found[start : start + BLOCK]
        columns = np.empty((groups.k, len(block)), found.dtype)
        for number, word in zip(numbers, words, strict=True):
            groups.columns(word, number[start : start + BLOCK], columns)
        block[:] = columns.T


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, size: int) -> memoryview:
        if size > len(self._data):
            raise ValueError(f"{size} more bytes should follow, there are {len(self._data)}")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def rest(self) -> memoryview:
        return self.take(len(self._data))


def _huffman(symbols: NDArray[np.uint8]) -> bytes:
    """Return the Huffman code of [layers, rows].

    Layers have codes of their own if there are enough rows to pay for their tables.
    """
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    together = max(1, _LEAST_SYMBOLS // max(symbols.shape[1], 1))
    found = []
    for first in range(0, len(symbols), together):
        found += [packer.compress(symbols[first : first + together].data), packer.flush(zlib.Z_BLOCK)]
    return b"".join([*found, packer.flush()])


def _unhuffman(data: memoryview, num: int) -> NDArray[np.uint8]:
    if num > 8 * len(data):  # a symbol has a bit at least
        raise ValueError(f"{len(data)} bytes cannot name {num} rows")
    symbols = np.frombuffer(_inflate(data, num, -zlib.MAX_WBITS), np.uint8)
    if len(symbols) != num:
        raise ValueError(f"{len(symbols)} rows are named, not {num}")
    return symbols


def _inflate(data: memoryview, most: int, window: int) -> bytes:
    unpacker = zlib.decompressobj(window)
    try:
        found = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"the bytes are damaged: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the bytes are damaged: they end too early or too late")
    return found
