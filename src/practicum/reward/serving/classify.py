"""POST /classify, in the shape of vLLM's: texts or chats in, an output for each."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from practicum.reward.serving.batching import Job
from practicum.reward.serving.classifier import Classifier
from practicum.reward.serving.endpoint import Asked, Body, Endpoint, Turn, messages_of, usage

Ids = NDArray[np.int32]


class ClassifyBody(Body):
    """Exactly one of `input` (taken as it is) and `messages` (through the chat template); either may be a list."""

    input: str | list[str] | None = None
    messages: list[Turn] | list[list[Turn]] | None = None
    use_activation: bool = Field(default=False, strict=True)
    """Whether a sigmoid goes over the output. Unlike vLLM's, off unless asked for: rewards are raw outputs."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages, not both and not neither")
        if self.input == [] or self.messages == [] or any(chat == [] for chat in self.messages or ()):
            raise ValueError(f"{'messages' if self.input is None else 'input'} is empty")
        return self

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input or []

    @property
    def chats(self) -> list[list[Turn]]:
        chats: Any = self.messages or []
        return [chats] if chats and isinstance(chats[0], Turn) else chats


class ClassifyEndpoint(Endpoint[ClassifyBody, Ids, float]):
    path = "/classify"
    body_class = ClassifyBody

    def __init__(self, name: str, classifier: Classifier) -> None:
        self._name = name
        self._classifier = classifier
        self.encoder, self.limit, self.weights = classifier.encoder, classifier.limit, classifier.weights

    def jobs(self, body: ClassifyBody) -> list[Job[Ids]]:
        inputs = [self.encoder.text(text) for text in body.texts]
        inputs += [self.encoder.chat(messages_of(chat), ready_for_answer=False) for chat in body.chats]
        for index, ids in enumerate(inputs):
            self.limit.check(len(ids), "the input has" if len(inputs) == 1 else f"input {index} has")
        return [Job(ids, len(ids)) for ids in inputs]

    def compute(self, payloads: Sequence[Ids]) -> Sequence[float | Exception]:
        return self._classifier.scores(payloads)

    def reply(self, asked: Asked[ClassifyBody, Ids], results: Sequence[float]) -> dict[str, Any]:
        probs = [_sigmoid(score) for score in results] if asked.body.use_activation else results
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._name,
            "data": [
                {"index": index, "label": self._classifier.label, "probs": [prob], "num_classes": 1}
                for index, prob in enumerate(probs)
            ],
            "usage": usage(sum(job.num_tokens for job in asked.jobs)),
        }


def _sigmoid(score: float) -> float:
    """Without overflow on either side."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    return math.exp(score) / (1.0 + math.exp(score))
