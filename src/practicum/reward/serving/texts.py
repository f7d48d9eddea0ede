"""Chats to token ids, and how long they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from practicum.types import Message


class BadRequest(ValueError):
    """What was asked cannot be answered by anybody: the client's mistake."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest input a model takes, and who says so."""

    num_tokens: int
    reason: str

    @classmethod
    def of(cls, model_config: Any, tokenizer: Any, max_batch_tokens: int) -> Limit:
        limits = [cls(max_batch_tokens, "max_batch_tokens of the reward model")]
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            limits.append(cls(positions, "max_position_embeddings in its config.json"))
        if tokenizer.model_max_length < 1e9:  # a tokenizer that knows none says 1e30
            limits.append(cls(int(tokenizer.model_max_length), "model_max_length of its tokenizer"))
        return min(limits, key=lambda limit: limit.num_tokens)

    def check(self, num_tokens: int, what: str) -> None:
        if num_tokens > self.num_tokens:
            raise BadRequest(f"{what} {num_tokens} tokens; this model takes {self.num_tokens} ({self.reason}).")


class Encoder:
    """Not for use from two threads at a time: a tokenizer is not made for it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> NDArray[np.int32]:
        """With the special tokens the tokenizer adds by itself."""
        return self._ids(text, add_special_tokens=True)

    def chat(self, messages: Sequence[Message], *, ready_for_answer: bool) -> NDArray[np.int32]:
        """By the tokenizer's chat template, which writes its own special tokens. Without one the contents are joined by
        line breaks, and taken as plain text."""
        if self._tokenizer.chat_template is None:
            return self.text("\n".join(message.content for message in messages))
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=ready_for_answer, tokenize=False)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}.") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        ids = np.array(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], dtype=np.int32)
        if not len(ids):
            raise BadRequest("the input has no tokens under the model's tokenizer.")
        return ids
