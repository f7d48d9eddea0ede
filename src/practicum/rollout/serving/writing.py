"""An engine that answers: POST /v1/completions, /v1/chat/completions and /update_weights.

    body ─ reader: parsed, encoded, checked ─▶ EngineRunner, among all others ─▶ pieces ─ reader: spelled ─▶ client

A client that goes away takes its request along: the engine stops writing for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from aiohttp import web

from practicum.errors import ModelError, RolloutError
from practicum.models import load_model, weight_shapes
from practicum.rollout.base import BaseRollout
from practicum.rollout.runner import EngineRunner
from practicum.rollout.serving.answers import Answers, Done, News, Written
from practicum.rollout.serving.bodies import (
    ChatBody,
    CompletionBody,
    LogProbsBody,
    UpdateBody,
    WritingBody,
    turns_of,
)
from practicum.rollout.serving.refusals import BadRequest, NotNow, Refusal, error_body
from practicum.rollout.serving.replies import ChatShape, CompletionShape, Piece, Shape, usage
from practicum.rollout.serving.service import Handler, Service
from practicum.rollout.serving.spelling import Spelling
from practicum.rollout.serving.texts import TOO_LONG, Encoder, Ids, Limit
from practicum.rollout.serving.tool_calls import TAGS, CallReader, Said
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams
from practicum.weights import WeightUpdate

T = TypeVar("T")
log = logging.getLogger("practicum.server")
_DEFAULT_TOKENS = 512
_UPDATE_S = 600.0


@dataclass(slots=True)
class _Asked:
    """A request to the server: one to the engine for each prompt, and what was told of each answer."""

    body: WritingBody
    shape: Shape
    requests: list[RolloutRequest]
    arrived: float
    spellings: dict[int, Spelling] = field(default_factory=dict)
    readers: dict[int, CallReader] = field(default_factory=dict)
    num_told: dict[int, int] = field(default_factory=dict)

    def index(self, request: int, answer: int) -> int:
        return request * self.body.n + answer

    @property
    def calls_tools(self) -> bool:
        return isinstance(self.body, ChatBody) and self.body.calls_tools

    def said(self, index: int, text: str, *, is_last: bool = False) -> Said:
        """The next piece of an answer's text."""
        if not self.calls_tools:
            return Said(text)
        return self.readers.setdefault(index, CallReader()).add(text, is_last=is_last)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


