"""Texts and chats to token ids and back, and the longest input a model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from practicum.control_tokens import ControlTokens
from practicum.rollout.server.errors import BadRequest

Ids = NDArray[np.int32]
TOO_LONG = "context_length_exceeded"
# Options of transformers' `apply_chat_template`. A client with a template of its own could write any special token.
_NOT_VARIABLES = frozenset({
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest input a model takes, and who says so."""

    num_tokens: int
    reason: str

    @classmethod
    def of(cls, model_config: Any, tokenizer: Any, *others: Limit) -> Limit:
        """Return the smallest of the limits that are known."""
        limits = list(others)
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            limits.append(cls(positions, "max_position_embeddings in its config.json"))
        if tokenizer.model_max_length < 1e9:  # a tokenizer that knows none says 1e30
            limits.append(cls(int(tokenizer.model_max_length), "model_max_length of its tokenizer"))
        if not limits:
            return cls(1_000_000, "as neither its config.json nor its tokenizer has a limit")
        return min(limits, key=lambda limit: limit.num_tokens)

    def check(self, num_tokens: int, what: str) -> None:
        if num_tokens > self.num_tokens:
            raise BadRequest(
                f"{what} {num_tokens} tokens; this model takes {self.num_tokens} ({self.reason}).", TOO_LONG
            )


class Encoder:
    """A tokenizer for requests. Not for use from two threads at a time: a tokenizer is not made for it."""

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or len(tokenizer)
        self.token_text = lru_cache(maxsize=100_000)(self._token_text)

    def text(self, text: str, answer: str = "", *, add_special_tokens: bool = True) -> Ids:
        """Encode a text, with the special tokens that are in it and that the tokenizer adds by itself, and after it an
        answer, in which control tokens are plain text."""
        marked = self._marked(answer, has_edges=True) if answer else ""
        return self._ids(f"{text}{marked}", add_special_tokens=add_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        opens_turn: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Ids:
        """Encode messages by the tokenizer's chat template, which writes its own special tokens; those in messages and
        tools are plain text. Without a template the contents are joined by line breaks."""
        template = self._tokenizer.chat_template
        if tools and "tools" not in str(template):
            raise BadRequest("the model's chat template has no place for tools: leave them out.")
        if any("tool_calls" in message for message in messages) and "tool_calls" not in str(template):
            raise BadRequest("the model's chat template has no place for tool_calls: leave them out of the messages.")
        marked = self._marked(messages)
        if template is None:
            return self.text("\n".join(message["content"] or "" for message in marked))
        for name in options or {}:
            if name in _NOT_VARIABLES:
                raise BadRequest(f"chat_template_kwargs: {name!r} is no variable of a chat template: leave it out.")
        try:
            text = self._tokenizer.apply_chat_template(
                marked,
                tools=self._marked(tools) or None,
                add_generation_prompt=opens_turn,
                tokenize=False,
                **self._marked(options or {}),
            )
        except (TemplateError, TypeError) as error:  # a template that adds None to a text raises the latter
            raise BadRequest(f"the model's chat template refuses these messages: {error}.") from error
        return self._ids(text, add_special_tokens=False)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    def checked(self, token_ids: Sequence[int]) -> Ids:
        """Return token ids that came as such, once they are known to be the model's."""
        wrong = next((token for token in token_ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"token id {wrong} is not one of this model's, which go from 0 to {self._vocab_size - 1}.")
        if not token_ids:
            raise BadRequest("the input has no tokens.")
        return np.array(token_ids, dtype=np.int32)

    def decode(
        self, token_ids: Sequence[int] | Ids, *, skip_special_tokens: bool, keeps: frozenset[int] = frozenset()
    ) -> str:
        """Decode; `keeps` are special tokens that are not skipped."""
        if skip_special_tokens and keeps:
            skipped = frozenset(self._special.values()) - keeps
            token_ids = [token for token in token_ids if token not in skipped]
            skip_special_tokens = False
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def special_ids(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens, which otherwise are not part of a text."""
        return frozenset(self._special[text] for text in texts if text in self._special)

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.added_tokens_decoder
        return {token.content: int(number) for number, token in added.items() if token.special}

    def _token_text(self, token_id: int) -> str:
        """Decode one token by itself, special or not. Half a character is shown as a replacement character."""
        return self.decode([token_id], skip_special_tokens=False)

    def _marked(self, value: Any, *, has_edges: bool = False) -> Any:
        try:
            return self.control_tokens.mark(value, has_edges=has_edges)
        except UnicodeEncodeError as error:
            raise BadRequest(f"the input is no valid Unicode: {error.reason} at character {error.start}.") from error

    def _ids(self, text: str, *, add_special_tokens: bool) -> Ids:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the input is no valid Unicode: {error.reason} at character {error.start}.") from error
        ids = np.array(self.control_tokens.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)
        if not len(ids):
            raise BadRequest("the input has no tokens under the model's tokenizer.")
        return ids
