from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from practicum.replay.format import CHUNK_HEAD_BYTES, CHUNK_MAGIC, ChunkFile, Damaged
from practicum.replay.store import RouteWriter
from tests.replay.recordings import HEADER, make_batch, write


@contextmanager
def opened(path: Path) -> Iterator[ChunkFile]:
    with closing(ChunkFile(path)) as file:
        yield file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "routes", make_batch(1, 20))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_after_a_damaged_head_the_next_chunk_is_found(path: Path) -> None:
    with opened(path) as file:
        offsets = [chunk.head.offset for chunk in file.chunks]
    assert len(offsets) == 4
    flip(path, offsets[1] + 20)
    with opened(path) as file:
        assert [chunk.head.offset for chunk in file.chunks] == [offsets[0], *offsets[2:]]
        (lost,) = file.lost
        assert (lost.offset, lost.size) == (offsets[1], offsets[2] - offsets[1])
        assert "head of the chunk" in lost.reason and file.unfinished is None


def test_a_damaged_index_loses_its_chunk_alone(path: Path) -> None:
    with opened(path) as file:
        heads = [chunk.head for chunk in file.chunks]
    flip(path, heads[2].offset + CHUNK_HEAD_BYTES + 3)
    with opened(path) as file:
        assert [chunk.head for chunk in file.chunks] == [*heads[:2], heads[3]]
        assert file.lost[0].size == heads[2].size and file.lost[0].reason.startswith("chunk 2: its index")


def test_a_writer_goes_on_after_a_damaged_chunk_and_keeps_it(path: Path) -> None:
    with opened(path) as file:
        last = file.chunks[-1].head
    flip(path, last.offset + CHUNK_HEAD_BYTES + 3)
    with RouteWriter(path, HEADER, 40) as writer:
        writer.append(make_batch(2, 2))
    with opened(path) as file:
        assert [chunk.head.number for chunk in file.chunks] == [0, 1, 2, 4]
        assert len(file.lost) == 1


def test_what_looks_like_a_chunk_inside_of_one_is_not_taken_for_it(path: Path, tmp_path: Path) -> None:
    """A whole recording within a damaged stretch: its chunks say that they belong elsewhere."""
    with opened(path) as file:
        first = file.chunks[0].head
    data = path.read_bytes()
    damaged = data[: first.offset] + b"garbage" + data[first.offset :] + CHUNK_MAGIC + data
    (tmp_path / "damaged").write_bytes(damaged)
    with opened(tmp_path / "damaged") as file:
        assert file.chunks == [] and file.end == first.offset
        assert file.unfinished is not None and file.unfinished.size == len(damaged) - first.offset


def test_chunks_are_seen_once_they_are_whole(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    growing = tmp_path / "growing"
    with opened(path) as whole:
        ends = [chunk.head.offset + chunk.head.size for chunk in whole.chunks]
        start = whole.chunks[0].head.offset
    growing.write_bytes(data[:start])
    with opened(growing) as file:
        seen = 0
        for size in range(start, len(data) + 1, 7):
            with growing.open("ab") as out:
                out.write(data[growing.stat().st_size : size])
            seen += len(file.refresh())
            assert seen == sum(end <= size for end in ends) == len(file.chunks)
            assert not file.lost
            assert (file.unfinished is None) == (size in (start, *ends)) and (
                not file.unfinished or not file.unfinished.reason
            )


def test_a_section_with_the_wrong_checksum_is_refused_and_the_others_are_not(path: Path) -> None:
    with opened(path) as file:
        chunk = file.chunks[1]
        flip(path, chunk.payload_offset + chunk.sections["known"].start)
        with pytest.raises(Damaged, match="'known' has the wrong checksum"):
            file.section(chunk, "known")
        with pytest.raises(Damaged, match="no section 'unheard_of'"):
            file.section(chunk, "unheard_of")
        assert file.section(chunk, "routes")
