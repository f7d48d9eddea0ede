"""Recordings on disk: one writer a file, any number of readers, also while it is written.

    RouteWriter(path, header)  append ──▶ chunks of about 16k tokens ──▶ path, path.1, path.2, ... (a file a rank)
    Recording(path)            reads heads and indices of all ranks ──▶ a sample, a step or routes, decoded when asked

A chunk counts once all of it is there. So a kill at any byte leaves all samples up to the last whole chunk; the next
writer cuts off the rest and goes on. A sample that is recorded again, as when a run is resumed, replaces the earlier.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from practicum.errors import ReplayError
from practicum.replay.format import (
    CHUNK_MAGIC,
    MOST_HEADER_BYTES,
    Chunk,
    ChunkFile,
    Damaged,
    RecordingHeader,
    SampleEntry,
    chunk_bytes,
    header_bytes,
    read_header,
)
from practicum.replay.records import OpenChunk, RecordedSample, check_routes, order_of, sections_of
from practicum.types import RoutedExperts, Sample

T = TypeVar("T")
Sections = Sequence[tuple[str, int, int, bytes]]

CHUNK_TOKENS = 1 << 14
_KEPT_CHUNKS = 4


def rank_path(path: str | Path, rank: int) -> Path:
    """Return the file of a rank: ranks record side by side, rank 0 under the name itself."""
    return Path(path) if rank == 0 else Path(f"{path}.{rank}")


class RouteWriter:
    """Adds samples to the recording of a rank, at `rank_path(path, header.rank)`; starts it if there is none.

    `with RouteWriter(path, header) as writer: writer.append(samples)`. What was appended is seen by readers at once and
    survives a kill; `sync` makes it survive a power cut.
    """

    def __init__(self, path: str | Path, header: RecordingHeader, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.path = rank_path(path, header.rank)
        self.header = header
        self._chunk_tokens = chunk_tokens
        self._closed = False
        self._end = self._number = 0  # where the next chunk goes, and its number
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with self._failures():
                self._begin()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, samples: Iterable[RecordedSample]) -> int:
        """Append samples; return the bytes that their routes take.

        `ReplayError` says why one cannot be written; nothing of its chunk is, then.
        """
        num_bytes = 0
        for part in _parts(samples, self._chunk_tokens):
            for record in part:
                check_routes(record, self.header)
            try:
                sections = sections_of(part, self.header)
            except ValueError as error:
                raise ReplayError(f"{self.path}: samples {part[0].id} to {part[-1].id}: {error}.") from error
            self._add([record.entry for record in part], sections)
            num_bytes += sum(len(coded) for name, _, _, coded in sections if name == "routes")
        return num_bytes

    def begin_again(self, step: int) -> None:
        """Declare that what the file holds of this step and later ones does not count any more."""
        self._add([], [], anew_from=step)

    def sync(self) -> None:
        with self._failures():
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        """Lock the file, find its end, and begin it if there is nothing in it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ReplayError(
                f"{self.path} is being written by another process: wait for it or use another file."
            ) from error
        if self._holds_nothing():
            self._write(header_bytes(self.header))
            os.ftruncate(self._descriptor, self._end)
            _sync_folder(self.path.parent)
            return
        with closing(ChunkFile(self.path)) as found:
            if differences := found.header.differences(self.header, with_ranks=True):
                raise ReplayError(
                    f"{self.path} cannot be continued: it was made with {'; '.join(differences)}. Use another file."
                )
            self._end, self._number = found.end, found.next_number
        os.ftruncate(self._descriptor, self._end)

    def _holds_nothing(self) -> bool:
        """Return whether the file is new, or its writer was killed before the header was written."""
        size = os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, min(size, MOST_HEADER_BYTES * 2), 0)
        try:
            return read_header(start) is None and CHUNK_MAGIC not in start
        except Damaged:
            return False  # and it is not for us to overwrite

    def _add(self, samples: Sequence[SampleEntry], sections: Sections, anew_from: int | None = None) -> None:
        self._write(chunk_bytes(self._end, time.time_ns(), self._number, samples, sections, anew_from))
        self._number += 1

    def _write(self, data: bytes) -> None:
        assert not self._closed, "the writer has been closed"
        view, at = memoryview(data), self._end
        try:
            with self._failures():
                while view:
                    written = os.pwrite(self._descriptor, view, at)
                    view, at = view[written:], at + written
        except ReplayError:
            with suppress(OSError):  # then the beginning of a chunk stays: readers pass over it, a writer replaces it
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end = at

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReplayError(f"recording {self.path} cannot be written: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of the record of a sample."""

    file: ChunkFile
    chunk: Chunk
    i: int  # in the chunk

    @property
    def entry(self) -> SampleEntry:
        return self.chunk.samples[self.i]

    @property
    def on_disk(self) -> tuple[int, int]:
        """The rank whose file it is in, and its offset there."""
        return self.file.header.rank, self.chunk.head.offset


class Recording:
    """A recording, as the `RouteWriter`s of all ranks have written it; `refresh` reads what they have written since."""

    def __init__(self, path: str | Path, rank: int | None = None) -> None:
        """Open a recording; with `rank` what that one has written, alone."""
        self.path = Path(path) if rank is None else rank_path(path, rank)
        self.files: list[ChunkFile] = []
        self._places: dict[str, _Place] = {}
        self._steps: dict[int, list[str]] | None = None
        self._opened = lru_cache(_KEPT_CHUNKS)(OpenChunk)
        try:
            self._open(self.path)
            if rank is None:
                self._open_others()
        except BaseException:
            self.close()
            raise
        for file in self.files:
            self._add(file, file.chunks)

    @property
    def header(self) -> RecordingHeader:
        return self.files[0].header

    @property
    def ids(self) -> list[str]:
        """The ids of all samples, by step and by place in it."""
        return [id for step in self.steps for id in self._by_step()[step]]

    @property
    def ids_on_disk(self) -> list[str]:
        """The ids in the order of the files: the order in which to read all of them."""
        return sorted(self._places, key=lambda id: self._places[id].on_disk)

    @property
    def steps(self) -> list[int]:
        return sorted(self._by_step())

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, id: object) -> bool:
        return id in self._places

    def entry(self, id: str) -> SampleEntry:
        """Return step, place and lengths of a sample, without reading it."""
        return self._place(id).entry

    def record(self, id: str) -> RecordedSample:
        return self._read(id, OpenChunk.record)

    def records(self, step: int) -> list[RecordedSample]:
        """Return the records of a step, in the order of its batch."""
        return [self.record(id) for id in self._ids_of(step)]

    def samples(self, step: int) -> list[Sample]:
        """Return the samples of a step without their routes, which take the longest to read, in the order of its batch.

        Raises `ReplayError` if not all of them are there.
        """
        self.check_whole(step)
        return [self._read(id, OpenChunk.sample) for id in self._ids_of(step)]

    def check_whole(self, step: int) -> None:
        """Raise `ReplayError` unless all samples of the step are there. Nothing but the index is read."""
        entries = [self.entry(id) for id in self._ids_of(step)]
        size = max(entry.step_size for entry in entries)
        if size and len(entries) != size:
            raise ReplayError(
                f"{self.path} has {len(entries)} of the {size} samples of step {step}: it was cut off, or is being "
                f"written.{self._losses()}"
            )

    def _ids_of(self, step: int) -> list[str]:
        ids = self._by_step().get(step)
        if ids is None:
            held = f"it holds steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "it holds none"
            raise ReplayError(f"step {step} is not in {self.path}: {held}.{self._losses()}")
        return ids

    def routes(self, ids: Sequence[str]) -> list[RoutedExperts]:
        """Return the routes of these samples, in this order; each chunk they are in is decoded once."""
        on_disk = sorted(ids, key=lambda id: self._place(id).on_disk)
        found = {id: self._read(id, OpenChunk.routes) for id in on_disk}
        return [found[id] for id in ids]

    def check(self, header: RecordingHeader) -> None:
        """Raise `ReplayError` unless these are routes of that model, over texts of that tokenizer."""
        differences = self.header.differences(header)
        if differences:
            raise ReplayError(f"{self.path} does not fit: it was made with {'; '.join(differences)}.")

    def refresh(self) -> int:
        """Read what was written since; return how many records that is."""
        num = 0
        for file in self.files:
            chunks = file.refresh()
            self._add(file, chunks)
            num += sum(len(chunk.samples) for chunk in chunks)
        return num

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_others(self) -> None:
        if self.header.rank != 0:
            whole = f"which rank 0 of {self.header.num_ranks} wrote"
            raise ReplayError(f"{self.path} is the part of rank {self.header.rank}: name the file {whole}.")
        for rank in range(1, self.header.num_ranks):
            part = self._open(rank_path(self.path, rank), f", the part of rank {rank} of {self.header.num_ranks},")
            if differences := part.header.differences(replace(self.header, rank=rank), with_ranks=True):
                raise ReplayError(f"{part.path} does not belong to {self.path}: it has {'; '.join(differences)}.")

    def _open(self, path: Path, which: str = "") -> ChunkFile:
        try:
            self.files.append(ChunkFile(path))
        except OSError as error:
            raise ReplayError(f"recording {path}{which} cannot be read: {error.strerror}.") from error
        return self.files[-1]

    def _add(self, file: ChunkFile, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.anew_from is not None:
                kept = self._places.items()
                self._places = {id: at for id, at in kept if at.file is not file or at.entry.step < chunk.anew_from}
            for i, entry in enumerate(chunk.samples):
                before = self._places.get(entry.id)
                if before is None or before.file is file or before.chunk.head.written_ns <= chunk.head.written_ns:
                    self._places[entry.id] = _Place(file, chunk, i)
        self._steps = None

    def _by_step(self) -> dict[int, list[str]]:
        if self._steps is None:
            entries = sorted((place.entry for place in self._places.values()), key=order_of)
            self._steps = {}
            for entry in entries:
                self._steps.setdefault(entry.step, []).append(entry.id)
        return self._steps

    def _place(self, id: str) -> _Place:
        place = self._places.get(id)
        if place is None:
            raise ReplayError(f"sample {id} is not in {self.path}.{self._losses()}")
        return place

    @property
    def num_lost_bytes(self) -> int:
        return sum(part.size for file in self.files for part in file.lost)

    def _losses(self) -> str:
        lost = self.num_lost_bytes
        return f" {lost} bytes of it are damaged: see `practicum routes verify`." if lost else ""

    def _read(self, id: str, read: Callable[[OpenChunk, int], T]) -> T:
        place = self._place(id)
        try:
            return read(self._opened(place.file, place.chunk), place.i)
        except Damaged as error:
            raise place.file.error(place.chunk, error) from error


def _parts(samples: Iterable[RecordedSample], most_tokens: int) -> Iterator[list[RecordedSample]]:
    part: list[RecordedSample] = []
    tokens = 0
    for record in samples:
        if part and tokens + record.entry.num_tokens > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(record)
        tokens += record.entry.num_tokens
    if part:
        yield part


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
