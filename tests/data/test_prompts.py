from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from practicum import Message, Prompt
from practicum.data import picture_fields, read_prompts
from practicum.errors import DataError

PICTURE = {"type": "image_url", "image_url": {"url": "http://pictures/1.png"}}
RECORDS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "answer": "4", "data_source": "sums", "level": 1},
    {"prompt": [{"role": "user", "content": "3+3="}], "answer": "6", "data_source": "sums", "level": 2},
]


def test_plain_prompts_messages_ground_truth_and_metadata(write_jsonl: Callable[..., Path]) -> None:
    plain, chat = read_prompts(write_jsonl(*RECORDS))
    assert (plain.text, plain.messages, plain.answer, plain.data_source) == ("2+2=", None, "4", "sums")
    assert plain.metadata == {"level": 1}
    assert (chat.text, chat.messages) == (None, (Message("user", "3+3="),))
    assert plain.id != chat.id


def test_parquet_reads_like_jsonl(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    chats = [{**record, "prompt": [{"role": "user", "content": "x"}]} for record in RECORDS]
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), path)
    from_parquet, from_jsonl = read_prompts(path), read_prompts(write_jsonl(*chats))
    assert [(p.messages, p.answer, p.metadata) for p in from_parquet] == [
        (p.messages, p.answer, p.metadata) for p in from_jsonl
    ]


def test_other_field_names(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"question": "1+1=", "solution": 2, "id": "first"})
    (prompt,) = read_prompts(path, prompt_key="question", answer_key="solution")
    assert (prompt.id, prompt.text, prompt.answer, prompt.metadata) == ("first", "1+1=", 2, {})


def test_dotted_field_names(write_jsonl: Callable[..., Path]) -> None:
    record = {"q": {"text": "1+1="}, "reward_model": {"ground_truth": 2, "style": "rule"}, "a.b": 3}
    (prompt,) = read_prompts(write_jsonl(record), prompt_key="q.text", answer_key="reward_model.ground_truth")
    assert (prompt.text, prompt.answer, prompt.metadata["a.b"]) == ("1+1=", 2, 3)
    (prompt,) = read_prompts(write_jsonl(record), prompt_key="q.text", answer_key="a.b")
    assert prompt.answer == 3


def test_a_ground_truth_that_no_record_has_is_named_with_what_there_is(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"prompt": "1+1=", "reward_model": {"ground_truth": 2}}, {"prompt": "x", "level": 1})
    with pytest.raises(DataError) as caught:
        read_prompts(path, answer_key="reward_model.truth")
    assert str(caught.value) == (
        f"data file {path}: no record has the field 'reward_model.truth' (found: prompt, reward_model, "
        "reward_model.ground_truth, level). Set data.answer_key to the one with the ground truth."
    )
    assert [prompt.answer for prompt in read_prompts(path, answer_key="level")] == [None, 1]  # one may do without
    assert [prompt.answer for prompt in read_prompts(path)] == [None, None]

    def check(prompt: Prompt) -> None:
        raise ValueError("the ground truth is missing")

    with pytest.raises(DataError, match=r"is missing\. There is no field 'answer' \(found: prompt, reward.*_key"):
        read_prompts(path, check=check)


@pytest.mark.parametrize(
    "fields",
    [
        {"images": ["sums/1.png"]},
        {"image": "https://pictures/1.jpg?size=2"},
        {"photo": {"path": "1.webp", "bytes": None}},
        {"question_image": "data:image/png;base64,AAAA"},
        {"picture": "iVBORw0KGgo" * 40},
        {"images": [PICTURE]},
    ],
)
def test_pictures_in_other_fields_are_found(write_jsonl: Callable[..., Path], fields: dict[str, Any]) -> None:
    prompts = read_prompts(write_jsonl({"prompt": "what is this?", **fields}, {"prompt": "and this?"}))
    assert picture_fields(prompts) == dict.fromkeys(fields, 1)
    marked = write_jsonl({"prompt": [{"role": "user", "content": "<image>what is this?"}], **fields})
    with pytest.raises(DataError, match=rf":1: the prompt says <image> for what its field '{next(iter(fields))}'"):
        read_prompts(marked)


def test_pictures_of_parquet_files_are_found_whatever_their_field(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": "x", "scan": b"\x89PNG....", "figure": {"bytes": b"abc", "path": None}, "blob": b"abc"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert picture_fields(read_prompts(path)) == {"scan": 1, "figure": 1}


def test_what_only_looks_like_a_picture_is_none(write_jsonl: Callable[..., Path]) -> None:
    others = {"docker_image": "python:3.11", "image": None, "images": [], "output": "plot.png", "video_title": "Cats"}
    prompts = read_prompts(write_jsonl({"prompt": "write an <image> tag", **others}))
    assert not picture_fields(prompts)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"question": "x"}, "no field 'prompt' (found: question)"),
        ({"prompt": 3}, "a string or a list of messages, not 3"),
        ({"prompt": []}, "a string or a list of messages"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": [{"role": "user"}]}, "'role' and 'content'"),
        ({"prompt": ["hello"]}, "'role' and 'content'"),
        (
            {"prompt": [{"role": "user", "content": [PICTURE]}]},
            "type 'image_url', and every rollout.engine reads text only",
        ),
        ([1], "found a list"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(write_jsonl: Callable[..., Path], record: Any, complaint: str) -> None:
    path = write_jsonl(RECORDS[0], record)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert f"{path}:2" in str(caught.value)
    assert complaint in str(caught.value)


def test_a_prompt_that_cannot_be_graded_is_named_by_file_and_line(
    write_jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    def check(prompt: Prompt) -> None:
        if prompt.answer == "six":
            raise ValueError(f"data_source {prompt.data_source!r}, grader numeric: 'six' is not a number")

    records = [RECORDS[0], {**RECORDS[1], "answer": "six"}]
    path = write_jsonl(*records)
    with pytest.raises(DataError) as caught:
        read_prompts(path, check=check)
    assert str(caught.value) == f"{path}:2: data_source 'sums', grader numeric: 'six' is not a number."
    parquet = tmp_path / "prompts.parquet"
    chats = [{**record, "prompt": [{"role": "user", "content": "x"}]} for record in records]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), parquet)
    with pytest.raises(DataError, match=r"prompts\.parquet, row 2: data_source 'sums'"):
        read_prompts(parquet, check=check)
    assert len(read_prompts(path)) == 2


def test_broken_json_is_named_by_line_and_blank_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"prompts.jsonl:3: not valid JSON"):
        read_prompts(path)


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no records"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "prompts.csv").write_text("a")
    with pytest.raises(DataError, match=r"must end in \.jsonl or \.parquet"):
        read_prompts(tmp_path / "prompts.csv")
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(DataError, match="not a readable parquet"):
        read_prompts(tmp_path / "broken.parquet")