class WritingService(Service):
    """The engine is this service's alone. `dtype` is what new weights are loaded in."""

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
        self._engine = engine
        self._dtype = dtype
        self._shapes = weight_shapes(model_config)
        self._version = 0
        self._is_awake = False
        self._runner: EngineRunner | None = None
        self._updating = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "/v1/completions": partial(self._answer, CompletionBody),
            "/v1/chat/completions": partial(self._answer, ChatBody),
            "/update_weights": self._update,
            "/log_probs": self._log_probs,
        }

    @property
    def is_awake(self) -> bool:
        return self._is_awake

    @property
    def num_weight_bytes(self) -> int:
        return sum(shape.numel() for shape in self._shapes.values()) * self._dtype.itemsize

    @property
    def weight_version(self) -> int:
        return self._version

    def begin(self) -> None:
        self._runner = runner = EngineRunner(self._engine)
        self.meter.watch("waiting", "Requests the engine has not begun with.", lambda: runner.num_waiting)
        self.meter.watch("running", "Requests that are being answered.", lambda: runner.num_running)
        self.meter.watch("weight_version", "Version of the weights.", lambda: self._version)

    async def sleep(self, timeout_s: float) -> None:
        await self._between(self._release, timeout_s)

    async def wake(self, timeout_s: float) -> None:
        await self._between(self._resume, timeout_s)

    async def close(self) -> None:
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)
        await super().close()

    def give_back(self) -> None:
        if self._is_awake:
            self._release()

    # In the engine's thread

    def _release(self) -> None:
        self._engine.release()
        self._is_awake = False

    def _resume(self) -> None:
        self._engine.resume()
        self._is_awake = True

    def _take(self, model: Any, version: int) -> None:
        self._engine.update_weights(WeightUpdate(version, model.named_parameters(), shared=False))
        self._version = version

    # In the event loop

    @property
    def _running(self) -> EngineRunner:
        assert self._runner is not None, "asked before begin"
        return self._runner

    async def _between(self, function: Callable[[], T], timeout_s: float) -> T:
        try:
            return await asyncio.to_thread(self._running.between, function, timeout_s)
        except RolloutError as error:
            raise NotNow(f"{error}.") from error

    async def _answer(self, kind: type[WritingBody], request: web.Request, data: bytes) -> web.StreamResponse:
        asked = await self.in_reader(self._read, kind, data)
        self.meter.tokens(asked.num_prompt_tokens)
        if asked.body.stream:
            return await self._stream(request, asked)
        samples: dict[int, Sample] = {}
        with Answers(self._running, asked.requests, wants_tokens=False) as answers:
            async for news in answers:
                if isinstance(news, Done):
                    samples[asked.index(news.request, news.answer)] = news.sample
        self.meter.tokens(0, sum(len(sample.token_ids) for sample in samples.values()))
        reply = await self.in_reader(self._reply, asked, samples)
        return web.Response(body=reply, content_type="application/json")

    async def _stream(self, request: web.Request, asked: _Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        num_written = 0
        with Answers(self._running, asked.requests, wants_tokens=True) as answers:
            await response.prepare(request)
            try:
                async for news in answers:
                    if not asked.num_told:
                        self.meter.first_token(time.monotonic() - asked.arrived)
                    await response.write(await self.in_reader(self._chunk, asked, news))
                    if isinstance(news, Done):
                        num_written += len(news.sample.token_ids)
            except ConnectionError:  # the client is gone
                raise
            except Exception as error:  # the status has been sent: the client is told within the stream
                if not isinstance(error, Refusal):
                    log.exception("%s %s failed", request.method, request.path)
                await response.write(_event(error_body(error)))
                await response.write_eof()
                return response
            finally:
                self.meter.tokens(0, num_written)
        if asked.body.stream_options.include_usage:
            await response.write(_event(asked.shape.last(usage(asked.num_prompt_tokens, num_written))))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _update(self, request: web.Request, data: bytes) -> web.StreamResponse:
        body = self.parse(UpdateBody, data)
        async with self._updating:
            try:
                model = await asyncio.to_thread(self._loaded, body.path)  # answers are written meanwhile
            except ModelError as error:
                raise BadRequest(str(error)) from error
            version = self._version + 1 if body.version is None else body.version
            await self._between(partial(self._take, model, version), _UPDATE_S)
        return web.json_response({"version": version})

    async def _log_probs(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """Of each token but the first of given sequences: whoever sends new weights can see that they have arrived."""
        sequences = [self.encoder.checked(ids) for ids in self.parse(LogProbsBody, data).token_ids]
        if any(not 2 <= len(ids) <= self.limit.num_tokens for ids in sequences):
            raise BadRequest(f"each of token_ids needs 2 tokens or more, and at most {self.limit.num_tokens}.")
        version, found = await self._between(lambda: (self._version, self._engine.log_probs(sequences)), _UPDATE_S)
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

    # In the reader's thread

    def _read(self, kind: type[WritingBody], data: bytes) -> _Asked:
        arrived = time.monotonic()
        body = self.parse(kind, data)
        prompts: list[Ids]
        if isinstance(body, ChatBody):
            shape: Shape = ChatShape(self.name, self.encoder)
            tools = body.tools if body.calls_tools else []
            options = {"tools": tools, "options": body.chat_template_kwargs}
            prompts = [self.encoder.chat(turns_of(body.messages), ready_for_answer=True, **options)]  # type: ignore[arg-type]
        else:
            assert isinstance(body, CompletionBody)
            shape = CompletionShape(self.name, self.encoder)
            prompts = [
                self.encoder.text(prompt, add_special_tokens=body.add_special_tokens)
                if isinstance(prompt, str)
                else self.encoder.checked(prompt)
                for prompt in body.prompts
            ]
        # The seed counts as the number of an answer, so that clients can ask for any part of a row of answers.
        prompt, first = Prompt("request", text="request"), body.drawn_seed()
        requests = [RolloutRequest(prompt, ids, self._params(body, ids), seed=0, first_answer=first) for ids in prompts]
        return _Asked(body, shape, requests, arrived)

    def _params(self, body: WritingBody, ids: Ids) -> SamplingParams:
        params = body.params(self._length(body, ids))
        if not isinstance(body, ChatBody) or not body.calls_tools or body.parallel_tool_calls:
            return params
        close = TAGS[1]
        stop_ids = (*params.stop_token_ids, *self.encoder.special_ids([close]))
        return replace(params, stop=(*params.stop, close), stop_token_ids=stop_ids)

    def _length(self, body: WritingBody, ids: Ids) -> int:
        """Of the longest answer."""
        what = "messages have" if isinstance(body, ChatBody) else "prompt has"
        length = body.length or min(_DEFAULT_TOKENS, self.limit.num_tokens - len(ids))
        if length < 1:
            raise BadRequest(
                f"the {what} {len(ids)} tokens, which leaves none for the answer: this model takes "
                f"{self.limit.num_tokens} ({self.limit.reason}).",
                TOO_LONG,
            )
        self.limit.check(len(ids) + length, f"the {what} {len(ids)} tokens and the answer up to {length}: together")
        return length

    def _spelling(self, asked: _Asked) -> Spelling:
        return Spelling(
            self.encoder,
            asked.body.stops,
            keeps_stop=asked.body.include_stop_str_in_output,
            skip_special_tokens=asked.body.skip_special_tokens,
            keeps=self.encoder.special_ids(TAGS) if asked.calls_tools else frozenset(),
        )

    def _reply(self, asked: _Asked, samples: Mapping[int, Sample]) -> bytes:
        pieces = [self._last_piece(asked, index, samples[index]) for index in sorted(samples)]
        num_written = sum(len(sample.token_ids) for sample in samples.values())
        return json.dumps(asked.shape.reply(pieces, usage(asked.num_prompt_tokens, num_written))).encode()

    def _chunk(self, asked: _Asked, news: News) -> bytes:
        index = asked.index(news.request, news.answer)
        if isinstance(news, Done):
            return _event(asked.shape.delta(self._last_piece(asked, index, news.sample)))
        return _event(asked.shape.delta(self._next_piece(asked, index, news)))

    def _next_piece(self, asked: _Asked, index: int, news: Written) -> Piece:
        spelling = asked.spellings.setdefault(index, self._spelling(asked))
        prompt_ids = self._prompt_ids(asked, index)
        asked.num_told[index] = asked.num_told.get(index, 0) + len(news.token_ids)
        log_probs = news.log_probs if asked.body.wants_log_probs else None
        said = asked.said(index, spelling.add(news.token_ids))
        return Piece(index, said.content, news.token_ids, log_probs, prompt_ids=prompt_ids, calls=said.calls)

    def _last_piece(self, asked: _Asked, index: int, sample: Sample) -> Piece:
        """All that was not told before."""
        token_ids = sample.token_ids.tolist()
        spelling = asked.spellings.setdefault(index, self._spelling(asked))
        prompt_ids = self._prompt_ids(asked, index)
        told = asked.num_told.get(index, 0)
        asked.num_told[index] = len(token_ids)
        said = asked.said(index, spelling.finish(token_ids), is_last=True)
        has_called = index in asked.readers and asked.readers[index].has_calls
        return Piece(
            index,
            said.content,
            token_ids[told:],
            sample.log_probs[told:].tolist() if asked.body.wants_log_probs else None,
            "tool_calls" if has_called and sample.finish_reason == "stop" else sample.finish_reason,
            int(sample.versions.max()),
            prompt_ids,
            said.calls,
        )

    def _prompt_ids(self, asked: _Asked, index: int) -> list[int] | None:
        if not asked.body.return_token_ids or index in asked.num_told:
            return None
        ids: list[int] = asked.requests[index // asked.body.n].prompt_ids.tolist()
        return ids


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def _described(shape: torch.Size | None) -> str:
    return "not there" if shape is None else f"of shape {list(shape)}"
