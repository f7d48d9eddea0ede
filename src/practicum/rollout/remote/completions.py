"""A client of servers that answer `/v1/completions`, on an event loop of its own thread.

Prompts go out as token ids. Answers come back as they are written, since only that way something is left of one that is
broken off. What a server cannot do it is not asked for: see `handshake`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import aiohttp

T = TypeVar("T")

_CONNECT_S = 10.0
_STOP_S = 10.0
_MOST_QUOTED = 500
# What may pass if one tries again: too many at once, or the server (or a router's worker) in trouble.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_IN_WORDS = ("/v1/load_lora_adapter",)  # what is answered with a sentence


class ServerFailure(Exception):
    """A server did not answer as asked. `may_pass`: the same request may succeed later or elsewhere."""

    def __init__(self, server: str, what: str, *, may_pass: bool, status: int | None = None) -> None:
        super().__init__(f"server {server} {what}")
        self.may_pass = may_pass
        self.status = status


class LoopThread:
    """An event loop that runs beside the callers'."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for it; how long that may take is up to the work."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_wind_up(), self.loop).result(2 * _STOP_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self.loop.close()


async def _wind_up() -> None:
    """Have everything else in this loop end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_STOP_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


class Transport(Protocol):
    """How requests of the completions protocol get to whoever answers them: over HTTP, or within this process."""

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """What is answered, None where there is nothing. Raises `ServerFailure`."""

    def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The parts of a completion as they are written. Leaving it early ends the request."""

    async def close(self) -> None: ...


class CompletionsClient:
    """`server` is an address such as http://host:8000; `timeout_s` is the longest time without news on a request."""

    def __init__(self, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The JSON answer, None where there is none or it is a sentence. Raises `ServerFailure`."""
        timeout_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().request(method, server + path, json=body) as reply:
                    data = await reply.read()
        except TimeoutError:
            raise ServerFailure(server, f"did not answer {path} within {timeout_s:g} s", may_pass=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(server, f"cannot be asked for {path}: {_said(error)}", may_pass=True) from error
        _check(server, path, reply.status, data)
        return _parsed(server, path, data) if data.strip() and path not in _IN_WORDS else None

    async def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The parts of a streamed completion. Leaving it early closes the connection, which ends the request there."""
        path = "/v1/completions"
        loop = asyncio.get_running_loop()
        is_whole = False
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                async with self._open().post(server + path, json={**body, "stream": True}) as reply:
                    if reply.status != 200:
                        _check(server, path, reply.status, await reply.read())
                    async for line in _lines(reply.content):
                        if not line.startswith(b"data:"):
                            continue
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            is_whole = True
                            break
                        part = _parsed(server, path, data)
                        if "error" in part:
                            what = f"broke off an answer: {_quoted(data)}"
                            raise ServerFailure(server, what, may_pass=True)
                        yield part
                        limit.reschedule(loop.time() + self.timeout_s)
        except TimeoutError:
            what = f"let an answer wait for {self.timeout_s:g} s"
            raise ServerFailure(server, what, may_pass=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(server, f"broke the connection: {_said(error)}", may_pass=True) from error
        if not is_whole:
            raise ServerFailure(server, "ended an answer in the middle", may_pass=True)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        """Made in the loop it will live in."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the engine decides how many go ahead
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                headers=self._headers,
                trust_env=False,
            )
        return self._session


def chosen_log_probs(choice: Mapping[str, Any]) -> list[float]:
    """Of the tokens of one choice, or of one part of it."""
    return [float("nan") if value is None else float(value) for value in (choice["logprobs"]["token_logprobs"] or [])]


def token_names(choice: Mapping[str, Any]) -> Sequence[str]:
    """What the server calls the tokens: texts, or `token_id:5`."""
    names: Sequence[str] = choice["logprobs"]["tokens"] or []
    return names


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Of any length: the first part of an answer may repeat a long prompt."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _check(server: str, path: str, status: int, data: bytes) -> None:
    if not 200 <= status < 300:
        what = f"answered {path} with {status}: {_quoted(data)}"
        raise ServerFailure(server, what, may_pass=status in _PASSING, status=status)


def _parsed(server: str, path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        what = f"answered {path} with what is not JSON: {_quoted(data)}"
        raise ServerFailure(server, what, may_pass=False) from None


def _quoted(data: bytes) -> str:
    text = data[: 4 * _MOST_QUOTED].decode(errors="replace")
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + " ..."


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
