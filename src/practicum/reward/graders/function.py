"""Reward functions of the user: found, checked, and called the way their signature asks for.

    def grade(sample: Sample) -> Score | float            one sample, in a process that can be killed
    async def grade(sample: Sample) -> Score | float      one sample, many at once in one such process
    def grade(samples: list[Sample]) -> list[...]         several at once (also async)
    def compute_score(data_source, solution_str, ground_truth, extra_info)      as written for verl (also async)

The file is imported in a small process from which those that call the function are forked, and before that once in a
process that is thrown away, to learn its signature: it must not use a GPU while it is imported.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import Field

from practicum.config import Section
from practicum.errors import RewardError
from practicum.functions import load_named
from practicum.reward.graders.base import Grader
from practicum.reward.values import score_of
from practicum.types import Sample, Score

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


class FunctionShape(Section):
    """How to call a function, as its signature says."""

    is_async: bool
    """Whether it is a coroutine function."""
    takes_list: bool
    """Whether it takes several samples at once."""
    fields: tuple[str, ...] = ()
    """The fields of a sample that it takes under verl's names; none: it takes the sample itself."""
    source: str = ""
    """Tells one state of its file from another."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function and how to call it."""

    name: str
    function: Callable[..., Any]
    shape: FunctionShape

    def call(self, given: Sample | list[Sample]) -> Any:
        """Return what the function returns: a value, as many values as samples, or a coroutine of either."""
        if self.shape.fields:
            assert isinstance(given, Sample)
            fields = _fields(given)
            return self.function(**{name: fields[name] for name in self.shape.fields})
        return self.function(given)


class UserFunction(Grader):
    function: str = Field(min_length=1)
    """path/to/file.py:name or package.module:name."""
    shape: FunctionShape
    """Found out by `probe_function`, so that only the processes that call it need import it."""

    def prepare(self) -> None:
        self.loaded()

    def loaded(self) -> RewardFunction:
        return load_function(self.function)

    def grade(self, sample: Sample) -> Score:
        return score_of(self.loaded().call(sample))

    def grade_list(self, samples: list[Sample]) -> list[Score]:
        return self._scores(self.loaded().call(samples), len(samples))

    async def grade_async(self, sample: Sample) -> Score:
        return score_of(await self.loaded().call(sample))

    async def grade_list_async(self, samples: list[Sample]) -> list[Score]:
        return self._scores(await self.loaded().call(samples), len(samples))

    def _scores(self, values: Any, expected: int) -> list[Score]:
        """Read the values. One unusable value costs its own sample, a wrong number of them all."""
        values = list(values)
        if len(values) != expected:
            raise ValueError(f"returned {len(values)} scores for {expected} samples")
        return [_score_or_failure(value) for value in values]


def source_of(function: Callable[..., Any]) -> str:
    """Hash the file it is written in."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        function = function.func
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
    except TypeError:  # written in C: it comes with a version of Python or of a package
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _score_or_failure(value: Any) -> Score:
    try:
        return score_of(value)
    except ValueError as error:
        return Score.failed("invalid", f"returned what is no score: {error}")


@functools.lru_cache(maxsize=64)
def load_function(spec: str) -> RewardFunction:
    """Find `path/to/file.py:name` or `package.module:name`, and check that it can be called with a sample."""
    return _checked(spec, load_named(spec, key="reward.function", error=RewardError))


def _checked(spec: str, function: Callable[..., Any]) -> RewardFunction:
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise RewardError(f"reward.function={spec!r} does not say what it takes: write a Python function.") from None
    fields = _verl_fields(signature)
    try:
        if fields:
            signature.bind(**dict.fromkeys(fields))
        else:
            signature.bind(object())
    except TypeError as error:
        raise RewardError(
            f"reward.function={spec!r} has the signature {signature} and cannot be called with one sample ({error}): "
            "write def grade(sample), def grade(samples: list[Sample]), or verl's "
            "def compute_score(data_source, solution_str, ground_truth, extra_info)."
        ) from None
    annotation = next(iter(signature.parameters.values())).annotation
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    shape = FunctionShape(
        is_async=inspect.iscoroutinefunction(inspect.unwrap(called)),
        takes_list=not fields and _is_list(annotation),
        fields=fields,
    )
    return RewardFunction(spec, function, shape)


def _verl_fields(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the fields it takes, if it is written for verl."""
    names = set(signature.parameters)
    if not names >= {"solution_str", "ground_truth"}:
        return ()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return tuple(name for name in _VERL if takes_any or name in names)


def _is_list(annotation: Any) -> bool:
    if isinstance(annotation, str):  # under `from __future__ import annotations`
        return annotation.split("[")[0].rpartition(".")[2] in ("list", "List", "Sequence")
    return annotation is list or get_origin(annotation) in (list, Sequence)


def _fields(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    extra_info = prompt.metadata.get("extra_info", prompt.metadata)  # a column of that name, as verl's files have it
    return {
        "data_source": prompt.data_source,
        "solution_str": sample.text,
        "ground_truth": prompt.answer,
        "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else extra_info,
    }
