"""A recording as bytes. All numbers are little-endian; docs/recordings.md has the tables.

    file     header, chunk, chunk, ...
    header   magic, version, length | JSON | checksum
    chunk    head (magic, its own place in the file, lengths, checksums) | index (JSON) | sections, end to end

A chunk is added with one write, so that a kill leaves whole chunks and at most the beginning of one. Head and index say
which samples it holds and where its sections are, with a checksum each: a file is opened by reading them alone. No
length is believed before the checksum over it has been found right.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from practicum.errors import ReplayError
from practicum.types import route_dtype

MAGIC = b"PRACROUT"
VERSION = 1
MOST_HEADER_BYTES = 1 << 20
_FILE_HEAD = struct.Struct("<8sII")  # magic, version, bytes of JSON
_CHECKSUM = struct.Struct("<I")

CHUNK_MAGIC = b"\xf1chunk\r\n"
_CHUNK_HEAD = struct.Struct("<8sQQQIII")  # see ChunkHead
CHUNK_HEAD_BYTES = _CHUNK_HEAD.size + _CHECKSUM.size

PLAIN, DEFLATED, CODED_ROUTES = 0, 1, 2  # how a section is coded


class Damaged(ValueError):
    """Bytes that no writer can have written. `Recording`, which knows file and place, makes a ReplayError of it."""


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The facts that a recording was made with. Two models whose headers agree can use each other's routes."""

    model: str  # a fingerprint, such as qwen3_moe-1f2e3d4c
    layers: tuple[int, ...]  # that route, by their indices in the whole model
    num_experts: int  # of each
    k: int
    tokenizer: str  # a fingerprint
    rank: int = 0
    num_ranks: int = 1
    made: Mapping[str, str] = field(default_factory=dict)  # facts for people, such as versions

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)} are none, or not in ascending order")
        if not 1 <= self.k <= self.num_experts <= 1 << 16:
            raise ValueError(f"{self.k} of {self.num_experts} experts")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} of {self.num_ranks}")

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return route_dtype(self.num_experts)

    def differences(self, other: RecordingHeader, *, with_ranks: bool = False) -> list[str]:
        """Return why routes recorded with this one cannot be used where the other holds: both sides of each reason."""
        named = [
            ("model", self.model, other.model),
            ("tokenizer", self.tokenizer, other.tokenizer),
            ("number of layers that route", len(self.layers), len(other.layers)),
            ("number of experts", self.num_experts, other.num_experts),
            ("experts per token", self.k, other.k),
        ]
        found = [f"{name} {own}, not {theirs}" for name, own, theirs in named if own != theirs]
        if len(self.layers) == len(other.layers) and self.layers != other.layers:
            found.append(f"layers {list(self.layers)}, not {list(other.layers)}")
        if with_ranks and (self.rank, self.num_ranks) != (other.rank, other.num_ranks):
            found.append(f"rank {self.rank} of {self.num_ranks}, not {other.rank} of {other.num_ranks}")
        return found


def header_bytes(header: RecordingHeader) -> bytes:
    tree = asdict(header) | {"made": dict(header.made), "dtype": np.dtype(header.dtype).name}
    text = json.dumps(tree).encode()
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes: say less in `made`")
    head = _FILE_HEAD.pack(MAGIC, VERSION, len(text)) + text
    return head + _CHECKSUM.pack(zlib.crc32(head))


