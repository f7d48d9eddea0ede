"""A sequence classifier that answers POST /classify, in the shape of vLLM's: texts or chats in, an output for each.

    request ─ encoder thread ─▶ waiting ─ all that is there, by length ─▶ batches of so many tokens ─ one thread

The event loop never computes: it answers others meanwhile. Who went away before their turn is left out.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from aiohttp import web
from numpy.typing import NDArray

from practicum.errors import ModelError
from practicum.models import load_classifier, load_tokenizer
from practicum.rollout.engine.sleep import SleepingWeights
from practicum.rollout.schemas import ClassifyRequest, Usage
from practicum.rollout.server.encoder import Encoder, Ids, Limit
from practicum.rollout.server.service import Service

T = TypeVar("T")


class Classifier:
    """A model with one output: token ids in, a raw score out."""

    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, max_batch_tokens: int) -> None:
        self._path = path
        self._device = device
        tokenizer = load_tokenizer(path, for_writing=False)
        self._model = load_classifier(path, dtype).eval().requires_grad_(False)
        self._text_config = self._model.config.get_text_config()
        self.encoder = Encoder(tokenizer, self._text_config.vocab_size)
        most = Limit(max_batch_tokens, "max_batch_tokens, which one forward pass has room for")
        self.limit = Limit.of(self._model.config, tokenizer, most)
        self.label = str(self._model.config.id2label[0])
        self._pad_id: int | None = self._text_config.pad_token_id
        self.weights = SleepingWeights(self._model, device, lambda: load_classifier(path, dtype))

    @torch.no_grad()
    def scores(self, inputs: Sequence[NDArray[np.int32]]) -> list[float | Exception]:
        """Return the output for each input as the model gives it, with no sigmoid over it."""
        pad_id = self._padding_for(inputs)
        if pad_id is None:
            half = len(inputs) // 2
            return self.scores(inputs[:half]) + self.scores(inputs[half:])
        width = max(len(ids) for ids in inputs)
        input_ids = np.full((len(inputs), width), pad_id, dtype=np.int64)
        mask = np.zeros((len(inputs), width), dtype=np.int64)
        for row, ids in enumerate(inputs):
            input_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        output = self._model(
            input_ids=torch.from_numpy(input_ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
        )
        return [self._checked(score) for score in output.logits[:, 0].float().cpu().tolist()]

    def _padding_for(self, inputs: Sequence[NDArray[np.int32]]) -> int | None:
        """Return the padding; None when the inputs end with all ids there are.

        Models made from causal ones take the output at the last token that is not padding, by its id. Where the model
        names no such id, alone in a batch it would take the very last token. It does so in company too if the padding
        is an id that no input ends with: which one does not matter, since nothing attends to it.
        """
        if self._pad_id is not None:
            return self._pad_id
        last = {int(ids[-1]) for ids in inputs}
        free = next((token for token in range(self._text_config.vocab_size) if token not in last), None)
        self._text_config.pad_token_id = free
        return free

    def _checked(self, score: float) -> float | Exception:
        if math.isfinite(score):
            return score
        return ModelError(f"model {self._path!r} gave {score}, which is no score.")


class Batcher:
    """Computes inputs that wait together, in one thread. `compute` returns a result, or the error of that one input.

    To be used on one event loop. `max_batch_tokens` counts rows times the longest row; a longer input
    is computed alone.
    """

    def __init__(self, compute: Callable[[Sequence[Ids]], Sequence[float | Exception]], max_batch_tokens: int) -> None:
        self._compute = compute
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[tuple[Ids, asyncio.Future[float]]] = []
        self._num_open = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="practicum-forward")
        self._working: asyncio.Task[None] | None = None
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        return self._num_open - self.num_running

    async def submit(self, inputs: Sequence[Ids]) -> list[float]:
        """Return the results in order. Cancelling it takes the inputs back whose turn has not come."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        self._waiting += zip(inputs, futures, strict=True)
        if self._working is None or self._working.done():
            self._working = loop.create_task(self._work())
        self._num_open += len(inputs)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            self._num_open -= len(inputs)
            for future in futures:
                future.cancel()

    async def run(self, function: Callable[[], T]) -> T:
        """Call something else in the thread that computes, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Finish the batch under way, and cancel those who still wait."""
        for _, future in self._waiting:
            future.cancel()
        if self._working is not None and not self._working.done():
            self._working.cancel()
            await asyncio.wait([self._working])
        await self.run(lambda: None)  # behind the batch
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                for batch in plan_batches([len(ids) for ids, _ in taken], self._max_batch_tokens):
                    await self._run_batch([taken[index] for index in batch if not taken[index][1].done()])
            finally:  # on closing; otherwise all have a result
                for _, future in taken:
                    future.cancel()

    async def _run_batch(self, batch: Sequence[tuple[Ids, asyncio.Future[float]]]) -> None:
        if not batch:
            return
        results: Sequence[float | Exception]
        self.num_running = len(batch)
        try:
            results = await self.run(lambda: self._compute([ids for ids, _ in batch]))
        except Exception as error:  # whatever a model may raise: it is the result of all in the batch
            results = [error] * len(batch)
        finally:
            self.num_running = 0
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def plan_batches(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Return the indices of each batch: alike in length, within the tokens where one alone is, shortest first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > max_batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


class ClassificationService(Service):
    """Requests that wait are scored together, `max_batch_tokens` in one forward pass."""

    def __init__(
        self, name: str, classifier: Classifier, max_batch_tokens: int, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(name, classifier.encoder, classifier.limit, names)
        self.handlers = {"/classify": self._classify}
        self._classifier = classifier
        self.num_weight_bytes = classifier.weights.num_bytes
        self._batcher = batcher = Batcher(classifier.scores, max_batch_tokens)
        self.metrics.watch("waiting", "Inputs whose turn has not come.", lambda: batcher.num_waiting)
        self.metrics.watch("running", "Inputs that are being scored.", lambda: batcher.num_running)

    @property
    def is_awake(self) -> bool:
        return self._classifier.weights.is_awake

    async def sleep(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._batcher.run(self._classifier.weights.sleep), timeout_s)

    async def wake(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._batcher.run(self._classifier.weights.wake), timeout_s)

    async def close(self) -> None:
        await self._batcher.close()
        await super().close()

    async def _classify(self, request: web.Request, data: bytes) -> web.StreamResponse:
        body, inputs = await self.in_encoder(self._read, data)
        scores = await self._batcher.submit(inputs)
        num_tokens = sum(map(len, inputs))
        self.metrics.add_tokens(num_tokens)
        return web.json_response(self._reply(body, scores, num_tokens))

    def _read(self, data: bytes) -> tuple[ClassifyRequest, list[Ids]]:
        body = self.parse(ClassifyRequest, data)
        self.metrics.num_control_tokens.inc(self.encoder.control_tokens.count(body.answer))
        inputs = [self.encoder.text(text, body.answer) for text in body.texts]
        inputs += [self.encode_chat(chat, opens_turn=False) for chat in body.chats]
        for index, ids in enumerate(inputs):
            self.limit.check(len(ids), "the input has" if len(inputs) == 1 else f"input {index} has")
        return body, inputs

    def _reply(self, body: ClassifyRequest, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        probs = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist() if body.use_activation else scores
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "data": [
                {"index": index, "label": self._classifier.label, "probs": [prob], "num_classes": 1}
                for index, prob in enumerate(probs)
            ],
            "usage": dict(Usage.of(num_tokens)),
        }
