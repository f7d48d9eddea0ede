"""Answers on their way into replies: from tokens or a whole sample to a choice in OpenAI's shape."""

from __future__ import annotations

import time
import uuid
from typing import Any

from practicum.rollout.schemas import ChatRequest, Choice, GenerationRequest, Reply, ReplyMessage, ReplyToolCall
from practicum.rollout.server.detokenizer import IncrementalDetokenizer
from practicum.rollout.server.encoder import Encoder, Ids
from practicum.rollout.server.tools import TAGS, CallParser
from practicum.types import Sample


class Answer:
    """One answer to a request: the choice that holds it or, in a stream, one after another as it comes."""

    def __init__(self, index: int, request: GenerationRequest, encoder: Encoder, prompt_ids: Ids) -> None:
        self._index = index
        self._request = request
        self._encoder = encoder
        self._prompt_ids: list[int] | None = prompt_ids.tolist() if request.return_token_ids else None
        self._num_tokens = self._num_characters = self._num_calls = 0  # returned so far
        self._is_chat = isinstance(request, ChatRequest)
        self._parser = CallParser() if isinstance(request, ChatRequest) and request.calls_tools else None
        self._detokenizer = IncrementalDetokenizer(
            encoder,
            request.stops,
            keeps_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            keeps=frozenset() if self._parser is None else encoder.special_ids(TAGS),
        )

    def add(self, token_ids: list[int], log_probs: list[float]) -> Choice:
        """Return the choice for tokens that have just been written."""
        return self._choice(self._detokenizer.add(token_ids), token_ids, log_probs)

    def finish(self, sample: Sample) -> Choice:
        """Return the choice for all that was not returned before."""
        token_ids: list[int] = sample.token_ids.tolist()
        text, start = self._detokenizer.finish(token_ids), self._num_tokens
        return self._choice(text, token_ids[start:], sample.log_probs[start:].tolist(), sample)

    def _choice(self, text: str, token_ids: list[int], log_probs: list[float], sample: Sample | None = None) -> Choice:
        fields: dict[str, Any] = {"index": self._index, "token_ids": token_ids, "finish_reason": None}
        if sample is not None:
            fields |= {"finish_reason": sample.finish_reason, "weight_version": int(sample.versions.max())}
        if self._is_chat:
            fields["delta" if self._request.stream else "message"] = self._message(text, is_last=sample is not None)
            if self._num_calls and fields["finish_reason"] == "stop":
                fields["finish_reason"] = "tool_calls"
        else:
            fields["text"] = text
        fields["logprobs"] = self._log_probs(token_ids, log_probs) if self._request.wants_log_probs else None
        if self._num_tokens == 0 and self._prompt_ids is not None:
            fields["prompt_token_ids"] = self._prompt_ids
        self._num_tokens += len(token_ids)
        return Choice(**fields)

    def _message(self, text: str, *, is_last: bool) -> ReplyMessage:
        fields: dict[str, Any] = {"content": text}
        if not self._request.stream:
            fields["refusal"] = None
        if not self._num_tokens:  # of a stream only the first chunk
            fields["role"] = "assistant"
        if self._parser is not None:
            fields["content"], calls = self._parser.add(text, is_last=is_last)
            if calls:
                fields["content"] = fields["content"] or None
                numbers: list[dict[str, Any]] = [{"index": self._num_calls + n} for n in range(len(calls))]
                if not self._request.stream:
                    numbers = [{}] * len(calls)
                fields["tool_calls"] = [ReplyToolCall(**dict(call) | n) for call, n in zip(calls, numbers, strict=True)]
                self._num_calls += len(calls)
        return ReplyMessage(**fields)

    def _log_probs(self, token_ids: list[int], log_probs: list[float]) -> dict[str, Any]:
        tokens = [self._encoder.token_text(token) for token in token_ids]
        if self._is_chat:
            content = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(tokens, log_probs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters)
            self._num_characters += len(token)
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": offsets}


def new_reply(request: GenerationRequest, model: str) -> Reply:
    """Return the reply to a request, or the head of all chunks of its stream, with no choices in it yet."""
    prefix, kind = "cmpl", "text_completion"
    if isinstance(request, ChatRequest):
        prefix, kind = "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion"
    return Reply(id=f"{prefix}-{uuid.uuid4().hex}", object=kind, created=int(time.time()), model=model, choices=[])
