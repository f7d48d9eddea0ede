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
from collections.abc import Callable, Mapping, Sequence, Set
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


class UserFunction(Grader):
    function: str = Field(min_length=1)
    """path/to/file.py:name or package.module:name."""
    shape: FunctionShape
    """Found out by `probe_function`, so that only the processes that call it need import it."""

    def prepare(self) -> None:
        load_function(self.function)

    def grade(self, given: Sample | list[Sample]) -> Score | list[Score]:
        return _read(self._call(given), given)

    async def grade_async(self, given: Sample | list[Sample]) -> Score | list[Score]:
        return _read(await self._call(given), given)

    def _call(self, given: Sample | list[Sample]) -> Any:
        """Return what the function returns: a value, as many values as samples, or a coroutine of either."""
        function = load_function(self.function)
        if not self.shape.fields:
            return function(given)
        assert isinstance(given, Sample)
        prompt = given.prompt
        info = prompt.metadata.get("extra_info", prompt.metadata)  # a column of that name, as verl's files have it
        fields = {
            "data_source": prompt.data_source,
            "solution_str": given.text,
            "ground_truth": prompt.answer,
            "extra_info": dict(info) if isinstance(info, Mapping) else info,
        }
        return function(**{name: fields[name] for name in self.shape.fields})


def _read(result: Any, given: Sample | list[Sample]) -> Score | list[Score]:
    """Read what a function returned. One unusable value costs its own sample."""
    if isinstance(given, Sample):
        return _score(result, given)
    if isinstance(result, str | bytes | Mapping | Set):
        raise ValueError(f"returned a {type(result).__name__}, not a list of scores in the order of the samples")
    values = list(result)  # as many as samples, or the executor complains
    if len(values) != len(given):
        return [Score.failed("invalid", "one of the wrong number of scores")] * len(values)
    return [_score(value, sample) for value, sample in zip(values, given, strict=True)]


def _score(value: Any, sample: Sample) -> Score:
    try:
        return score_of(value)
    except ValueError as error:
        of = f"sample {sample.id}" if sample.id else f"an answer to prompt {sample.prompt.id}"
        return Score.failed("invalid", f"returned what is no score for {of}: {error}")


def source_of(function: Callable[..., Any]) -> str:
    """Hash the file that a function is written in."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        function = function.func
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
    except TypeError:  # written in C: it comes with a version of Python or of a package
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


@functools.lru_cache(maxsize=64)
def load_function(spec: str) -> Callable[..., Any]:
    """Find `path/to/file.py:name` or `package.module:name`."""
    return load_named(spec, key="reward.function", error=RewardError)


def shape_of(spec: str) -> FunctionShape:
    """Return how to call the function `spec`. Raises RewardError if it cannot be called with a sample."""
    function = load_function(spec)
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
    return FunctionShape(
        is_async=inspect.iscoroutinefunction(inspect.unwrap(called)),
        takes_list=not fields and _is_list(annotation),
        fields=fields,
        source=source_of(function),
    )


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
