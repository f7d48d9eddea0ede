"""A service that a server stands in front of: one model, the paths it answers, and how it sleeps."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from aiohttp import web
from pydantic import ValidationError

from practicum.rollout.schemas import ChatMessage, DetokenizeRequest, Request, TokenizeRequest, describe
from practicum.rollout.server.encoder import Encoder, Ids, Limit
from practicum.rollout.server.errors import BadRequest, NoSuchModel
from practicum.rollout.server.metrics import Metrics

B = TypeVar("B", bound=Request)
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def held(lock: asyncio.Lock, timeout_s: float, holder: str) -> AsyncIterator[None]:
    """Hold a lock in the block. Raise `TimeoutError` with who has it where it is not free in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await lock.acquire()
    except TimeoutError:
        raise TimeoutError(f"{holder} has not ended within {timeout_s:g} s") from None
    try:
        yield
    finally:
        lock.release()


class Service(ABC):
    """`names` are those that requests may call the model by; None: any. `reader` is its name in error messages."""

    handlers: Mapping[str, Handler]
    """The handlers by path, for the time that it is awake."""
    num_weight_bytes: int
    """The size of the model, awake or not."""

    def __init__(
        self, name: str, encoder: Encoder, limit: Limit, names: frozenset[str] | None, reader: str = "this model"
    ) -> None:
        self.name = name
        self.reader = reader
        self.encoder = encoder
        self.limit = limit
        self.metrics = Metrics()
        self._names = names
        self._shielded: set[asyncio.Task[Any]] = set()
        # A prompt of 10,000 tokens takes the tokenizer 9 ms, one of 100,000 takes 180 ms: meanwhile others are served.
        self._encoder_thread = ThreadPoolExecutor(1, thread_name_prefix="practicum-encode")

    @property
    @abstractmethod
    def is_awake(self) -> bool: ...

    @property
    def weight_version(self) -> int | None:
        """The version of the weights; None where they never change."""
        return None

    @abstractmethod
    async def sleep(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def wake(self, timeout_s: float) -> None: ...

    async def close(self) -> None:
        self._encoder_thread.shutdown(wait=False)

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Await it, and see it through even if the caller is gone: half a change would be of no use to anybody."""
        task = asyncio.create_task(change)
        self._shielded.add(task)
        task.add_done_callback(self._shielded.discard)
        return await asyncio.shield(task)

    def parse(self, kind: type[B], data: bytes) -> B:
        try:
            request = kind.model_validate(json.loads(data))
        except ValidationError as error:
            raise BadRequest(describe(error)) from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}.") from None
        if request.model is not None:
            self.check_name(request.model)
        return request

    def check_name(self, name: str) -> None:
        if self._names is not None and name not in self._names:
            raise NoSuchModel(f"there is no model {name!r} here; this is {self.name!r}.")

    async def in_encoder(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in the thread that has the tokenizer, so that the event loop answers others meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder_thread, lambda: function(*args, **kwargs))

    # In the encoder thread

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        opens_turn: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Ids:
        read = []
        for index, message in enumerate(messages):
            try:
                read.append(message.for_template(self.reader))
            except ValueError as error:
                raise BadRequest(f"messages.{index}: {error}.") from error
        self.metrics.num_control_tokens.inc(self.encoder.control_tokens.count(read))
        return self.encoder.chat(read, opens_turn=opens_turn, tools=tools, options=options)

    def tokenize(self, data: bytes) -> dict[str, object]:
        request = self.parse(TokenizeRequest, data)
        if request.prompt is not None:
            ids = self.encoder.text(request.prompt, add_special_tokens=request.add_special_tokens)
        else:
            ids = self.encode_chat(
                request.messages or [],
                opens_turn=request.add_generation_prompt,
                tools=request.tools,
                options=request.chat_template_kwargs,
            )
        tokens = ids.tolist()
        reply: dict[str, object] = {"tokens": tokens, "count": len(tokens), "max_model_len": self.limit.num_tokens}
        if request.return_token_strs:
            reply["token_strs"] = [self.encoder.token_text(token) for token in tokens]
        return reply

    def detokenize(self, data: bytes) -> dict[str, object]:
        ids = self.encoder.checked(self.parse(DetokenizeRequest, data).tokens)
        return {"prompt": self.encoder.decode(ids, skip_special_tokens=False)}
