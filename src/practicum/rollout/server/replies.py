"""Answers on their way into replies: from tokens or a whole sample to a choice in OpenAI's shape."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from practicum.rollout.schemas import (
    ChatChoice,
    ChatLogProbs,
    ChatReply,
    ChatRequest,
    Choice,
    CompletionChoice,
    CompletionLogProbs,
    CompletionReply,
    CompletionRequest,
    GenerationRequest,
    ReplyMessage,
    ReplyToolCall,
    TokenLogProb,
)
from practicum.rollout.server.detokenizer import IncrementalDetokenizer
from practicum.rollout.server.encoder import Encoder, Ids
from practicum.rollout.server.tools import TAGS, CallParser
from practicum.types import Sample

C = TypeVar("C", bound=Choice)
R = TypeVar("R", bound=GenerationRequest)


class Answer(ABC, Generic[R, C]):
    """One answer to a request: the choice that holds it or, where `in_chunks`, one after another as it comes."""

    def __init__(self, index: int, request: R, encoder: Encoder, prompt_ids: Ids, *, in_chunks: bool) -> None:
        self._index = index
        self._request = request
        self._encoder = encoder
        self._in_chunks = in_chunks
        self._prompt_ids = prompt_ids.tolist() if request.return_token_ids else None
        self._num_tokens = 0  # returned so far
        self._detokenizer = IncrementalDetokenizer(
            encoder,
            request.stops,
            keeps_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            keeps=self._kept_ids,
        )

    def add(self, token_ids: list[int], log_probs: list[float]) -> C:
        """Return the choice for tokens that have just been written."""
        return self._choice(self._detokenizer.add(token_ids), token_ids, log_probs)

    def finish(self, sample: Sample) -> C:
        """Return the choice for all that was not returned before."""
        token_ids: list[int] = sample.token_ids.tolist()
        text, start = self._detokenizer.finish(token_ids), self._num_tokens
        return self._choice(text, token_ids[start:], sample.log_probs[start:].tolist(), sample)

    def _choice(self, text: str, token_ids: list[int], log_probs: list[float], sample: Sample | None = None) -> C:
        fields = self._said(text, sample)
        fields |= {"index": self._index, "token_ids": token_ids}
        fields["logprobs"] = self._log_probs(token_ids, log_probs) if self._request.wants_log_probs else None
        fields.setdefault("finish_reason", None if sample is None else sample.finish_reason)
        if sample is not None:
            fields["weight_version"] = int(sample.versions.max())
        if self._prompt_ids is not None:
            fields["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        self._num_tokens += len(token_ids)
        return self._made(fields)

    @property
    def _kept_ids(self) -> frozenset[int]:
        """The special tokens that stay in the text."""
        return frozenset()

    @abstractmethod
    def _said(self, text: str, sample: Sample | None) -> dict[str, Any]:
        """Return the fields with the text; `sample` is the whole answer, when this is the end of it."""

    @abstractmethod
    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> Any: ...

    @abstractmethod
    def _made(self, fields: dict[str, Any]) -> C: ...


class CompletionAnswer(Answer[CompletionRequest, CompletionChoice]):
    _end = 0  # how many characters the tokens had so far

    def _said(self, text: str, sample: Sample | None) -> dict[str, Any]:
        return {"text": text}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> CompletionLogProbs:
        tokens, offsets = [self._encoder.token_text(token) for token in token_ids], []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(token)
        return CompletionLogProbs(tokens=tokens, token_logprobs=list(log_probs), top_logprobs=None, text_offset=offsets)

    def _made(self, fields: dict[str, Any]) -> CompletionChoice:
        return CompletionChoice(**fields)


class ChatAnswer(Answer[ChatRequest, ChatChoice]):
    _has_begun = False
    _num_calls = 0
    _parser: CallParser | None = None

    @property
    def _kept_ids(self) -> frozenset[int]:
        return self._encoder.special_ids(TAGS) if self._request.calls_tools else frozenset()

    def _said(self, text: str, sample: Sample | None) -> dict[str, Any]:
        said: dict[str, Any] = {"content": text}
        fields: dict[str, Any] = {}
        if self._request.calls_tools:
            self._parser = self._parser or CallParser()
            said["content"], calls = self._parser.add(text, is_last=sample is not None)
            if calls:
                said["content"] = said["content"] or None
                numbers = [{"index": self._num_calls + n} if self._in_chunks else {} for n in range(len(calls))]
                said["tool_calls"] = [ReplyToolCall(**n, **dict(call)) for n, call in zip(numbers, calls, strict=True)]
                self._num_calls += len(calls)
            if sample is not None and self._num_calls and sample.finish_reason == "stop":
                fields["finish_reason"] = "tool_calls"
        if not self._in_chunks:
            return fields | {"message": ReplyMessage(role="assistant", refusal=None, **said)}
        role = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        return fields | {"delta": ReplyMessage(**role, **said)}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> ChatLogProbs:
        content = []
        for token, value in zip(token_ids, log_probs, strict=True):
            text = self._encoder.token_text(token)
            content.append(TokenLogProb(token=text, logprob=value, bytes=list(text.encode()), top_logprobs=[]))
        return ChatLogProbs(content=content, refusal=None)

    def _made(self, fields: dict[str, Any]) -> ChatChoice:
        return ChatChoice(**fields)


def new_reply(request: GenerationRequest, model: str) -> CompletionReply | ChatReply:
    """Return the reply to a request, or the head of all chunks of its stream, with no choices in it yet."""
    head: dict[str, Any] = {"created": int(time.time()), "model": model, "choices": []}
    number = uuid.uuid4().hex
    if isinstance(request, ChatRequest):
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        return ChatReply(id=f"chatcmpl-{number}", object=kind, **head)
    return CompletionReply(id=f"cmpl-{number}", object="text_completion", **head)
