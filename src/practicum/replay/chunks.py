"""The chunks of one file, found by their headers; their sections are read when they are asked for.

What follows the last whole chunk is not there yet: a writer may be at it, or was killed there. A chunk whose head is
spoilt takes nothing with it but itself: the next one is found by its magic.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import ReplayError
from practicum.replay.format import (
    CHUNK_HEAD_BYTES,
    CHUNK_MAGIC,
    MOST_HEADER_BYTES,
    Chunk,
    ChunkHead,
    RecordingHeader,
    Spoilt,
    read_chunk,
    read_chunk_head,
    read_header,
)

_SEARCHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LostBytes:
    """A stretch of a file in which nothing can be read."""

    offset: int
    size: int
    reason: str


class ChunkFile:
    """Reads from a descriptor that is its owner's to close."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.header, self.end = self._read_header()  # and `end` then moves on, past the last whole chunk
        self.chunks: list[Chunk] = []
        self.lost: list[LostBytes] = []
        self.unfinished: LostBytes | None = None  # after `end`
        self.next_number = 0
        self.refresh()

    def refresh(self) -> list[Chunk]:
        """The chunks that have been added since the last time."""
        new: list[Chunk] = []
        file_size = self._size()
        self.unfinished = None
        while (at := self.end) < file_size:
            try:
                head = self._head_at(at, file_size)
            except Spoilt as error:
                following = self._next_head(at + 1, file_size)
                if following is None:  # maybe there will be one later: looked for again the next time
                    self.unfinished = LostBytes(at, file_size - at, str(error))
                    break
                self.lost.append(LostBytes(at, following - at, str(error)))
                self.end = following
                continue
            if head is None or at + head.size > file_size:
                self.unfinished = LostBytes(at, file_size - at, "")
                break
            try:
                new.append(read_chunk(head, self._read(at + CHUNK_HEAD_BYTES, head.index_bytes)))
            except Spoilt as error:
                self.lost.append(LostBytes(at, head.size, f"chunk {head.number}: {error}"))
            self.end += head.size
            self.next_number = head.number + 1
        self.chunks += new
        return new

    def section(self, chunk: Chunk, name: str) -> bytes:
        """Its coded bytes; `Spoilt` if their checksum is wrong."""
        section = chunk.sections.get(name)
        if section is None:
            raise Spoilt(f"there is no section {name!r}")
        data = self._read(chunk.payload_offset + section.start, section.size)
        if len(data) != section.size or zlib.crc32(data) != section.checksum:
            raise Spoilt(f"the section {name!r} has the wrong checksum")
        return data

    def error(self, chunk: Chunk, reason: Spoilt) -> ReplayError:
        """What to raise for a reader."""
        where = f"{self.path}: chunk {chunk.head.number}, at byte {chunk.head.offset}"
        return ReplayError(f"{where}, is spoilt: {reason}. `practicum routes verify` tells what is whole.")

    def _read_header(self) -> tuple[RecordingHeader, int]:
        try:
            found = read_header(self._read(0, MOST_HEADER_BYTES + CHUNK_HEAD_BYTES))
            if found is None:
                raise Spoilt("it ends before its header does")
        except Spoilt as error:
            raise ReplayError(f"{self.path} cannot be used: {error}.") from error
        return found

    def _head_at(self, at: int, file_size: int) -> ChunkHead | None:
        """None if the file ends before the head does."""
        data = self._read(at, CHUNK_HEAD_BYTES)
        if at + CHUNK_HEAD_BYTES > file_size and CHUNK_MAGIC.startswith(data[: len(CHUNK_MAGIC)]):
            return None
        return read_chunk_head(data, at)

    def _next_head(self, at: int, file_size: int) -> int | None:
        """Where the next chunk begins whose head is right."""
        while at + CHUNK_HEAD_BYTES <= file_size:
            block = self._read(at, _SEARCHED_BYTES)
            found = block.find(CHUNK_MAGIC)
            if found < 0:
                at += max(1, len(block) - len(CHUNK_MAGIC) + 1)
                continue
            try:
                read_chunk_head(self._read(at + found, CHUNK_HEAD_BYTES), at + found)
                return at + found
            except Spoilt:
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
