"""What a server stands in front of: one model, the paths it answers, and how it sleeps."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from aiohttp import web

from practicum.rollout.serving.bodies import Body, DetokenizeBody, TokenizeBody, parse, turns_of
from practicum.rollout.serving.metrics import Meter
from practicum.rollout.serving.refusals import NoSuchModel
from practicum.rollout.serving.texts import Encoder, Limit

B = TypeVar("B", bound=Body)
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Service(ABC):
    """`names` are those that requests may call the model by; None: any. `reader` is who reads them, in words."""

    def __init__(
        self, name: str, encoder: Encoder, limit: Limit, names: frozenset[str] | None, reader: str = "this model"
    ) -> None:
        self.name = name
        self.reader = reader
        self.encoder = encoder
        self.limit = limit
        self.meter = Meter()
        self._names = names
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="practicum-encode")  # the encoder's

    @property
    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """By path, what is answered while awake."""

    @property
    @abstractmethod
    def is_awake(self) -> bool: ...

    @property
    @abstractmethod
    def num_weight_bytes(self) -> int:
        """Size of the model, awake or not."""

    @property
    def weight_version(self) -> int | None:
        """None where they never change."""
        return None

    @abstractmethod
    def begin(self) -> None:
        """In the event loop that serves it, before anything is asked."""

    @abstractmethod
    async def sleep(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def wake(self, timeout_s: float) -> None: ...

    @abstractmethod
    def give_back(self) -> None:
        """The weights' memory, when it has been closed."""

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.shutdown)

    def parse(self, kind: type[B], data: bytes) -> B:
        body = parse(kind, data, self.reader)
        if body.model is not None:
            self.check_name(body.model)
        return body

    def check_name(self, name: str) -> None:
        if self._names is not None and name not in self._names:
            raise NoSuchModel(f"there is no model {name!r} here; this is {self.name!r}.")

    async def in_reader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In the thread that has the tokenizer, so that the event loop answers others meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, lambda: function(*args, **kwargs))

    async def tokenize(self, data: bytes) -> dict[str, object]:
        return await self.in_reader(self._tokenize, data)

    async def detokenize(self, data: bytes) -> dict[str, object]:
        return await self.in_reader(self._detokenize, data)

    def _tokenize(self, data: bytes) -> dict[str, object]:
        body = self.parse(TokenizeBody, data)
        if body.prompt is not None:
            ids = self.encoder.text(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            ids = self.encoder.chat(
                turns_of(body.messages or []),
                ready_for_answer=body.add_generation_prompt,
                tools=body.tools,
                options=body.chat_template_kwargs,
            )
        tokens = ids.tolist()
        told: dict[str, object] = {"tokens": tokens, "count": len(tokens), "max_model_len": self.limit.num_tokens}
        if body.return_token_strs:
            told["token_strs"] = [self.encoder.spelled(token) for token in tokens]
        return told

    def _detokenize(self, data: bytes) -> dict[str, object]:
        ids = self.encoder.checked(self.parse(DetokenizeBody, data).tokens)
        return {"prompt": self.encoder.decode(ids, skip_special_tokens=False)}
