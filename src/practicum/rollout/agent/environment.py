"""Environments: a class of the user's that answers the model's turns, and remembers what was said.

    class Guess:
        def reset(self, prompt: Prompt) -> str | None: ...     what is said first, after the prompt; None: nothing
        def step(self, text: str) -> str | None: ...           what is said to a turn of the model; None: it is over
        def outcome(self) -> Any: ...                          may be left out: for the reward function, see below

Each conversation has an object of its own. Its methods (sync or async) run in processes that can be killed, whichever
is free: between two steps the object travels as a pickle, and after a step that failed it is as it was before. What
`outcome` returned last is found in `sample.prompt.metadata["environment"]`.
"""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from practicum.errors import RolloutError
from practicum.functions import load_named
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.rollout.agent.pools import DESCRIBE_S, Pools, num_processes
from practicum.types import Prompt

_KEY = "rollout.agent.environment"
_RESETS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a reset or a step."""

    state: bytes
    said: str | None
    outcome: Any = None


class EnvironmentWork(Work):
    """What the processes do: a job is ("describe",), ("reset", fields of a prompt) or ("step", state, text)."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._class: Any = None

    def prepare(self) -> None:
        self._class = load_named(self._spec, key=_KEY, error=RolloutError, kind="class")
        missing = [name for name in ("reset", "step") if not callable(getattr(self._class, name, None))]
        if missing:
            raise RolloutError(f"{_KEY}={self._spec!r} has no method {' and '.join(missing)}.")

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run

    def _run(self, job: tuple[Any, ...]) -> Any:
        if job == ("describe",):
            return any(inspect.iscoroutinefunction(getattr(self._class, name)) for name in ("reset", "step"))
        environment, method, given = self._begun(job)
        return _step(environment, method(given))

    def _begun(self, job: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any], Any]:
        if job[0] == "reset":
            environment = self._class()
            return environment, environment.reset, Prompt(*job[1])
        environment = pickle.loads(job[1])
        return environment, environment.step, job[2]


class AsyncEnvironmentWork(EnvironmentWork):
    """One of the two methods may be a plain function."""

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async

    async def _run_async(self, job: tuple[Any, ...]) -> Any:
        environment, method, given = self._begun(job)
        said = method(given)
        return _step(environment, await said if inspect.isawaitable(said) else said)


def _step(environment: Any, said: Any) -> Step:
    if said is not None and not isinstance(said, str):
        raise TypeError(f"returned {type(said).__name__}, not text or None")
    outcome = environment.outcome() if hasattr(environment, "outcome") else None
    return Step(pickle.dumps(environment), said, outcome)


@dataclass(slots=True)
class EnvironmentBox:
    """The processes that environments of one worker run in. Belongs to the event loop it is started in."""

    spec: str
    timeout_s: float
    num_processes: int = field(default_factory=num_processes)
    counts: Counter[str] = field(default_factory=Counter)
    """Steps by what came of them."""
    _pool: ProcessPool | None = None
    _all: Pools = field(default_factory=Pools)

    async def start(self) -> None:
        """Raises `RolloutError` where the class cannot be used."""
        async with self._all.ended_on_failure(f"{_KEY}: the environment cannot be used"):
            pool = await self._all.plain(EnvironmentWork(self.spec), self.num_processes)
            if (await pool.run(("describe",), DESCRIBE_S)).value:
                await pool.close()
                pool = await self._all.for_async(AsyncEnvironmentWork(self.spec))
            self._pool = pool

    async def close(self) -> None:
        await self._all.close()

    async def reset(self, prompt: Prompt) -> Step:
        """Raises `RolloutError`: without a beginning there is nothing to go on with."""
        for attempt in range(1, _RESETS + 1):
            try:
                return await self._run(("reset", prompt.__reduce__()[1]))
            except JobFailed as failure:
                if failure.kind == "raised" or attempt == _RESETS:
                    what = f"{_KEY}={self.spec!r}: reset for prompt {prompt.id} {failure.reason}"
                    raise RolloutError(what) from failure
        raise AssertionError("unreachable")

    async def step(self, state: bytes, text: str) -> Step:
        """A step that fails is told as what was said, and leaves the environment as it was."""
        try:
            step = await self._run(("step", state, text))
        except JobFailed as failure:
            self.counts["raised" if failure.kind == "crashed" else failure.kind] += 1
            return Step(state, f"error: {failure.reason}")
        self.counts["ok"] += 1
        return step

    async def _run(self, job: tuple[Any, ...]) -> Step:
        assert self._pool is not None, "used before start"
        step: Step = (await self._pool.run(job, self.timeout_s)).value
        return step
