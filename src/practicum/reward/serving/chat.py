"""POST /v1/chat/completions, in OpenAI's shape, not streamed: messages in, one or several answers out."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from practicum.reward.serving.batching import Job
from practicum.reward.serving.endpoint import Asked, Body, Endpoint, Turn, messages_of, usage
from practicum.reward.serving.generator import Generator
from practicum.reward.serving.texts import BadRequest
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams

_DEFAULT_TOKENS = 512


class ChatBody(Body):
    messages: list[Turn] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Without it and without `max_completion_tokens`: 512, or what the model's length leaves."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    """The same seed, messages and parameters give the same answers, whatever else is asked at the time."""
    stop: str | list[str] | None = None
    """Answers end before the first of these. They are cut there after they were written, not stopped while writing."""
    stream: Literal[False] = False

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]


class ChatEndpoint(Endpoint[ChatBody, RolloutRequest, list[Sample]]):
    path = "/v1/chat/completions"
    body_class = ChatBody

    def __init__(self, name: str, generator: Generator) -> None:
        self._name = name
        self._generator = generator
        self.encoder, self.limit, self.weights = generator.encoder, generator.limit, generator.weights

    def jobs(self, body: ChatBody) -> list[Job[RolloutRequest]]:
        messages = messages_of(body.messages)
        ids = self.encoder.chat(messages, ready_for_answer=True)
        asked = body.max_completion_tokens or body.max_tokens
        length = asked or min(_DEFAULT_TOKENS, self.limit.num_tokens - len(ids))
        if length < 1:
            raise BadRequest(
                f"the messages have {len(ids)} tokens, which leaves none for the answer: this model takes "
                f"{self.limit.num_tokens} ({self.limit.reason})."
            )
        self.limit.check(
            len(ids) + length, f"the messages have {len(ids)} tokens and the answer up to {length}: together"
        )
        params = SamplingParams(length, body.temperature, body.top_p, num_answers=body.n)
        # Any integer is a seed for OpenAI's clients; ours count from 0 to 2^64.
        seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
        request = RolloutRequest(Prompt("chat", messages=tuple(messages)), ids, params, seed)
        return [Job(request, len(ids) + length, num_rows=body.n, key=params)]

    def compute(self, payloads: Sequence[RolloutRequest]) -> Sequence[list[Sample] | Exception]:
        return self._generator.answers(payloads)

    def reply(self, asked: Asked[ChatBody, RolloutRequest], results: Sequence[list[Sample]]) -> dict[str, Any]:
        (samples,) = results
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [_choice(index, sample, asked.body.stops) for index, sample in enumerate(samples)],
            "usage": usage(len(samples[0].prompt_ids), sum(len(sample.token_ids) for sample in samples)),
        }

    def wake(self) -> None:
        self._generator.resume()

    def sleep(self) -> None:
        self._generator.release()


def _choice(index: int, sample: Sample, stops: Sequence[str]) -> dict[str, Any]:
    ends = [at for stop in stops if (at := sample.text.find(stop)) >= 0]
    return {
        "index": index,
        "message": {"role": "assistant", "content": sample.text[: min(ends)] if ends else sample.text},
        "finish_reason": "stop" if ends else sample.finish_reason,
    }
