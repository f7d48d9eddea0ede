"""Tools: functions of the user that a model may call. Type hints and docstring become the schema that it is shown.

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first
            b: the second
        '''

    call ─▶ arguments checked ─▶ a process that can be killed ─▶ ToolReply, as text: a result, or what went wrong

Async functions run many at once in one process, others one at a time in several. No failure of a tool is ours: the
model is told of it in words. Files of tools are imported in small processes only, never in the one that drives a model.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from practicum.errors import RolloutError
from practicum.functions import load_named
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.rollout.agent.calls import Arguments, BadCall, Call
from practicum.rollout.agent.pools import DESCRIBE_S, Pools, num_processes

_KEY = "rollout.agent.tools"
_ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$")
_ARG = re.compile(r"^(?P<indent>\s+)\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)$")

ToolStatus = Literal["ok", "unknown", "malformed", "raised", "timeout", "lost"]


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What the model is told."""

    name: str | None
    text: str
    status: ToolStatus = "ok"


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """What is known of a tool without importing it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    is_async: bool

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and servers take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Tool:
    """A function, its schema, and a check of what it is called with. Raises `RolloutError` if it cannot be a tool."""

    def __init__(self, function: Callable[..., Any], where: str = "") -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._where = where or name
        text, about = _from_docstring(inspect.getdoc(function) or "")
        self._model = self._arguments_model(name, about)
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        is_async = inspect.iscoroutinefunction(inspect.unwrap(called))
        schema = self._model.model_json_schema()
        self.description = ToolDescription(name, text, _without_titles(schema), is_async)

    def bind(self, arguments: Arguments) -> dict[str, Any]:
        """The arguments as the function wants them; raises `ValueError` in words that the model can act on."""
        names = [name.removeprefix("given_") for name in self._model.model_fields]
        if isinstance(arguments, tuple):
            if len(arguments) > len(names):
                raise ValueError(f"takes {len(names)} arguments ({', '.join(names)}), not {len(arguments)}")
            arguments = dict(zip(names, arguments, strict=False))
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ValueError("; ".join(problems)) from None
        return {name.removeprefix("given_"): getattr(checked, name) for name in checked.model_fields_set}

    def call(self, bound: Mapping[str, Any]) -> Any:
        return self._function(**bound)

    def _arguments_model(self, name: str, about: Mapping[str, str]) -> type[BaseModel]:
        try:
            parameters = inspect.signature(self._function).parameters.values()
            hints = typing.get_type_hints(self._function, include_extras=True)
        except (ValueError, TypeError, NameError) as error:
            raise RolloutError(f"{_KEY}: {self._where} does not say what it takes: {error}.") from None
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise RolloutError(f"{_KEY}: {self._where} takes {parameter}: a tool takes named parameters only.")
            if parameter.name not in hints:
                raise RolloutError(f"{_KEY}: {self._where} needs a type hint for its parameter {parameter.name!r}.")
            told: dict[str, Any] = {"alias": parameter.name}
            if parameter.name in about:
                told["description"] = about[parameter.name]
            default = ... if parameter.default is parameter.empty else parameter.default
            # By other names within the model, which has methods of its own that a parameter may be called like.
            fields[f"given_{parameter.name}"] = (hints[parameter.name], Field(default, **told))
        try:
            return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        except PydanticUserError as error:
            reason = str(error).splitlines()[0]
            raise RolloutError(f"{_KEY}: {self._where}: a type hint cannot become a schema: {reason}") from None


def _from_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What comes before the parameters, and a line or more for each; as Google or Sphinx write them."""
    head: list[str] = []
    about: dict[str, str] = {}
    name, indent, in_args = "", "", False
    for line in text.splitlines():
        if _ARGS.match(line):
            in_args = True
        elif match := _SPHINX.match(line):
            name, in_args = match["name"], False
            about[name] = match["text"].strip()
        elif in_args and (match := _ARG.match(line)) and (not indent or match["indent"] == indent):
            name, indent = match["name"], match["indent"]
            about[name] = match["text"].strip()
        elif in_args and name and line.startswith(indent) and line.strip():
            about[name] = f"{about[name]} {line.strip()}".strip()
        elif in_args and line.strip() and not line.startswith(" "):
            in_args, name = False, "-"  # another section, such as Returns
        elif not about and name != "-" and not in_args:
            head.append(line)
    return "\n".join(head).strip(), about


