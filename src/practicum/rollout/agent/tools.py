"""Tools: functions of the user that a model may call. Type hints and docstring become the schema that it is shown.

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first
            b: the second
        '''

    call ─▶ arguments checked ─▶ a process that can be killed ─▶ ToolReply, as text: a result, or what went wrong

Models write calls in one of two formats, found in the text of a turn. Async functions run many at once in one process,
others one at a time in several. Files of tools are imported in small processes only, never in the one that drives a
model.

A mistake of the model is a reply to it in words: a call that cannot be read, an unknown tool, wrong arguments, and a
`ToolError` that the tool raises. A tool that raises anything else, hangs or crashes has failed: the conversation ends
without a score, as if it could not be graded. It is not called again, since it may have had effects elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from practicum.errors import RolloutError, ToolError
from practicum.functions import load_named
from practicum.processes import JobFailed, ProcessPool, Work
from practicum.rollout.agent.interaction import DESCRIBE_S, ChatMessage, Interaction, InteractionFailed, UserCode

_KEY = "rollout.agent.tools"
_ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$")
_ARG = re.compile(r"^(?P<indent>\s+)\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)$")

ToolStatus = Literal["ok", "unknown", "malformed", "refused", "timeout", "infra_error"]
Arguments = Mapping[str, Any] | tuple[str, ...]
"""Arguments by name, or in the order of the tool's parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model has written. Without a name it means the only tool there is."""

    name: str | None
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class BadCall:
    """A text that looks like a call and is none; the model reads the `reason`."""

    reason: str
    name: str | None = None


