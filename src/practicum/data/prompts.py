"""Prompt files: .jsonl or .parquet, one record a prompt.

    {"prompt": "2+2=", "answer": "4"}
    {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "data_source": "sums", "level": 1}

A string is used as it is; a list of messages goes through the tokenizer's chat template. `data_source` names the kind
of problem, everything else is kept as metadata. Keys may be dotted: `reward_model.ground_truth` is the field
`ground_truth` of the field `reward_model`. A record that cannot be used is an error with its file and line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.types import Message, Prompt

ANSWER_KEY = "answer"
_PICTURES = re.compile("image|picture|photo|video|audio", re.IGNORECASE)
_PICTURE_TEXT = re.compile(  # a data URL, the name of a file, or a file as base64
    r"data:(image|video|audio)/.*|.*\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|webm|wav|mp3|flac)(\?.*)?|[\w+/=\n]{200,}",
    re.IGNORECASE,
)
_PICTURE_MARK = re.compile(r"<\|?(image|video|audio)(_pad)?\|?>")
_PICTURE_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")


def read_prompts(
    path: str | Path,
    *,
    prompt_key: str = "prompt",
    answer_key: str = ANSWER_KEY,
    check: Callable[[Prompt], None] = lambda prompt: None,
) -> list[Prompt]:
    """All prompts of a file, in order. `check` raises a ValueError for one that cannot be used.

    Not every grader needs a ground truth, so a file may do without one; an `answer_key` other than the usual one says
    that there is one, and is an error where no record has it.
    """
    path = Path(path)
    readers = {".jsonl": _jsonl_records, ".parquet": _parquet_records}
    if path.suffix not in readers:
        raise DataError(f"data file {path}: the name must end in {' or '.join(readers)}.")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist (looked from {Path.cwd()}).")
    try:
        records = list(readers[path.suffix](path))
        if answer_key != ANSWER_KEY:
            _check_answers([record for _, record in records if isinstance(record, dict)], answer_key, path)
        prompts = [_prompt(record, prompt_key, answer_key, where, check) for where, record in records]
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror or error}.") from error
    if not prompts:
        raise DataError(f"data file {path} holds no records.")
    return prompts


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not valid JSON: {error}.") from error


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"data file {path} is not a readable parquet file: {error}") from error
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _prompt(record: Any, prompt_key: str, answer_key: str, where: str, check: Callable[[Prompt], None]) -> Prompt:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with a {prompt_key!r} field, found a {type(record).__name__}.")
    question = _field(record, prompt_key)
    if question is None and prompt_key not in record:
        found = _names(record)
        raise DataError(f"{where}: no field {prompt_key!r} (found: {found}). Set data.prompt_key to the right one.")
    answer = _field(record, answer_key)
    metadata = {k: v for k, v in record.items() if k not in (prompt_key, answer_key, "data_source", "id")}
    try:
        prompt = Prompt(
            id=str(record.get("id", where)),
            messages=None if isinstance(question, str) else tuple(_messages(question)),
            text=question if isinstance(question, str) else None,
            answer=answer,
            data_source=str(record.get("data_source") or ""),
            metadata=metadata,
        )
        _check_marks(prompt)
    except ValueError as error:
        raise DataError(f"{where}: {str(error).removeprefix(f'prompt {where}: ')}.") from error
    try:
        check(prompt)
    except ValueError as error:
        hint = f" There is no field {answer_key!r} (found: {_names(record)}): see data.answer_key."
        raise DataError(f"{where}: {error}.{hint if answer is None else ''}") from error
    return prompt


def _field(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a field, by its name or by the dotted path to it; None where there is none."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _names(*records: Mapping[str, Any]) -> str:
    """Return the names of all fields, those within others dotted."""
    names = dict.fromkeys(
        name
        for record in records
        for key, value in record.items()
        for name in (key, *(f"{key}.{inner}" for inner in (value if isinstance(value, Mapping) else ())))
    )
    return ", ".join(map(str, names)) or "nothing"


def _check_answers(records: Sequence[Mapping[str, Any]], answer_key: str, path: Path) -> None:
    if records and all(_field(record, answer_key) is None for record in records):
        raise DataError(
            f"data file {path}: no record has the field {answer_key!r} (found: {_names(*records)}). Set "
            "data.answer_key to the one with the ground truth."
        )


def _check_marks(prompt: Prompt) -> None:
    """Refuse a prompt with a mark that stands for a picture in another field: it would be learnt as text."""
    texts = [prompt.text or ""] if prompt.messages is None else [message.content for message in prompt.messages]
    mark = next((found for text in texts if (found := _PICTURE_MARK.search(text))), None)
    if mark is not None and (fields := picture_fields([prompt])):
        raise ValueError(
            f"the prompt says {mark[0]} for what its field {next(iter(fields))!r} holds, and every rollout.engine "
            "reads text only"
        )


def picture_fields(prompts: Iterable[Prompt]) -> Counter[str]:
    """Return the fields of records that hold or name pictures, video or audio, and in how many records each does."""
    return Counter(key for prompt in prompts for key, value in prompt.metadata.items() if _is_picture(key, value))


def _is_picture(key: str, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_picture(key, one) for one in value[:4])
    if isinstance(value, bytes) and value.startswith(_PICTURE_BYTES):
        return True
    if isinstance(value, Mapping):  # as parts of messages are written, or `datasets` writes files
        is_file = value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes)
        return is_file or any(_is_picture(key, one) for one in value.values())
    if _PICTURES.search(key) is None:
        return False
    return isinstance(value, bytes) or (isinstance(value, str) and _PICTURE_TEXT.fullmatch(value) is not None)


def _messages(question: Any) -> Iterator[Message]:
    if not isinstance(question, list) or not question:
        raise ValueError(f"the prompt must be a string or a list of messages, not {question!r}")
    for message in question:
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        for number, part in enumerate(content if isinstance(content, list) else (), 1):
            if isinstance(part, Mapping) and part.get("type") not in (None, "text"):
                what = f"part {number} of a message is of type {part['type']!r}"
                raise ValueError(f"{what}, and every rollout.engine reads text only")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"each message needs 'role' and 'content' as strings, not {message!r}")
        yield Message(role, content)
