"""Environments: a class of the user's that answers the model's turns, and remembers what was said.

    class Guess:
        def reset(self, prompt: Prompt) -> str | None: ...     what is said first, after the prompt; None: nothing
        def step(self, text: str) -> str | None: ...           what is said to a turn of the model; None: it is over
        def outcome(self) -> Any: ...                          may be left out: for the reward function, see below

Each conversation has an object of its own. Its methods (the first two sync or async) run in processes that can be
killed, whichever is free: between two steps the object travels as a pickle. What `outcome` returned last is found in
`sample.prompt.metadata["environment"]`.

What is wrong with a turn of the model is said by returning text. A method that raises, hangs, crashes or returns
something else has failed: the conversation ends without a score, as if it could not be graded. A reset that failed is
tried once more, with a new object. A step is not: it may have had effects elsewhere.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from practicum.errors import RolloutError
from practicum.functions import load_named
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.processes.child import described
from practicum.rollout.agent.interaction import DESCRIBE_S, ChatMessage, Interaction, InteractionFailed, UserCode
from practicum.types import Prompt, ScoreStatus

_KEY = "rollout.agent.environment"
_NUM_RESETS = 2
_SHOWN = 60

Step = tuple[bytes, str | None, bytes]
"""The result of a reset or a step: the environment as a pickle, what it said, the outcome as a pickle."""


class EnvironmentWork(Work):
    """The work of the processes: a job is ("describe",), ("reset", fields of a prompt) or ("step", state, text).

    The last two become a `Step`, or a text that names a method and says what is wrong with what it did.
    """

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
        return _step(environment, job[0], method(given))

    async def _run_async(self, job: tuple[Any, ...]) -> Any:
        environment, method, given = self._begun(job)
        said = method(given)  # one of the two methods may be a plain function
        return _step(environment, job[0], await said if inspect.isawaitable(said) else said)

    def _begun(self, job: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any], Any]:
        if job[0] == "reset":
            environment = self._class()
            return environment, environment.reset, Prompt(*job[1])
        environment = pickle.loads(job[1])
        return environment, environment.step, job[2]


def _step(environment: Any, method: str, said: Any) -> Step | str:
    if said is not None and not isinstance(said, str):
        hint = "; rewards are for the reward function, which reads the outcome" if isinstance(said, tuple) else ""
        return f"{method} returned {_shown(said)}, and must return text, or None where nothing is said{hint}"
    try:
        said = None if said is None else said.encode().decode()  # a plain string, whatever class it had
    except UnicodeEncodeError as error:
        return f"{method} returned text that is not valid Unicode: {error}"
    try:
        outcome = environment.outcome() if hasattr(environment, "outcome") else None
    except Exception as error:
        return f"outcome raised {described(error)}"
    if inspect.isawaitable(outcome):
        return "outcome returned a coroutine, and must be a plain function"
    try:
        packed = pickle.dumps(outcome)
    except Exception as error:
        return f"outcome returned {_shown(outcome)}, which no other process can be sent: {described(error)}"
    try:
        return pickle.dumps(environment), said, packed
    except Exception as error:
        return f"{method} left an object that no other process can be sent: {described(error)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + ' ...'}"


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

    async def run(self, method: str, *given: Any) -> tuple[bytes, str | None, Any]:
        """Return the environment as a pickle, what it says and the outcome. Raise `InteractionFailed`."""
        name = f"{_KEY}={self.spec}: {self.spec.rpartition(':')[2]}."
        try:
            step: Step | str = (await self._pool_of_steps.run((method, *given), self._timeout_s)).value
        except JobFailed as failure:
            status: ScoreStatus = "timeout" if failure.kind == "timeout" else "infra_error"
            hint = "; a mistake of the model is answered by returning text" if failure.kind == "raised" else ""
            raise InteractionFailed(status, f"{name}{method} {failure.reason}{hint}") from failure
        if isinstance(step, str):
            raise InteractionFailed("infra_error", f"{name}{step}")
        try:
            return step[0], step[1], pickle.loads(step[2])
        except Exception as error:  # of a class that only the processes of environments know
            what = f"{name}outcome returned something that no other process can read ({type(error).__name__}: {error})"
            raise InteractionFailed("infra_error", f"{what}: return numbers, texts, lists and dicts") from error


class _EnvironmentInteraction(Interaction):
    def __init__(self, environments: Environments) -> None:
        super().__init__()
        self._environments = environments
        self._state = b""

    async def begin(self, prompt: Prompt) -> str | None:
        for attempt in range(1, _NUM_RESETS + 1):
            try:
                return await self._run("reset", prompt.__reduce__()[1])
            except InteractionFailed:
                if attempt == _NUM_RESETS:
                    raise
        raise AssertionError("unreachable")

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        try:
            said = await self._run("step", self._state, text)
        except InteractionFailed as failure:
            self.counts[failure.status] += 1
            raise
        self.counts["ok"] += 1
        return None if said is None else [{"role": "user", "content": said}]

    async def _run(self, method: str, *given: Any) -> str | None:
        self._state, said, self.outcome = await self._environments.run(method, *given)
        return said
