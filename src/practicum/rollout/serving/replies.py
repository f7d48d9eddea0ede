"""Answers in OpenAI's shapes, whole or in pieces, with what they leave out: token ids and the weights' version."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from practicum.rollout.serving.texts import Encoder
from practicum.rollout.serving.tool_calls import WrittenCall


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one answer: all of it, or what came since the last piece."""

    index: int
    text: str
    token_ids: list[int]
    log_probs: list[float] | None  # None: not asked for
    finish_reason: str | None = None  # None: there is more to come
    version: int | None = None  # of the weights; known when it is finished
    prompt_ids: list[int] | None = None  # None: not asked for, or told before
    calls: tuple[WrittenCall, ...] = ()  # in chats with tools; they are not in the text


class Shape(ABC):
    """Of the answers to one request."""

    prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, model: str, encoder: Encoder) -> None:
        self._encoder = encoder
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._ends: dict[int, int] = {}  # by choice: how many characters its tokens had so far

    def reply(self, pieces: Sequence[Piece], used: dict[str, int]) -> dict[str, Any]:
        versions = [piece.version for piece in pieces if piece.version is not None]
        return {
            **self._head,
            "object": self.whole,
            "choices": [self._choice(piece, is_delta=False) for piece in pieces],
            "usage": used,
            "weight_version": max(versions, default=None),
        }

    def delta(self, piece: Piece) -> dict[str, Any]:
        return {**self._head, "object": self.chunk, "choices": [self._choice(piece, is_delta=True)]}

    def last(self, used: dict[str, int]) -> dict[str, Any]:
        """After all pieces, for those who want to know what was used."""
        return {**self._head, "object": self.chunk, "choices": [], "usage": used}

    def _choice(self, piece: Piece, *, is_delta: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            **self._said(piece, is_delta),
            "logprobs": None if piece.log_probs is None else self._log_probs(piece),
            "finish_reason": piece.finish_reason,
            "token_ids": piece.token_ids,
        }
        if piece.version is not None:
            choice["weight_version"] = piece.version
        if piece.prompt_ids is not None:
            choice["prompt_token_ids"] = piece.prompt_ids
        return choice

    @abstractmethod
    def _said(self, piece: Piece, is_delta: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _log_probs(self, piece: Piece) -> dict[str, Any]: ...


class CompletionShape(Shape):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _said(self, piece: Piece, is_delta: bool) -> dict[str, Any]:
        return {"text": piece.text}

    def _log_probs(self, piece: Piece) -> dict[str, Any]:
        tokens = [self._encoder.spelled(token) for token in piece.token_ids]
        offsets, end = [], self._ends.get(piece.index, 0)
        for token in tokens:
            offsets.append(end)
            end += len(token)
        self._ends[piece.index] = end
        return {"tokens": tokens, "token_logprobs": piece.log_probs, "top_logprobs": None, "text_offset": offsets}


class ChatShape(Shape):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _said(self, piece: Piece, is_delta: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"content": piece.text}
        if piece.calls:
            said["content"] = piece.text or None
            said["tool_calls"] = [call.as_told(is_delta=is_delta) for call in piece.calls]
        if not is_delta:
            return {"message": {"role": "assistant", "refusal": None, **said}}
        is_first = piece.index not in self._ends
        self._ends.setdefault(piece.index, 0)
        return {"delta": {"role": "assistant", **said} if is_first else said}

    def _log_probs(self, piece: Piece) -> dict[str, Any]:
        assert piece.log_probs is not None
        content = []
        for token, value in zip(piece.token_ids, piece.log_probs, strict=True):
            text = self._encoder.spelled(token)
            content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


def usage(num_prompt: int, num_written: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }
