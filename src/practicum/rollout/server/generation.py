"""An engine that answers: POST /v1/completions, /v1/chat/completions, /update_weights and /log_probs.

    request ─ encoder thread: parsed, encoded, checked ─▶ engine, among all others ─▶ reply, or events of a stream

A client that goes away takes its request along: the engine stops writing for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from aiohttp import web

from practicum.errors import ModelError, RolloutError
from practicum.models import load_model, weight_shapes
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.rollout.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    LogProbsRequest,
    Reply,
    UpdateWeightsRequest,
    Usage,
)
from practicum.rollout.server.encoder import TOO_LONG, Encoder, Ids, Limit
from practicum.rollout.server.errors import BadRequest, HttpError, Unavailable, error_json
from practicum.rollout.server.replies import Answer, new_reply
from practicum.rollout.server.service import Service, held
from practicum.rollout.server.tools import TAGS
from practicum.types import PromptGroup, Sample
from practicum.weights import WeightUpdate

log = logging.getLogger("practicum.server")
_DEFAULT_TOKENS = 512
_UPDATE_S = 600.0


@dataclass(slots=True)
class _Event:
    """Tokens of an answer, or its end: the sample."""

    index: int
    token_ids: list[int]
    log_probs: list[float]
    sample: Sample | None = None


@dataclass(slots=True)
class _Generation:
    """A request under way. Its answers are those to the first prompt, then those to the second, and so on."""

    request: GenerationRequest
    groups: list[PromptGroup]
    answers: list[Answer]
    reply: Reply  # without answers
    arrived: float

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.prompt_ids) for group in self.groups)


class GenerationService(Service):
    """The engine is this service's alone. `dtype` is the one that new weights are loaded in."""

    def __init__(
        self,
        name: str,
        engine: BaseRollout,
        *,
        model_config: Any,
        tokenizer: Any,
        dtype: torch.dtype,
        limits: Sequence[Limit] = (),
        names: frozenset[str] | None = None,
        reader: str = "this model",
    ) -> None:
        encoder = Encoder(tokenizer, model_config.get_text_config().vocab_size)
        super().__init__(name, encoder, Limit.of(model_config, tokenizer, *limits), names, reader)
        # The tokens of a chunk are decoded in microseconds, on the event loop: a way to the encoder thread costs more.
        self._stream_encoder = Encoder(copy.deepcopy(tokenizer), model_config.get_text_config().vocab_size)
        self._engine = engine
        self._dtype = dtype
        self._shapes = weight_shapes(model_config)
        self.num_weight_bytes = sum(shape.numel() for shape in self._shapes.values()) * dtype.itemsize
        self._version = 0
        self._updating = asyncio.Lock()
        self.handlers = {
            "/v1/completions": partial(self._generate, CompletionRequest),
            "/v1/chat/completions": partial(self._generate, ChatRequest),
            "/update_weights": self._update_weights,
            "/log_probs": self._log_probs,
        }
        self.metrics.watch("waiting", "Answers the engine has not begun with.", lambda: engine.num_waiting)
        self.metrics.watch("running", "Answers that are being written.", lambda: engine.num_running)
        self.metrics.watch("weight_version", "Version of the weights.", lambda: self._version)

    @property
    def is_awake(self) -> bool:
        return self._engine.is_awake

    @property
    def weight_version(self) -> int:
        return self._version

    async def sleep(self, timeout_s: float) -> None:
        with _refusing(RolloutError):
            async with self._engine.exclusive("falling asleep", timeout_s=timeout_s):
                await self._engine.release()

    async def wake(self, timeout_s: float) -> None:
        with _refusing(RolloutError):
            async with self._engine.exclusive("waking up", timeout_s=timeout_s):
                await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()
        await super().close()

    async def _generate(self, kind: type[GenerationRequest], request: web.Request, data: bytes) -> web.StreamResponse:
        asked = await self.in_encoder(self._read, kind, data)
        for group in asked.groups:
            try:
                self._engine.check(group)
            except RolloutError as error:
                raise BadRequest(str(error)) from error
        self.metrics.add_tokens(asked.num_prompt_tokens)
        if asked.request.stream:
            return await self._stream(request, asked)
        samples: dict[int, Sample] = {}
        async with aclosing(self._events(asked)) as events:
            async for event in events:
                if event.sample is not None:
                    samples[event.index] = event.sample
        self.metrics.add_tokens(0, sum(len(sample.token_ids) for sample in samples.values()))
        reply = await self.in_encoder(self._reply, asked, [samples[index] for index in sorted(samples)])
        return web.Response(body=reply, content_type="application/json")

    async def _stream(self, request: web.Request, asked: _Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        num_written, is_first = 0, True
        async with aclosing(self._events(asked)) as events:
            await response.prepare(request)
            try:
                async for event in events:
                    if is_first:
                        self.metrics.first_token_s.observe(time.monotonic() - asked.arrived)
                        is_first = False
                    await response.write(_sent(self._chunk(asked, event)))
                    if event.sample is not None:
                        num_written += len(event.sample.token_ids)
            except ConnectionError:  # the client is gone
                raise
            except Exception as error:  # the status has been sent: the client reads it in the stream
                if not isinstance(error, HttpError):
                    log.exception("%s %s failed", request.method, request.path)
                await response.write(_sent(error_json(error)))
                await response.write_eof()
                return response
            finally:
                self.metrics.add_tokens(0, num_written)
        if asked.request.stream_options.include_usage:
            usage = Usage.of(asked.num_prompt_tokens, num_written)
            await response.write(_sent(asked.reply.with_choices([], usage=usage)))
        await response.write(_sent(b"[DONE]"))
        await response.write_eof()
        return response

    async def _events(self, asked: _Generation) -> AsyncGenerator[_Event, None]:
        """Have the answers written; yield the tokens of a stream as they come, and the end of each answer."""
        events: asyncio.Queue[_Event | None] = asyncio.Queue()

        def put(index: int, token_ids: list[int], log_probs: list[float]) -> None:
            events.put_nowait(_Event(index, token_ids, log_probs))

        sequences: dict[EngineSequence, int] = {}  # and the index of each answer
        for index, pair in enumerate((group, one) for group in asked.groups for one in group.trajectories):
            sequences[EngineSequence.of(*pair, partial(put, index) if asked.request.stream else None)] = index

        async def write() -> None:
            async with aclosing(self._engine.stream_samples(list(sequences))) as batches:
                async for some in batches:
                    for sequence, sample in some:
                        if sample.finish_reason == "abort":
                            raise Unavailable("the answer was aborted: the server is about to end.")
                        events.put_nowait(_Event(sequences[sequence], [], [], sample))

        writing = asyncio.create_task(write())
        writing.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:  # for as long as the client waits
                yield event
            with _refusing(RolloutError, TimeoutError):
                writing.result()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _chunk(self, asked: _Generation, event: _Event) -> bytes:
        answer, sample = asked.answers[event.index], event.sample
        choice = answer.add(event.token_ids, event.log_probs) if sample is None else answer.finish(sample)
        return asked.reply.with_choices([choice])

    async def _update_weights(self, request: web.Request, data: bytes) -> web.StreamResponse:
        version = await self.to_its_end(self._take_weights(self.parse(UpdateWeightsRequest, data)))
        return web.json_response({"version": version})

    async def _take_weights(self, body: UpdateWeightsRequest) -> int:
        """Load them and return their version, which is counted together with them."""
        with _refusing(RolloutError, TimeoutError):
            async with held(self._updating, _UPDATE_S, "an earlier update of the weights"):
                try:
                    model = await asyncio.to_thread(self._loaded, body.path)  # answers are generated meanwhile
                except ModelError as error:
                    raise BadRequest(str(error)) from error
                version = self._version + 1 if body.version is None else body.version
                async with self._engine.exclusive(f"weights of version {version}", timeout_s=_UPDATE_S):
                    await self._engine.update_weights(WeightUpdate(version, model.named_parameters(), shared=False))
                    self._version = version
        return version

    async def _log_probs(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """Return the log-probs of given sequences, which show the sender of new weights that they have arrived."""
        sequences = [self.encoder.checked(ids) for ids in self.parse(LogProbsRequest, data).token_ids]
        if any(not 2 <= len(ids) <= self.limit.num_tokens for ids in sequences):
            raise BadRequest(f"each of token_ids needs 2 tokens or more, and at most {self.limit.num_tokens}.")
        with _refusing(RolloutError, TimeoutError):
            async with self._engine.exclusive("log-probs", timeout_s=_UPDATE_S):
                version, found = self._version, await self._engine.log_probs(sequences)
        return web.json_response({"log_probs": [one.tolist() for one in found], "weight_version": version})

    def _loaded(self, path: str) -> Any:
        model = load_model(path, self._dtype)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        wrong = next((name for name in {**self._shapes, **shapes} if self._shapes.get(name) != shapes.get(name)), None)
        if wrong is not None:
            raise ModelError(
                f"the weights in {path!r} are of another model: {wrong} is {_described(shapes.get(wrong))}, and "
                f"{_described(self._shapes.get(wrong))} in the one that is served. Nothing was changed."
            )
        return model

    # In the encoder thread

    def _read(self, kind: type[GenerationRequest], data: bytes) -> _Generation:
        arrived = time.monotonic()
        request = self.parse(kind, data)
        ids: list[Ids]
        if isinstance(request, ChatRequest):
            tools = request.tools if request.calls_tools else []
            options = {"tools": tools, "options": request.chat_template_kwargs}
            ids = [self.encode_chat(request.messages, opens_turn=True, **options)]  # type: ignore[arg-type]
        else:
            assert isinstance(request, CompletionRequest)
            ids = [
                self.encoder.text(prompt, add_special_tokens=request.add_special_tokens)
                if isinstance(prompt, str)
                else self.encoder.checked(prompt)
                for prompt in request.inputs
            ]
        params = request.params(max(self._length(request, one) for one in ids))
        if isinstance(request, ChatRequest) and request.calls_tools and not request.parallel_tool_calls:
            stop_ids = (*params.stop_token_ids, *self.encoder.special_ids(TAGS[1:]))
            params = replace(params, stop=(*params.stop, TAGS[1]), stop_token_ids=stop_ids)
        answers = [
            Answer(index, request, self._stream_encoder if request.stream else self.encoder, ids[index // request.n])
            for index in range(request.n * len(ids))
        ]
        groups = request.to_groups(request.prompts(self.reader), ids, params)
        return _Generation(request, groups, answers, new_reply(request, self.name), arrived)

    def _length(self, request: GenerationRequest, ids: Ids) -> int:
        """Return the length of the longest answer to a prompt."""
        what = "messages have" if isinstance(request, ChatRequest) else "prompt has"
        length = request.length or min(_DEFAULT_TOKENS, self.limit.num_tokens - len(ids))
        if length < 1:
            raise BadRequest(
                f"the {what} {len(ids)} tokens, which leaves none for the answer: this model takes "
                f"{self.limit.num_tokens} ({self.limit.reason}).",
                TOO_LONG,
            )
        self.limit.check(len(ids) + length, f"the {what} {len(ids)} tokens and the answer up to {length}: together")
        return length

    def _reply(self, asked: _Generation, samples: Sequence[Sample]) -> bytes:
        num_written = sum(len(sample.token_ids) for sample in samples)
        choices = [answer.finish(sample) for answer, sample in zip(asked.answers, samples, strict=True)]
        version = max(int(sample.versions.max()) for sample in samples)
        usage = Usage.of(asked.num_prompt_tokens, num_written)
        return asked.reply.with_choices(choices, usage=usage, weight_version=version)


@contextmanager
def _refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Refuse the request with 503 where the engine fails in one of these ways."""
    try:
        yield
    except kinds as error:
        raise Unavailable(f"{error}.") from error


def _sent(data: bytes) -> bytes:
    """Return an event of a stream."""
    return b"data: " + data + b"\n\n"


def _described(shape: torch.Size | None) -> str:
    return "not there" if shape is None else f"of shape {list(shape)}"
