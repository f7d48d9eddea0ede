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
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
    _make_importable(path.parent)
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
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise RewardError(f"reward.function={spec!r}: import raised {type(error).__name__}: {error}") from error


def _make_importable(folder: Path) -> None:
    """A reward file may import its neighbours, as it could if it were run."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


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


class _TookTooLong(Exception):
    """Our deadline passed; not to be confused with a TimeoutError the function itself raises."""


_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
_MOST_TIMEOUTS_IN_A_ROW = 8
_GRACE_S = 1.0


class FunctionGrader:
    """Calls a reward function on samples, each within its deadline. Grades come back in the samples' order.

    The function runs in a thread kept for it. A call that does not come back is left behind there, and another thread
    takes over; after several in a row the rest of the samples are not tried, so that the batch ends within its time.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._thread: _Calls | None = None

    def grade(self, samples: Sequence[Sample]) -> list[Score]:
        if not samples:
            return []
        if self._function.takes_list:
            return self._whole_list(list(samples))
        if self._function.is_async:
            return self._all_at_once(samples)
        return self._one_by_one(samples)

    def _one_by_one(self, samples: Sequence[Sample]) -> list[Score]:
        scores: list[Score] = []
        in_a_row = 0
        for sample in samples:
            if in_a_row == _MOST_TIMEOUTS_IN_A_ROW:
                reason = f"not tried: {self._function.name} hung {in_a_row} times in a row"
                scores.append(Score(None, status="timeout", reason=reason))
                continue
            try:
                scores.append(self._score(self._result(partial(self._function.function, sample), self._timeout_s)))
            except Exception as error:
                scores.append(self._failed(error))
            in_a_row = in_a_row + 1 if scores[-1].status == "timeout" else 0
        return scores

    def _all_at_once(self, samples: Sequence[Sample]) -> list[Score]:
        scores: list[Score | None] = [None] * len(samples)

        async def one(index: int, sample: Sample) -> None:
            try:
                scores[index] = self._score(await self._function.function(sample))
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # also SystemExit: it is this sample's failure, not ours
                scores[index] = self._failed(error)

        async def all_of_them() -> None:
            tasks = [asyncio.create_task(one(index, sample)) for index, sample in enumerate(samples)]
            await asyncio.wait(tasks, timeout=self._timeout_s)

        with suppress(_TookTooLong):  # one that blocks the loop, or will not be cancelled
            self._result(lambda: asyncio.run(all_of_them()), self._timeout_s + _GRACE_S)
        return [score or self._failed(_TookTooLong()) for score in list(scores)]

    def _whole_list(self, samples: list[Sample]) -> list[Score]:
        def call() -> Any:
            values = self._function.function(samples)
            return asyncio.run(values) if inspect.iscoroutine(values) else values

        try:
            values = list(self._result(call, self._timeout_s * len(samples)))
        except Exception as error:
            return [self._failed(error)] * len(samples)
        if len(values) != len(samples):
            reason = f"{self._function.name} returned {len(values)} scores for {len(samples)} samples"
            return [Score(None, status="invalid", reason=reason)] * len(samples)
        return [self._score(value) for value in values]

    def _result(self, call: Callable[[], Any], timeout_s: float) -> Any:
        if self._thread is None:
            self._thread = SimpleQueue()
            threading.Thread(target=_serve, args=(self._thread,), daemon=True, name="reward-function").start()
        future: Future[Any] = Future()
        self._thread.put((call, future))
        if not wait([future], timeout_s).done:
            self._thread.put(None)  # it ends once the call does, if ever
            self._thread = None
            raise _TookTooLong
        return future.result()

    def _score(self, value: Any) -> Score:
        if isinstance(value, Score):
            return value
        try:
            return Score(float(value))
        except (TypeError, ValueError) as error:
            return Score(None, status="invalid", reason=f"{self._function.name} returned {value!r}: {error}")

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, _TookTooLong):
            reason = f"{self._function.name} took longer than {self._timeout_s:g} s"
            return Score(None, status="timeout", reason=reason)
        return Score(None, status="invalid", reason=f"{self._function.name} raised {type(error).__name__}: {error}")


def _serve(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit: the caller turns whatever it is into a failed score
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