def read_header(start: bytes) -> tuple[RecordingHeader, int] | None:
    """Return the header and its size, from the first bytes of a file; None if they end before it does."""
    if not MAGIC.startswith(start[: len(MAGIC)]):
        raise Damaged("it does not begin as a recording does")
    if len(start) < _FILE_HEAD.size:
        return None
    _, version, length = _FILE_HEAD.unpack_from(start)
    size = _FILE_HEAD.size + length + _CHECKSUM.size
    if length > MOST_HEADER_BYTES:
        raise Damaged("its header is damaged (an impossible length)")
    if len(start) < size:
        return None
    head = start[: size - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(start, len(head)) != (zlib.crc32(head),):
        raise Damaged("its header is damaged (wrong checksum)")
    if version != VERSION:
        raise Damaged(f"it is of version {version} of the format, which this version of Practicum cannot read")
    try:
        tree = json.loads(head[_FILE_HEAD.size :])
        del tree["dtype"]  # follows from the number of experts
        return RecordingHeader(**tree | {"layers": tuple(tree["layers"])}), size
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"its header makes no sense ({error})") from error


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """The first bytes of a chunk."""

    offset: int  # its own place in the file: what merely looks like a chunk, inside of one, does not know it
    written_ns: int  # when, since 1970: of two records of one sample in files of two ranks the later one counts
    payload_bytes: int  # of all sections
    number: int  # of the chunk in this file
    index_bytes: int
    index_checksum: int

    @property
    def size(self) -> int:
        """The size of the whole chunk."""
        return CHUNK_HEAD_BYTES + self.index_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """A sample as the index describes it."""

    id: str
    step: int
    place: int
    num_prompt: int  # tokens
    num_answer: int
    step_size: int = 0  # samples of its step, over all ranks; 0 where that is not known

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_answer


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the payload."""

    name: str
    coding: int
    start: int  # in the payload
    size: int
    raw_size: int  # before it was coded
    checksum: int  # of the coded bytes


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk without its payload."""

    head: ChunkHead
    samples: tuple[SampleEntry, ...]
    sections: Mapping[str, Section]
    anew_from: int | None = None  # what the file holds before it of this step and later ones does not count any more

    @property
    def payload_offset(self) -> int:
        return self.head.offset + CHUNK_HEAD_BYTES + self.head.index_bytes

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.samples)


def section_bytes(raw: bytes, compress: bool) -> tuple[int, int, bytes]:
    """Return the coding, the size before and the coded bytes: compressed where asked for and where that is shorter."""
    if compress and len(packed := zlib.compress(raw, 1)) < len(raw):
        return DEFLATED, len(raw), packed
    return PLAIN, len(raw), raw


def section_content(section: Section, coded: bytes) -> bytes:
    """Return what was given to `section_bytes`; never more bytes than the section says it has."""
    if section.coding == PLAIN:
        raw = coded
    elif section.coding == DEFLATED:
        unpacking = zlib.decompressobj()
        try:
            raw = unpacking.decompress(coded, section.raw_size) if section.raw_size else b""
        except zlib.error as error:
            raise Damaged(str(error)) from error
    else:
        raise Damaged(f"coding {section.coding} is unknown")
    if len(raw) != section.raw_size:
        raise Damaged(f"{len(raw)} bytes instead of {section.raw_size}")
    return raw


def chunk_bytes(
    offset: int,
    written_ns: int,
    number: int,
    samples: Sequence[SampleEntry],
    sections: Sequence[tuple[str, int, int, bytes]],  # name, coding, raw size, coded bytes
    anew_from: int | None = None,
) -> bytes:
    table = [[name, coding, len(data), raw_size, zlib.crc32(data)] for name, coding, raw_size, data in sections]
    entries = [
        [one.id, int(one.step), int(one.place), one.num_prompt, one.num_answer, int(one.step_size)] for one in samples
    ]
    tree = {"samples": entries, "sections": table} | ({} if anew_from is None else {"anew_from": anew_from})
    index = json.dumps(tree, separators=(",", ":")).encode()
    payload = b"".join(data for *_, data in sections)
    head = _CHUNK_HEAD.pack(CHUNK_MAGIC, offset, written_ns, len(payload), number, len(index), zlib.crc32(index))
    return b"".join([head, _CHECKSUM.pack(zlib.crc32(head)), index, payload])


def read_chunk_head(data: bytes, offset: int) -> ChunkHead:
    """Return the head in the bytes at that place of a file. Raises `Damaged` if no chunk begins there."""
    if len(data) != CHUNK_HEAD_BYTES or not data.startswith(CHUNK_MAGIC):
        raise Damaged("no chunk begins here")
    (checksum,) = _CHECKSUM.unpack_from(data, _CHUNK_HEAD.size)
    if checksum != zlib.crc32(data[: _CHUNK_HEAD.size]):
        raise Damaged("the head of the chunk is damaged (wrong checksum)")
    _, own, written_ns, payload_bytes, number, index_bytes, index_checksum = _CHUNK_HEAD.unpack_from(data)
    if own != offset:
        raise Damaged(f"the chunk here belongs at byte {own}")
    return ChunkHead(own, written_ns, payload_bytes, number, index_bytes, index_checksum)


