"""POST /classify, in the shape of vLLM's: texts or chats in, an output for each."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from aiohttp import web
from pydantic import Field, model_validator

from practicum.rollout.serving.batching import BatchQueue, Job
from practicum.rollout.serving.bodies import Body, Turn, turns_of
from practicum.rollout.serving.classifier import Classifier
from practicum.rollout.serving.replies import usage
from practicum.rollout.serving.service import Handler, Service
from practicum.rollout.serving.texts import Ids


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


class ClassifyService(Service):
    """Requests that wait are scored together, `max_batch_tokens` in one forward pass."""

    def __init__(
        self, name: str, classifier: Classifier, max_batch_tokens: int, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(name, classifier.encoder, classifier.limit, names)
        self._classifier = classifier
        self._max_batch_tokens = max_batch_tokens
        self._queue: BatchQueue[Ids, float] | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"/classify": self._classify}

    @property
    def is_awake(self) -> bool:
        return self._classifier.weights.is_awake

    @property
    def num_weight_bytes(self) -> int:
        return self._classifier.weights.num_bytes

    def begin(self) -> None:
        self._queue = queue = BatchQueue[Ids, float](self._classifier.scores, self._max_batch_tokens)
        self.meter.watch("waiting", "Inputs whose turn has not come.", lambda: queue.num_waiting)
        self.meter.watch("running", "Inputs that are being scored.", lambda: queue.num_running)

    async def sleep(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._running_queue.run(self._classifier.weights.sleep), timeout_s)

    async def wake(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._running_queue.run(self._classifier.weights.wake), timeout_s)

    async def close(self) -> None:
        if self._queue is not None:
            await self._queue.close()
        await super().close()

    def give_back(self) -> None:
        self._classifier.weights.sleep()

    @property
    def _running_queue(self) -> BatchQueue[Ids, float]:
        assert self._queue is not None, "asked before begin"
        return self._queue

    async def _classify(self, request: web.Request, data: bytes) -> web.StreamResponse:
        body, inputs = await self.in_reader(self._read, data)
        scores = await self._running_queue.submit([Job(ids, len(ids)) for ids in inputs])
        num_tokens = sum(map(len, inputs))
        self.meter.tokens(num_tokens)
        return web.json_response(self._reply(body, scores, num_tokens))

    def _read(self, data: bytes) -> tuple[ClassifyBody, list[Ids]]:
        body = self.parse(ClassifyBody, data)
        inputs = [self.encoder.text(text) for text in body.texts]
        inputs += [self.encoder.chat(turns_of(chat), ready_for_answer=False) for chat in body.chats]
        for index, ids in enumerate(inputs):
            self.limit.check(len(ids), "the input has" if len(inputs) == 1 else f"input {index} has")
        return body, inputs

    def _reply(self, body: ClassifyBody, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        probs = [_sigmoid(score) for score in scores] if body.use_activation else scores
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "data": [
                {"index": index, "label": self._classifier.label, "probs": [prob], "num_classes": 1}
                for index, prob in enumerate(probs)
            ],
            "usage": usage(num_tokens),
        }


def _sigmoid(score: float) -> float:
    """Without overflow on either side."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    return math.exp(score) / (1.0 + math.exp(score))
