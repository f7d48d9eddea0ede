from __future__ import annotations

import json
import struct
import zlib
from contextlib import suppress
from typing import Any

import pytest

from practicum.replay.format import (
    CHUNK_HEAD_BYTES,
    DEFLATED,
    PLAIN,
    Damaged,
    RecordingHeader,
    SampleEntry,
    Section,
    chunk_bytes,
    header_bytes,
    read_chunk,
    read_chunk_head,
    read_header,
    section_bytes,
    section_content,
)
from tests.replay.recordings import HEADER

ENTRIES = [SampleEntry("a", 1, 0, 3, 5), SampleEntry("b", 1, 1, 3, 0)]
CHUNK = chunk_bytes(
    100, 123, 7, ENTRIES, [("one", *section_bytes(b"x" * 99, True)), ("two", *section_bytes(b"yz", True))]
)


def test_a_header_says_what_a_program_elsewhere_needs() -> None:
    data = header_bytes(HEADER)
    magic, version, length = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"PRACROUT", 1) and len(data) == 16 + length + 4
    tree = json.loads(data[16 : 16 + length])
    assert tree["layers"] == [1, 2, 5] and tree["dtype"] == "uint8" and tree["made"] == {"transformers": "5.22"}
    assert read_header(data + b"more") == (HEADER, len(data))


def test_a_header_is_whole_or_not_there_or_refused() -> None:
    data = header_bytes(HEADER)
    for cut in range(len(data)):
        assert read_header(data[:cut]) is None
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 16
        with suppress(Damaged):
            assert read_header(bytes(damaged)) is None  # a length that promises more


def test_a_newer_version_is_refused_by_its_number() -> None:
    data = bytearray(header_bytes(HEADER)[:-4])
    data[8] = 2
    with pytest.raises(Damaged, match="version 2 of the format"):
        read_header(bytes(data) + struct.pack("<I", zlib.crc32(data)))


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": ()},
        {"layers": (3, 1)},
        {"k": 9},
        {"k": 0},
        {"rank": 1},
    ],
)
def test_headers_that_make_no_sense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        RecordingHeader(**{"model": "m", "layers": (0,), "num_experts": 8, "k": 2, "tokenizer": "t"} | fields)  # type: ignore[arg-type]


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="say less in `made`"):
        header_bytes(RecordingHeader("m", (0,), 8, 2, "t", made={"all": "x" * (1 << 20)}))


def test_a_chunk_tells_its_samples_and_sections() -> None:
    head = read_chunk_head(CHUNK[:CHUNK_HEAD_BYTES], 100)
    assert (head.number, head.written_ns, head.size) == (7, 123, len(CHUNK))
    chunk = read_chunk(head, CHUNK[CHUNK_HEAD_BYTES:][: head.index_bytes])
    assert chunk.samples == tuple(ENTRIES) and chunk.num_tokens == 11
    for name, content in (("one", b"x" * 99), ("two", b"yz")):
        section = chunk.sections[name]
        start = chunk.payload_offset - 100 + section.start
        assert section_content(section, CHUNK[start : start + section.size]) == content
    assert (chunk.sections["one"].coding, chunk.sections["two"].coding) == (DEFLATED, PLAIN)


def test_a_chunk_that_stands_elsewhere_is_not_taken_for_one() -> None:
    with pytest.raises(Damaged, match="belongs at byte 100"):
        read_chunk_head(CHUNK[:CHUNK_HEAD_BYTES], 101)


def test_no_bit_of_head_or_index_can_flip_unseen() -> None:
    head = read_chunk_head(CHUNK[:CHUNK_HEAD_BYTES], 100)
    for bit in range((CHUNK_HEAD_BYTES + head.index_bytes) * 8):
        damaged = bytearray(CHUNK)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            found = read_chunk_head(bytes(damaged[:CHUNK_HEAD_BYTES]), 100)
            read_chunk(found, bytes(damaged[CHUNK_HEAD_BYTES:][: found.index_bytes]))


@pytest.mark.parametrize("length", [-1, 2.5, "5", None])
def test_lengths_that_cannot_be_are_refused_though_the_checksum_is_right(length: Any) -> None:
    data = chunk_bytes(0, 0, 0, [SampleEntry("a", 1, 0, 3, length)], [])
    head = read_chunk_head(data[:CHUNK_HEAD_BYTES], 0)
    with pytest.raises(Damaged, match="impossible lengths"):
        read_chunk(head, data[CHUNK_HEAD_BYTES:])


@pytest.mark.parametrize(
    ("section", "data"),
    [
        (Section("s", DEFLATED, 0, 0, 10, 0), zlib.compress(bytes(10_000_000))),  # it says ten bytes
        (Section("s", DEFLATED, 0, 0, 10, 0), zlib.compress(b"short")),
        (Section("s", DEFLATED, 0, 0, 10, 0), b"no zlib"),
        (Section("s", PLAIN, 0, 0, 10, 0), b"short"),
        (Section("s", 77, 0, 0, 5, 0), b"12345"),
    ],
)
def test_a_section_is_as_long_as_it_says_or_refused(section: Section, data: bytes) -> None:
    if data.startswith(b"x") and len(data) > 1000:
        assert section_content(section, data) == bytes(10)  # and no more is unpacked
    else:
        with pytest.raises(Damaged):
            section_content(section, data)