CallFormat = Callable[[str], list[Call | BadCall]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES = re.compile(f"{HERMES_OPEN}(.*?){HERMES_CLOSE}", re.DOTALL)
_PLAIN = re.compile(r"\[(?:\s*(\w+)\s*:)?([^\[\]]*)\]")


def hermes(text: str) -> list[Call | BadCall]:
    """Find `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them. One that is not
    closed is a bad call: the model meant to call something, and learns why nothing came of it."""
    found = [_from_json(match.group(1)) for match in _HERMES.finditer(text)]
    if HERMES_OPEN in _HERMES.sub("", text):
        found.append(BadCall("a <tool_call> is not closed with </tool_call>"))
    return found


def _loads(text: str) -> Any:
    """Return what JSON says. Half a surrogate pair, which JSON can write and no text can hold, is a ValueError."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _from_json(text: str) -> Call | BadCall:
    try:
        fields = _loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not valid JSON: {error}")
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    arguments = fields.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        try:
            arguments = _loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments are not valid JSON: {error}", fields["name"])
    if not isinstance(arguments, dict):
        return BadCall('"arguments" is not an object', fields["name"])
    return Call(fields["name"], arguments)


def plain(text: str) -> list[Call | BadCall]:
    """Find `[add: 1, 2]`, or `[1, 2]` where there is only one tool: for models whose vocabulary has few characters."""
    found: list[Call | BadCall] = []
    for match in _PLAIN.finditer(text):
        inside = match.group(2).strip()
        found.append(Call(match.group(1), tuple(part.strip() for part in inside.split(",")) if inside else ()))
    return found


CALL_FORMATS: dict[str, CallFormat] = {"hermes": hermes, "plain": plain}


@dataclass(frozen=True, slots=True)
class ToolReply:
    """The reply to one call."""

    name: str | None
    text: str  # as the model reads it; with the last two statuses why the tool failed
    status: ToolStatus = "ok"


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """A tool as others know it without importing it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    is_async: bool

    @property
    def schema(self) -> dict[str, Any]:
        """The schema as chat templates and servers take it."""
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
        """Return the arguments as the function wants them; raise `ValueError` in words that the model can act on."""
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
            options: dict[str, Any] = {"alias": parameter.name}
            if parameter.name in about:
                options["description"] = about[parameter.name]
            default = ... if parameter.default is parameter.empty else parameter.default
            # By other names within the model, which has methods of its own that a parameter may be called like.
            fields[f"given_{parameter.name}"] = (hints[parameter.name], Field(default, **options))
        try:
            return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        except PydanticUserError as error:
            reason = str(error).splitlines()[0]
            raise RolloutError(f"{_KEY}: {self._where}: a type hint cannot become a schema: {reason}") from None


def _from_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split into what comes before the parameters and the text of each, as Google or Sphinx write them."""
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
    """Drop the titles that pydantic gives to everything: a model that reads the schema has no use for them."""
    if isinstance(schema, dict):
        kept = {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
        if kept.get("additionalProperties") is False:  # true of every tool, so it goes without saying
            del kept["additionalProperties"]
        return kept
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def as_text(value: Any) -> str:
    """Return a tool's result as the model reads it."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # what is no valid Unicode, no tokenizer takes
    return pydantic_core.to_json(value, fallback=str, inf_nan_mode="constants").decode()


class ToolWork(Work):
    """The work of the processes: a job is the index of a tool and its arguments, or ("describe",)."""

    def __init__(self, specs: Sequence[str], *, is_async: bool = False) -> None:
        self._specs = tuple(specs)
        self._is_async = is_async
        self._tools: list[Tool] = []

    def prepare(self) -> None:
        self._tools = [Tool(load_named(spec, key=_KEY, error=RolloutError), spec) for spec in self._specs]

    @property
    def run(self) -> Callable[[Any], Any]:
        return self._run_async if self._is_async else self._run

    def _run(self, job: tuple[Any, ...]) -> Any:
        if job == ("describe",):
            return [tool.description for tool in self._tools]
        call = self._call(*job)
        try:
            return ("malformed", call) if isinstance(call, str) else ("ok", as_text(call()))
        except ToolError as error:
            return "refused", as_text(str(error))

    async def _run_async(self, job: tuple[int, Arguments]) -> Any:
        call = self._call(*job)
        try:
            return ("malformed", call) if isinstance(call, str) else ("ok", as_text(await call()))
        except ToolError as error:
            return "refused", as_text(str(error))

    def _call(self, index: int, arguments: Arguments) -> Callable[[], Any] | str:
        """Return the function with its arguments, or what is wrong with them."""
        try:
            return functools.partial(self._tools[index].call, self._tools[index].bind(arguments))
        except ValueError as error:
            return str(error)


class Tools(UserCode):
    """The tools of one worker, and the processes in which they run."""

    role = "tool"
    speaks_first = False
    complaint = f"{_KEY}: the tools cannot be used"

    def __init__(
        self,
        specs: Sequence[str],
        timeout_s: float,
        call_format: str = "hermes",
        num_processes: int | None = None,
    ) -> None:
        super().__init__(timeout_s, num_processes)
        self._specs = specs
        self._call_format = CALL_FORMATS[call_format]
        self._by_kind: dict[bool, ProcessPool] = {}  # of async functions, and of others
        self.tools: list[ToolDescription] = []

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools]

    def interaction(self) -> Interaction:
        return _ToolInteraction(self, self._call_format)

    async def _start(self) -> None:
        plain = await self._pool(ToolWork(self._specs), is_async=False)
        self.tools = (await plain.run(("describe",), DESCRIBE_S)).value
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise RolloutError(f"{_KEY}: two tools are called {name!r}: the model could not tell them apart.")
        self._by_kind[False] = plain
        if any(tool.is_async for tool in self.tools):
            self._by_kind[True] = await self._pool(ToolWork(self._specs, is_async=True), is_async=True)

    async def call(self, call: Call | BadCall) -> ToolReply:
        """Never raise for what a tool or a model does."""
        if isinstance(call, BadCall):
            return ToolReply(call.name, f"error: {call.reason}", "malformed")
        names = [tool.name for tool in self.tools]
        name = names[0] if call.name is None and len(names) == 1 else call.name
        if name not in names:
            asked = "say which tool" if name is None else f"there is no tool {name!r}"
            return ToolReply(name, f"error: {asked}; there are: {', '.join(names)}", "unknown")
        index = names.index(name)
        try:
            pool = self._by_kind[self.tools[index].is_async]
            result = await pool.run((index, call.arguments), self._timeout_s)
        except RecursionError:
            return ToolReply(name, f"error: {name}: the arguments are nested too deeply", "malformed")
        except JobFailed as failure:
            why = f"{_KEY}={self._specs[index]}: {name} {failure.reason}"
            if failure.kind == "raised":
                why += ", which is no practicum.ToolError: raise that for a mistake of the model"
            return ToolReply(name, why, "timeout" if failure.kind == "timeout" else "infra_error")
        status, text = result.value
        return ToolReply(name, text if status == "ok" else f"error: {name}: {text}", status)


class _ToolInteraction(Interaction):
    def __init__(self, tools: Tools, call_format: CallFormat) -> None:
        super().__init__()
        self._tools = tools
        self._call_format = call_format

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[ChatMessage] | None:
        calls = self._call_format(marked)
        if not calls or is_last:
            return [] if calls else None
        replies = await asyncio.gather(*map(self._tools.call, calls))
        self.counts.update(reply.status for reply in replies)
        for reply in replies:
            if reply.status in ("timeout", "infra_error"):
                raise InteractionFailed(reply.status, reply.text)
        return [{"role": "tool", "name": reply.name or "", "content": reply.text} for reply in replies]


def describe_tools(specs: Sequence[str]) -> list[ToolDescription]:
    """Return the descriptions of tools, for those who write prompts. A process that ends then imports their files."""

    async def ask() -> list[ToolDescription]:
        tools = Tools(specs, timeout_s=DESCRIBE_S, num_processes=1)
        try:
            await tools.start()
        finally:
            await tools.close()
        return tools.tools

    if not specs:
        return []
    from practicum.controller.loop import run_sync  # not for the processes of tools, which import this file

    return run_sync(ask())
