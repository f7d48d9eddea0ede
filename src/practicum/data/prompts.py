"""Prompt files: .jsonl or .parquet, one record a prompt.

    {"prompt": "2+2=", "answer": "4"}
    {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "data_source": "sums", "level": 1}

A string is used as it is; a list of messages goes through the tokenizer's chat template. `data_source` names the kind
of problem, everything else is kept as metadata. A record that cannot be used is an error with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.types import Message, Prompt


def read_prompts(
    path: str | Path,
    *,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    check: Callable[[Prompt], None] = lambda prompt: None,
) -> list[Prompt]:
    """All prompts of a file, in order. `check` raises a ValueError for one that cannot be used."""
    path = Path(path)
    readers = {".jsonl": _jsonl_records, ".parquet": _parquet_records}
    if path.suffix not in readers:
        raise DataError(f"data file {path}: the name must end in {' or '.join(readers)}.")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist (looked from {Path.cwd()}).")
    try:
        records = readers[path.suffix](path)
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
    if prompt_key not in record:
        found = ", ".join(map(str, record)) or "nothing"
        raise DataError(f"{where}: no field {prompt_key!r} (found: {found}). Set data.prompt_key to the right one.")
    question = record[prompt_key]
    metadata = {k: v for k, v in record.items() if k not in (prompt_key, answer_key, "data_source", "id")}
    try:
        prompt = Prompt(
            id=str(record.get("id", where)),
            messages=None if isinstance(question, str) else tuple(_messages(question)),
            text=question if isinstance(question, str) else None,
            answer=record.get(answer_key),
            data_source=str(record.get("data_source") or ""),
            metadata=metadata,
        )
        check(prompt)
        return prompt
    except ValueError as error:
        raise DataError(f"{where}: {str(error).removeprefix(f'prompt {where}: ')}.") from error


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