def _without_titles(schema: Any) -> Any:
    """pydantic names everything; a model that reads the schema has no use for it."""
    if isinstance(schema, dict):
        kept = {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
        if kept.get("additionalProperties") is False:  # true of every tool, so it goes without saying
            del kept["additionalProperties"]
        return kept
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def as_text(value: Any) -> str:
    """What a tool returned, as the model reads it."""
    if isinstance(value, str):
        return value
    return pydantic_core.to_json(value, fallback=str, inf_nan_mode="constants").decode()


class ToolWork(Work):
    """What the processes do: a job is the index of a tool and its arguments, or ("describe",)."""

    def __init__(self, specs: Sequence[str]) -> None:
        self._specs = tuple(specs)
        self._tools: list[Tool] = []

    def prepare(self) -> None:
        self._tools = [Tool(load_named(spec, key=_KEY, error=RolloutError), spec) for spec in self._specs]

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run

    def _run(self, job: tuple[Any, ...]) -> Any:
        if job == ("describe",):
            return [tool.description for tool in self._tools]
        index, arguments = job
        try:
            bound = self._tools[index].bind(arguments)
        except ValueError as error:
            return "malformed", str(error)
        return "ok", as_text(self._tools[index].call(bound))


class AsyncToolWork(ToolWork):
    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async

    async def _run_async(self, job: tuple[int, Arguments]) -> Any:
        index, arguments = job
        try:
            bound = self._tools[index].bind(arguments)
        except ValueError as error:
            return "malformed", str(error)
        return "ok", as_text(await self._tools[index].call(bound))


@dataclass(slots=True)
class ToolBox:
    """The tools of one worker, and the processes they run in. Belongs to the event loop it is started in."""

    specs: Sequence[str]
    timeout_s: float
    num_processes: int = field(default_factory=num_processes)
    counts: Counter[str] = field(default_factory=Counter)
    """Calls by what came of them."""
    tools: list[ToolDescription] = field(default_factory=list)
    _pools: dict[bool, ProcessPool] = field(default_factory=dict)
    _all: Pools = field(default_factory=Pools)

    async def start(self) -> None:
        """Raises `RolloutError` where a tool cannot be used."""
        async with self._all.ended_on_failure(f"{_KEY}: the tools cannot be used"):
            plain = await self._all.plain(ToolWork(self.specs), self.num_processes)
            self.tools = (await plain.run(("describe",), DESCRIBE_S)).value
            names = [tool.name for tool in self.tools]
            for name in names:
                if names.count(name) > 1:
                    raise RolloutError(f"{_KEY}: two tools are called {name!r}: the model could not tell them apart.")
            self._pools[False] = plain
            if any(tool.is_async for tool in self.tools):
                self._pools[True] = await self._all.for_async(AsyncToolWork(self.specs))

    async def close(self) -> None:
        await self._all.close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools]

    async def call(self, call: Call | BadCall) -> ToolReply:
        """Never raises for what a tool or a model does."""
        reply = await self._call(call)
        self.counts[reply.status] += 1
        return reply

    async def call_all(self, calls: Sequence[Call | BadCall]) -> list[ToolReply]:
        """Side by side."""
        return list(await asyncio.gather(*map(self.call, calls)))

    async def _call(self, call: Call | BadCall) -> ToolReply:
        if isinstance(call, BadCall):
            return ToolReply(call.name, f"error: {call.reason}", "malformed")
        names = [tool.name for tool in self.tools]
        name = names[0] if call.name is None and len(names) == 1 else call.name
        if name not in names:
            asked = "say which tool" if name is None else f"there is no tool {name!r}"
            return ToolReply(name, f"error: {asked}; there are: {', '.join(names)}", "unknown")
        index = names.index(name)
        try:
            pool = self._pools[self.tools[index].is_async]
            result = await pool.run((index, call.arguments), self.timeout_s)
        except JobFailed as failure:
            status: ToolStatus = "raised" if failure.kind == "crashed" else failure.kind
            return ToolReply(name, f"error: {name} {failure.reason}", status)
        status, text = result.value
        return ToolReply(name, f"error: {name}: {text}" if status == "malformed" else text, status)


def describe_tools(specs: Sequence[str]) -> list[ToolDescription]:
    """What tools look like, for whoever writes prompts. Their files are imported in a process that is thrown away."""

    async def ask() -> list[ToolDescription]:
        box = ToolBox(specs, timeout_s=DESCRIBE_S, num_processes=1)
        try:
            await box.start()
        finally:
            await box.close()
        return box.tools

    if not specs:
        return []
    with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this one
        return thread.submit(asyncio.run, ask()).result()
