"""How models write calls of tools: one format each, found in the text of a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any] | tuple[str, ...]
"""By name, or in the order of the tool's parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a model asks for. Without a name it means the only tool there is."""

    name: str | None
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class BadCall:
    """What looks like a call and is none; `reason` is told to the model."""

    reason: str
    name: str | None = None


CallFormat = Callable[[str], list[Call | BadCall]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES = re.compile(f"{HERMES_OPEN}(.*?){HERMES_CLOSE}", re.DOTALL)
_PLAIN = re.compile(r"\[(?:\s*(\w+)\s*:)?([^\[\]]*)\]")


def hermes(text: str) -> list[Call | BadCall]:
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them. One that is not closed is a
    bad call: the model meant to call something, and learns why nothing came of it."""
    found = [_from_json(match.group(1)) for match in _HERMES.finditer(text)]
    if HERMES_OPEN in _HERMES.sub("", text):
        found.append(BadCall("a <tool_call> is not closed with </tool_call>"))
    return found


def _from_json(text: str) -> Call | BadCall:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not valid JSON: {error}")
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    arguments = fields.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments are not valid JSON: {error}", fields["name"])
    if not isinstance(arguments, dict):
        return BadCall('"arguments" is not an object', fields["name"])
    return Call(fields["name"], arguments)


def plain(text: str) -> list[Call | BadCall]:
    """`[add: 1, 2]`, or `[1, 2]` where there is only one tool: for models with few characters to their name."""
    found: list[Call | BadCall] = []
    for match in _PLAIN.finditer(text):
        inside = match.group(2).strip()
        found.append(Call(match.group(1), tuple(part.strip() for part in inside.split(",")) if inside else ()))
    return found


CALL_FORMATS: dict[str, CallFormat] = {"hermes": hermes, "plain": plain}