def read_chunk(head: ChunkHead, index: bytes) -> Chunk:
    if len(index) != head.index_bytes or zlib.crc32(index) != head.index_checksum:
        raise Damaged("its index is damaged (wrong checksum)")
    try:
        tree = json.loads(index)
        samples = tuple(SampleEntry(*entry) for entry in tree["samples"])
        sections: dict[str, Section] = {}
        start = 0
        for name, coding, size, raw_size, checksum in tree["sections"]:
            sections[name] = Section(name, coding, start, size, raw_size, checksum)
            start += size
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"its index makes no sense ({error})") from error
    lengths = [n for entry in samples for n in (entry.num_prompt, entry.num_answer)]
    lengths += [n for section in sections.values() for n in (section.size, section.raw_size)]
    if not all(type(n) is int and n >= 0 for n in lengths) or start != head.payload_bytes:
        raise Damaged("its index makes no sense (impossible lengths)")
    return Chunk(head, samples, sections, tree.get("anew_from"))


_SEARCHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LostBytes:
    """A part of a file in which nothing can be read."""

    offset: int
    size: int
    reason: str


class ChunkFile:
    """The chunks of a file. Raises `OSError` if it cannot be opened, `ReplayError` if it is no recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chunks: list[Chunk] = []
        self.lost: list[LostBytes] = []
        self.unfinished: LostBytes | None = None  # after `end`
        self.next_number = 0
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.header, self.end = self._read_header()  # and `end` then moves on, past the last whole chunk
            self.refresh()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def refresh(self) -> list[Chunk]:
        """Return the chunks that have been added since the last time."""
        new: list[Chunk] = []
        file_size = self._size()
        self.unfinished = None
        while (at := self.end) < file_size:
            data = self._read(at, CHUNK_HEAD_BYTES)
            if len(data) < CHUNK_HEAD_BYTES and CHUNK_MAGIC.startswith(data[: len(CHUNK_MAGIC)]):
                self.unfinished = LostBytes(at, file_size - at, "")
                break
            try:
                head = read_chunk_head(data, at)
            except Damaged as error:
                following = self._next_head(at + 1, file_size)
                if following is None:  # maybe there will be one later: looked for again the next time
                    self.unfinished = LostBytes(at, file_size - at, str(error))
                    break
                self.lost.append(LostBytes(at, following - at, str(error)))
                self.end = following
                continue
            if at + head.size > file_size:
                self.unfinished = LostBytes(at, file_size - at, "")
                break
            try:
                new.append(read_chunk(head, self._read(at + CHUNK_HEAD_BYTES, head.index_bytes)))
            except Damaged as error:
                self.lost.append(LostBytes(at, head.size, f"chunk {head.number}: {error}"))
            self.end += head.size
            self.next_number = head.number + 1
        self.chunks += new
        return new

    def section(self, chunk: Chunk, name: str) -> bytes:
        """Return the coded bytes of a section. Raises `Damaged` if their checksum is wrong."""
        section = chunk.sections.get(name)
        if section is None:
            raise Damaged(f"there is no section {name!r}")
        data = self._read(chunk.payload_offset + section.start, section.size)
        if len(data) != section.size or zlib.crc32(data) != section.checksum:
            raise Damaged(f"the section {name!r} has the wrong checksum")
        return data

    def error(self, chunk: Chunk, reason: Damaged) -> ReplayError:
        """Return the error to raise for a reader."""
        where = f"{self.path}: chunk {chunk.head.number}, at byte {chunk.head.offset}"
        return ReplayError(f"{where}, is damaged: {reason}. `practicum routes verify` tells what is whole.")

    def _read_header(self) -> tuple[RecordingHeader, int]:
        try:
            found = read_header(self._read(0, MOST_HEADER_BYTES + CHUNK_HEAD_BYTES))
            if found is None:
                raise Damaged("it ends before its header does")
        except Damaged as error:
            raise ReplayError(f"{self.path} cannot be used: {error}.") from error
        return found

    def _next_head(self, at: int, file_size: int) -> int | None:
        """Return where the next chunk begins whose head is right."""
        while at + CHUNK_HEAD_BYTES <= file_size:
            block = self._read(at, _SEARCHED_BYTES)
            found = block.find(CHUNK_MAGIC)
            if found < 0:
                at += max(1, len(block) - len(CHUNK_MAGIC) + 1)
                continue
            try:
                read_chunk_head(self._read(at + found, CHUNK_HEAD_BYTES), at + found)
                return at + found
            except Damaged:
                at += found + 1
        return None

    def _size(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ReplayError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _read(self, at: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, min(size, max(0, self._size() - at)), at)
        except OSError as error:
            raise ReplayError(f"{self.path} cannot be read: {error.strerror}.") from error
