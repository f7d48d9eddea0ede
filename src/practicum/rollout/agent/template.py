"""The chat template's tokens between two turns of the model: they close its turn, hold what others say, open its next.

    ... <assistant> what the model wrote <end> | <tool> result <end> <assistant> | what it writes next ...
                                                 `between`

What the model wrote is never rendered again: its text might be tokenised differently, and the trainer would then see
other tokens than the engine did. The chat template is rendered for a short conversation in which a fixed text stands
for the model's turn, and what comes after that text is taken. Control tokens in what others say are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from practicum.control_tokens import ControlTokens
from practicum.errors import ModelError
from practicum.rollout.agent.interaction import ChatMessage

_STAND_IN = "practicum-turn-of-the-model"
_QUESTION = {"role": "user", "content": "?"}
_TURN = {"role": "assistant", "content": _STAND_IN}
# Some templates take a tool's result only after a call, which they then write themselves after the stand-in.
_CALL = {"type": "function", "id": "call00000", "function": {"name": "tool", "arguments": {}}}


class TurnTemplate:
    """The chat template of one tokenizer, with one set of tools."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.control_tokens = ControlTokens(tokenizer)
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None

    def between(self, written: Sequence[int] | NDArray[np.int32], said: Sequence[ChatMessage]) -> NDArray[np.int32]:
        """Return the tokens from the end of what the model has written to where it goes on."""
        closing, ids = self._after_turn(self.control_tokens.mark(said))
        # The model may have written the end of its turn itself, or a part of it.
        for overlap in range(min(len(closing), len(written)), 0, -1):
            if list(written[-overlap:]) == ids[:overlap]:
                return np.array(ids[overlap:], np.int32)
        return np.array(ids, np.int32)

    def in_text(self, said: Sequence[ChatMessage]) -> NDArray[np.int32]:
        """Return the same for a prompt that is plain text: what is said stands on lines of its own."""
        text = "".join(f"\n{message['content']}" for message in self.control_tokens.mark(said)) + "\n"
        return np.array(self._ids(text), np.int32)

    def render(self, messages: Sequence[ChatMessage], *, opens_turn: bool = False) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,
            add_generation_prompt=opens_turn,
            tokenize=False,
        )
        return rendered

    def _after_turn(self, said: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
        """Return the tokens that close the model's turn, and all tokens from there on, those included."""
        try:
            whole = self.render([_QUESTION, _TURN, *said], opens_turn=True)
            before = self.render([_QUESTION, _TURN])
        except TemplateError:
            return self._after_call(said)
        head, stand_in, tail = whole.partition(_STAND_IN)
        if not stand_in:
            raise ModelError("the tokenizer's chat template leaves out what the assistant said: it cannot hold turns.")
        closing = before.partition(_STAND_IN)[2]
        if not tail.startswith(closing):
            closing = ""
        return self._ids(closing), self._ids_after(head + stand_in, tail)

    def _after_call(self, said: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
        """Do the same for a template that refuses a result without a call: take what it adds to a turn with one."""
        called = {**_TURN, "tool_calls": [_CALL]}
        answered = [{**m, "tool_call_id": _CALL["id"]} if m["role"] == "tool" else m for m in said]
        try:
            before = self.render([_QUESTION, called])
            whole = self.render([_QUESTION, called, *answered], opens_turn=True)
        except TemplateError as error:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in said))
            raise ModelError(f"the tokenizer's chat template refuses messages of role {roles}: {error}.") from error
        if not whole.startswith(before):
            raise ModelError("the tokenizer's chat template renders a call differently once it has been answered.")
        return [], self._ids_after(before, whole[len(before) :])

    def _ids_after(self, head: str, tail: str) -> list[int]:
        """Return the tokens of `tail` after `head`: some tokenizers begin a text in a way of its own."""
        first, both = self._ids(head), self._ids(head + tail)
        return both[len(first) :] if both[: len(first)] == first else self._ids(tail)

    def _ids(self, text: str) -> list[int]:
        return self.control_tokens.encode(text)
