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
from collections.abc import Callable, Sequence
from typing import Any

from practicum.errors import RolloutError
from practicum.functions import load_named
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.rollout.agent.interaction import DESCRIBE_S, ChatMessage, Interaction, UserCode
from practicum.types import Prompt

_KEY = "rollout.agent.environment"
_NUM_RESETS = 2


Step = tuple[bytes, str | None, Any]
"""The result of a reset or a step: the environment as a pickle, what it said, the outcome."""


class EnvironmentWork(Work):
    """The work of the processes: a job is ("describe",), ("reset", fields of a prompt) or ("step", state, text)."""

    def __init__(self, spec: str, *, is_async: bool = False) -> None:
        self._spec = spec
        self._is_async = is_async
        self._class: Any = None

    def prepare(self) -> None:
        self._class = load_named(self._spec, key=_KEY, error=RolloutError, kind="class")
        missing = [name for name in ("reset", "step") if not callable(getattr(self._class, name, None))]
        if missing:
            raise RolloutError(f"{_KEY}={self._spec!r} has no method {' and '.join(missing)}.")

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async if self._is_async else self._run

    def _run(self, job: tuple[Any, ...]) -> Any:
        if job == ("describe",):
            return any(inspect.iscoroutinefunction(getattr(self._class, name)) for name in ("reset", "step"))
        environment, method, given = self._begun(job)
        return _step(environment, method(given))

    async def _run_async(self, job: tuple[Any, ...]) -> Any:
        environment, method, given = self._begun(job)
        said = method(given)  # one of the two methods may be a plain function
        return _step(environment, await said if inspect.isawaitable(said) else said)

    def _begun(self, job: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any], Any]:
        if job[0] == "reset":
            environment = self._class()
            return environment, environment.reset, Prompt(*job[1])
        environment = pickle.loads(job[1])
        return environment, environment.step, job[2]


def _step(environment: Any, said: Any) -> Step:
    if said is not None and not isinstance(said, str):
        raise TypeError(f"returned {type(said).__name__}, not text or None")
    outcome = environment.outcome() if hasattr(environment, "outcome") else None
    return pickle.dumps(environment), said, outcome


class Environments(UserCode):
    """The processes in which the environments of one worker run."""

    role = "user"
    speaks_first = True
    complaint = f"{_KEY}: the environment cannot be used"
    _pool_of_steps: ProcessPool

    def __init__(self, spec: str, timeout_s: float, num_processes: int | None = None) -> None:
        super().__init__(timeout_s, num_processes)
        self.spec = spec

    def interaction(self) -> Interaction:
        return _EnvironmentInteraction(self)

    async def _start(self) -> None:
        pool = await self._pool(EnvironmentWork(self.spec), is_async=False)
        if (await pool.run(("describe",), DESCRIBE_S)).value:
            await pool.close()
            pool = await self._pool(EnvironmentWork(self.spec, is_async=True), is_async=True)
        self._pool_of_steps = pool

    async def run(self, *job: Any) -> Step:
        """Raise `JobFailed` where the reset or step fails."""
        step: Step = (await self._pool_of_steps.run(job, self._timeout_s)).value
        return step


class _EnvironmentInteraction(Interaction):
    def __init__(self, environments: Environments) -> None:
        super().__init__()
        self._environments = environments
        self._state = b""

    async def begin(self, prompt: Prompt) -> str | None:
        """Raise `RolloutError` where the reset fails: without a beginning there is nothing to go on with."""
        for attempt in range(1, _NUM_RESETS + 1):
            try:
                self._state, said, self.outcome = await self._environments.run("reset", prompt.__reduce__()[1])
                return said
            except JobFailed as failure:
                if failure.kind == "raised" or attempt == _NUM_RESETS:
                    what = f"{_KEY}={self._environments.spec!r}: reset for prompt {prompt.id} {failure.reason}"
                    raise RolloutError(what) from failure
        raise AssertionError("unreachable")

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        try:
            self._state, said, self.outcome = await self._environments.run("step", self._state, text)
            self.counts["ok"] += 1
        except JobFailed as failure:  # something that was said; the environment stays as it was
            self.counts["raised" if failure.kind == "crashed" else failure.kind] += 1
            said = f"error: {failure.reason}"
        return None if said is None else [{"role": "user", "content": said}]
