"""Calls of tools in the text of an answer while it comes: splits content from calls.

    text ─▶ held back while it may be part of a call ─▶ content, as soon as it cannot be
                                                    └▶ a call, when it is closed and well formed

A call is returned whole: until its end nobody knows whether it is one, and what is none stays content.
"""

from __future__ import annotations

import json
import uuid

from practicum.rollout.agent.tools import HERMES_CLOSE, HERMES_OPEN, Call, hermes
from practicum.rollout.schemas import CalledFunction, ToolCall
from practicum.rollout.server.detokenizer import num_doubtful

TAGS = (HERMES_OPEN, HERMES_CLOSE)


class CallParser:
    """Parses one answer. The content of all parts joined is the text without its calls, and without the space around
    them unless there are words on both sides. A text without calls stays as it is."""

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a call
        self._space = ""  # returned if words follow
        self._has_words = False
        self._num_calls = 0

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Take more text; return the content and the calls that are certain now, or all that is left."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while (call := self._next_closed(content)) is not None:
            calls.append(call)
        if is_last:
            self._take(self._held, content)
            self._held = ""
            if not self._num_calls:
                content.append(self._space)
            self._space = ""
        return "".join(content), calls

    def _next_closed(self, content: list[str]) -> ToolCall | None:
        """Return the next call, after appending the content before it; None when nothing else is closed."""
        while True:
            start = self._held.find(HERMES_OPEN)
            if start < 0:
                start = len(self._held) - num_doubtful(self._held, [HERMES_OPEN])
            self._take(self._held[:start], content)
            self._held = self._held[start:]
            end = self._held.find(HERMES_CLOSE)
            if not self._held.startswith(HERMES_OPEN) or end < 0:
                return None
            end += len(HERMES_CLOSE)
            written, self._held = self._held[:end], self._held[end:]
            (found,) = hermes(written)
            if isinstance(found, Call) and found.name:
                self._num_calls += 1
                return ToolCall(
                    id=f"call_{uuid.uuid4().hex[:24]}",
                    type="function",
                    function=CalledFunction(name=found.name, arguments=json.dumps(found.arguments, ensure_ascii=False)),
                )
            self._take(written, content)

    def _take(self, text: str, content: list[str]) -> None:
        """Append text as content, but for the space at its end, which may come before a call."""
        words = text.rstrip()
        space = text[len(words) :]
        if words:
            if self._num_calls and not self._has_words:
                self._space, words = "", words.lstrip()
            content.append(self._space + words)
            self._space, self._has_words = "", True
        self._space += space
