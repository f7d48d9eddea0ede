from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from practicum import Sample
from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.json_schema import JsonSchema
from tests.samples import make_sample

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def with_metadata(sample: Sample, **metadata: Any) -> Sample:
    return replace(sample, prompt=replace(sample.prompt, metadata=metadata))


def test_it_is_graded_where_it_can_be_killed() -> None:
    assert issubclass(JsonSchema, IsolatedGrader)


@pytest.mark.parametrize(
    ("text", "parses", "fits"),
    [
        ('{"name": "Ada", "age": 36}', 1, 1),
        (' {"name": "Ada"}\n', 1, 1),
        ('{"name": "Ada", "age": -1}', 1, 0),
        ('{"age": 36}', 1, 0),
        ('{"name": "Ada", "other": 1}', 1, 0),
        ("[]", 1, 0),
        ('{"name": "Ada"', 0, 0),
        ('Here you are: {"name": "Ada"}', 0, 0),
        ("", 0, 0),
        ('{"name": "Ada", "age": NaN}', 0, 0),
        ("[" * 100_000, 0, 0),
        ('```json\n{"name": "Ada"}\n```', 1, 1),
        ('Here:\n```\n{"name": "Ada"}\n```\nGood?', 1, 1),
        ('```json\n{}\n```\nno:\n```JSON\n{"name": "Ada"}\n```', 1, 1),
        ('```python\nx = 1\n```\nand\n```json\n{"name": "Ada"}\n```', 1, 1),
        ('```json\n{"name": "Ada"}\n```\n```python\nx = 1\n```', 1, 1),
        ('<think>{"age"?</think>{"name": "Ada"}', 1, 1),
    ],
)
def test_answers(text: str, parses: float, fits: float) -> None:
    score = JsonSchema(schema=PERSON).grade(make_sample(text=text))
    assert (score.status, score.value, score.parts) == ("ok", fits, {"parses": parses, "fits": fits})


def test_without_fences_the_whole_answer_counts() -> None:
    score = JsonSchema(schema=PERSON, fenced=False).grade(make_sample(text='```json\n{"name": "Ada"}\n```'))
    assert score.parts == {"parses": 0.0, "fits": 0.0}


def test_the_schema_may_be_a_file_that_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    grader = JsonSchema.model_validate({"schema": str(file)})
    file.unlink()
    assert pickle.loads(pickle.dumps(grader)) == JsonSchema(schema=PERSON)


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_the_schema_may_come_with_the_record(schema: Any) -> None:
    as_truth = make_sample(text='{"name": 1}', truth=schema)
    in_metadata = with_metadata(make_sample(text='{"name": "Ada"}', truth="unused"), schema=schema)
    JsonSchema().check(as_truth.prompt)
    JsonSchema(schema_key="schema").check(in_metadata.prompt)
    assert JsonSchema().grade(as_truth).value == 0.0
    assert JsonSchema(schema_key="schema").grade(in_metadata).value == 1.0


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "objekt"}, "the schema is wrong at $.type: 'objekt'"),
        ({"$ref": "https://example.com/schema.json"}, "refers to 'https://example.com/schema.json'"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "refers to '/$defs/a'"),
        ("missing.json", "schema file missing.json cannot be read: No such file"),
    ],
)
def test_a_bad_schema_is_refused_at_once(schema: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        JsonSchema.model_validate({"schema": schema})
    assert words in str(caught.value)


def test_a_schema_may_refer_to_the_standard_and_to_its_own_names() -> None:
    schema = {
        "$id": "https://example.com/root.json",
        "properties": {"a": {"$ref": "item.json"}, "b": {"$ref": "http://json-schema.org/draft-07/schema#"}},
        "$defs": {"item": {"$id": "item.json", "type": "integer"}},
    }
    grader = JsonSchema(schema=schema)
    assert grader.grade(make_sample(text='{"a": 1, "b": {"type": "string"}}')).value == 1.0
    assert grader.grade(make_sample(text='{"a": "x"}')).value == 0.0
    assert grader.grade(make_sample(text='{"b": {"type": "objekt"}}')).value == 0.0


def test_older_drafts_count_where_the_schema_names_them() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert JsonSchema(schema=schema).grade(make_sample(text="3")).value == 0.0


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "the ground truth is missing"),
        (3, "needs a schema in the ground truth, found 3"),
        ("{", "the schema is not JSON"),
        ("[1]", "the schema is not a mapping"),
        ({"type": "objekt"}, "the schema is wrong"),
    ],
)
def test_a_bad_schema_of_a_record_is_named(truth: Any, words: str) -> None:
    sample = make_sample(text="{}", truth=truth)
    with pytest.raises(ValueError) as caught:
        JsonSchema().check(sample.prompt)
    assert words in str(caught.value)
    score = JsonSchema().grade(sample)
    assert score.status == "invalid" and words in score.reason


def test_a_missing_metadata_field_is_named() -> None:
    with pytest.raises(ValueError, match="the metadata field 'form' is missing"):
        JsonSchema(schema_key="form").check(make_sample(truth="x").prompt)


def test_two_places_for_the_schema_are_refused() -> None:
    with pytest.raises(ValueError, match="set schema or schema_key, not both"):
        JsonSchema(schema=PERSON, schema_key="form")
