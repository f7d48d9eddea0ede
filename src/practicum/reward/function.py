"""Reward functions of the user: found, checked, and called so that none of them can take the run down with it.

    def grade(sample: Sample) -> Score | float            one sample
    async def grade(sample: Sample) -> Score | float      one sample, many at once
    def grade(samples: list[Sample]) -> list[...]         all at once (also async)

An exception becomes a score with status `invalid`, a function that takes too long one with status `timeout`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, get_origin

from practicum.errors import RewardError
from practicum.types import Sample, Score


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function and what its signature says of how to call it."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    takes_list: bool


def load_function(spec: str) -> RewardFunction:
    """Find `path/to/file.py:name` or `package.module:name`, and check that it can be called with a sample."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise RewardError(f"reward.function={spec!r}: write path/to/file.py:function or package.module:function.")
    module = _from_file(place, spec) if place.endswith(".py") else _from_import(place, spec)
    function = getattr(module, name, None)
    if not callable(function):
        defined = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise RewardError(
            f"reward.function={spec!r}: {place} has no function {name!r}; it defines {', '.join(defined) or 'none'}."
        )
    return _checked(spec, function)


def _from_file(place: str, spec: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise RewardError(f"reward.function={spec!r}: file {place} does not exist (looked from {Path.cwd()}).")
    module_name = f"practicum_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward.function={spec!r}: {place} raised {type(error).__name__}: {error}") from error
    return module


def _from_import(place: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise RewardError(f"reward.function={spec!r}: import raised {type(error).__name__}: {error}") from error


def _checked(spec: str, function: Callable[..., Any]) -> RewardFunction:
    signature = inspect.signature(function)
    try:
        signature.bind(object())
    except TypeError as error:
        raise RewardError(
            f"reward.function={spec!r} has the signature {signature} and cannot be called with one sample ({error}): "
            "write def grade(sample) or def grade(samples: list[Sample])."
        ) from None
    annotation = next(iter(signature.parameters.values())).annotation
    return RewardFunction(
        name=spec,
        function=function,
        is_async=inspect.iscoroutinefunction(function),
        takes_list=_is_list(annotation),
    )


def _is_list(annotation: Any) -> bool:
    if isinstance(annotation, str):  # under `from __future__ import annotations`
        return annotation.split("[")[0].rpartition(".")[2] in ("list", "List", "Sequence")
    return annotation is list or get_origin(annotation) in (list, Sequence)


class FunctionGrader:
    """Calls a reward function on samples, each within its deadline. Grades come back in the samples' order."""

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._thread: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None

    def grade(self, samples: Sequence[Sample]) -> list[Score]:
        if not samples:
            return []
        if self._function.takes_list:
            return self._whole_list(list(samples))
        if self._function.is_async:
            return asyncio.run(self._all_at_once(samples))
        return [self._in_time(lambda sample=sample: self._function.function(sample)) for sample in samples]  # type: ignore[misc]

    def _whole_list(self, samples: list[Sample]) -> list[Score]:
        def call() -> Any:
            values = self._function.function(samples)
            return asyncio.run(values) if inspect.isawaitable(values) else values  # type: ignore[arg-type]

        try:
            values = list(self._result(call, self._timeout_s * len(samples)))
        except Exception as error:
            return [self._failed(error)] * len(samples)
        if len(values) != len(samples):
            reason = f"{self._function.name} returned {len(values)} scores for {len(samples)} samples"
            return [Score(None, status="invalid", reason=reason)] * len(samples)
        return [self._score(value) for value in values]

    async def _all_at_once(self, samples: Sequence[Sample]) -> list[Score]:
        async def one(sample: Sample) -> Score:
            try:
                return self._score(await asyncio.wait_for(self._function.function(sample), self._timeout_s))
            except Exception as error:
                return self._failed(error)

        return list(await asyncio.gather(*(one(sample) for sample in samples)))

    def _in_time(self, call: Callable[[], Any]) -> Score:
        try:
            return self._score(self._result(call, self._timeout_s))
        except Exception as error:
            return self._failed(error)

    def _result(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Run a call in a thread kept for this; one that is stuck in it is left behind and replaced."""
        if self._thread is None:
            self._thread = SimpleQueue()
            threading.Thread(target=_serve, args=(self._thread,), daemon=True, name="reward-function").start()
        future: Future[Any] = Future()
        self._thread.put((call, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.done():
                self._thread = None
            raise

    def _score(self, value: Any) -> Score:
        if isinstance(value, Score):
            return value
        try:
            return Score(float(value))
        except (TypeError, ValueError) as error:
            return Score(None, status="invalid", reason=f"{self._function.name} returned {value!r}: {error}")

    def _failed(self, error: Exception) -> Score:
        if isinstance(error, TimeoutError):
            reason = f"{self._function.name} took longer than {self._timeout_s:g} s"
            return Score(None, status="timeout", reason=reason)
        return Score(None, status="invalid", reason=f"{self._function.name} raised {type(error).__name__}: {error}")


def _serve(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        call, future = calls.get()
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit: the caller turns whatever it is into a failed score
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
