"""JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.extract import answer_text
from practicum.types import Prompt, Sample, Score

_FENCED = re.compile(r"(?<!`)```[ \t]*+(?P<language>\w*+)[^\n]*+\n(?P<block>.*?)```", re.DOTALL)


class JsonSchema(IsolatedGrader):
    """1 if the answer is JSON that fits the schema, else 0. Logs as parts whether it `parses` and `fits`.

    The schema is an option, or it comes with each record: in the metadata field named by `schema_key`, or else as the
    ground truth; there it is a mapping or its JSON text (safer in parquet files, which give all rows the same keys). It
    may refer to its own parts and to the JSON Schema standard; nothing is ever fetched. Patterns in a schema can take
    for ever on an unlucky answer, so each sample is graded in a process that can be killed. Thinking before </think> is
    not part of the answer.
    """

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema of all answers: written here, or a path to a JSON file, which is read when the run starts."""
    schema_key: str | None = Field(default=None, min_length=1)
    """Metadata field of the records that holds the schema."""
    fenced: bool = True
    """Whether only the last ```json (or plain ```) block counts where the answer has one. If false, the whole answer
    must be JSON."""

    @field_validator("schema_", mode="before")
    @classmethod
    def _read(cls, schema: Any) -> Any:
        if not isinstance(schema, str | Path):
            return schema
        try:
            return json.loads(Path(schema).read_text())
        except OSError as error:
            raise ValueError(f"schema file {schema} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"schema file {schema} is not JSON: {error}") from None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.schema_ is not None and self.schema_key is not None:
            raise ValueError("set schema or schema_key, not both")
        if self.schema_ is not None:
            _validator(json.dumps(self.schema_))
        return self

    def check(self, prompt: Prompt) -> None:
        _validator(self._schema_text(prompt))

    def prepare(self) -> None:
        import jsonschema  # type: ignore[import-untyped]  # noqa: F401 (before the first sample, not with it)

    def reference(self, prompt: Prompt) -> str:
        return "null"

    def grade(self, sample: Sample) -> Score:
        try:
            validator = _validator(self._schema_text(sample.prompt))
        except ValueError as error:
            return Score.failed("invalid", str(error))
        try:
            answer = json.loads(self._stated(answer_text(sample)), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return Score(0.0, {"parses": 0.0, "fits": 0.0})
        try:
            fits = float(validator.is_valid(answer))
        except Exception:  # numbers too large or lists too deep for the validator
            fits = 0.0
        return Score(fits, {"parses": 1.0, "fits": fits})

    def _stated(self, text: str) -> str:
        if self.fenced:
            for match in reversed(list(_FENCED.finditer(text))):
                if match["language"].lower() in ("json", ""):
                    return match["block"]
        return text

    def _schema_text(self, prompt: Prompt) -> str:
        if self.schema_ is not None:
            return json.dumps(self.schema_)
        if self.schema_key is not None:
            schema, what = prompt.metadata.get(self.schema_key), f"the metadata field {self.schema_key!r}"
        else:
            schema, what = prompt.answer, "the ground truth"
        if schema is None or schema == "":
            raise ValueError(f"{what} is missing; json_schema needs the schema there, or one for all in its options")
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema))
        if isinstance(schema, str):
            return schema
        raise ValueError(f"json_schema needs a schema in {what}, found {schema!r}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=256)  # the answers to one prompt come close together
def _validator(schema_text: str) -> Any:
    """Make jsonschema's validator. Raises ValueError for text that is no schema, or that refers to others."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    try:
        schema = json.loads(schema_text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is not a mapping: {schema_text[:80]}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is wrong at {error.json_path}: {error.message}") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    resource = specification_with(kind.META_SCHEMA["$schema"]).create_resource(schema)
    try:
        _check_parts(resource, REGISTRY.resolver_with_root(resource))
    except Unresolvable as error:
        raise ValueError(f"the schema refers to {error.ref!r}, which is not part of it; nothing is fetched") from None
    return kind(schema, registry=Registry())  # without a registry of ours it would fetch


def _check_parts(resource: Any, resolver: Any) -> None:
    if isinstance(resource.contents, dict):
        for pattern in (resource.contents.get("pattern"), *resource.contents.get("patternProperties", ())):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"the schema's pattern {pattern!r} is no regular expression: {error}") from None
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(reference := resource.contents.get(keyword), str):
                resolver.lookup(reference)
    for part in resource.subresources():
        _check_parts(part, resolver.in_subresource(part))
