from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum.replay.format import ChunkFile, Damaged, chunk_bytes, header_bytes
from practicum.replay.records import OpenChunk, RecordedSample, sections_of
from practicum.replay.store import Recording
from practicum.types import Prompt
from tests.replay.recordings import HEADER, make_batch, make_record, same, write


def with_prompt(record: RecordedSample, prompt: Prompt) -> RecordedSample:
    sample = replace(record.sample, prompt=prompt)
    return replace(record, sample=sample)


def written_and_read(record: RecordedSample, folder: Path) -> RecordedSample:
    with Recording(write(folder / "routes", [record])) as recording:
        return recording.record(record.id)


@pytest.mark.parametrize(
    ("answer", "back"),
    [
        (None, None),
        ("18", "18"),
        ({"tests": ["1 + 1", 2.5, None]}, {"tests": ["1 + 1", 2.5, None]}),
        (object(), None),
        ({1, 2}, None),
    ],
)
def test_an_answer_comes_back_if_json_can_be_made_of_it(answer: Any, back: Any, tmp_path: Path) -> None:
    prompt = Prompt("p", text="How much is it?", answer=answer, data_source="shop", metadata={"secret": object()})
    found = written_and_read(with_prompt(make_record("a"), prompt), tmp_path).sample.prompt
    assert found == Prompt("p", text="How much is it?", answer=back, data_source="shop")


def test_answers_to_one_prompt_share_it(tmp_path: Path) -> None:
    prompt = Prompt("p", text="a long question " * 200)
    records = [with_prompt(record, prompt) for record in make_batch(1, 5)]
    (words,) = [data for name, _, _, data in sections_of(records, HEADER) if name == "words"]
    assert len(words) < 1000
    with Recording(write(tmp_path / "routes", records, chunk_tokens=1000)) as recording:
        assert [record.sample.prompt for record in recording.records(1)] == [prompt] * 5


def test_every_bit_of_a_nan_is_kept(tmp_path: Path) -> None:
    record = make_record("a")
    record.sample.log_probs.view(np.uint32)[:3] = 0x7FC00001, 0xFFC12345, 0x80000000
    assert same(written_and_read(record, tmp_path), record)


def test_routes_of_the_sample_itself_are_not_kept_twice(tmp_path: Path) -> None:
    record = make_record("a")
    sample = replace(record.sample, routes=record.routes)
    record = replace(record, sample=sample)
    assert written_and_read(record, tmp_path).sample.routes is None


def test_words_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """With right checksums: made by a program that went wrong."""
    records = make_batch(1, 2)
    for name, content in (
        ("words", b"[]"),
        ("words", b"no JSON"),
        ("token_ids", b"123"),
        ("routes", b"1"),
        ("known", b""),
    ):
        sections = {entry[0]: entry for entry in sections_of(records, HEADER)}
        sections[name] = (name, 2 if name == "routes" else 0, len(content), content)
        header = header_bytes(HEADER)
        data = chunk_bytes(len(header), 0, 0, [record.entry for record in records], list(sections.values()))
        (tmp_path / "routes").write_bytes(header + data)
        with closing(ChunkFile(tmp_path / "routes")) as file, pytest.raises(Damaged):
            OpenChunk(file, file.chunks[0]).record(0)
