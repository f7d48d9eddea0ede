"""A client of servers that answer `/v1/completions`.

Prompts go out as token ids. Answers come back as they are written, since only that way something is left of one that is
aborted. What a server cannot do it is not asked for: see `capabilities`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from practicum.secret import TOKEN_HEADER

_CONNECT_S = 10.0
_MOST_QUOTED = 500
# Worth another try: too many at once, or the server (or a router's worker) in trouble.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_PLAIN_TEXT = ("/v1/load_lora_adapter",)  # paths whose answer is a sentence


class ServerFailure(Exception):
    """A server did not answer as asked. If `is_transient`, the same request may succeed later or elsewhere."""

    def __init__(self, server: str, reason: str, *, is_transient: bool, status: int | None = None) -> None:
        super().__init__(f"server {server} {reason}")
        self.is_transient = is_transient
        self.status = status


class Transport(Protocol):
    """The way for requests of the completions protocol: over HTTP, or within this process."""

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Return the answer, None where there is none. Raises `ServerFailure`."""

    def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Yield the parts of a completion as they are written. Leaving it early ends the request."""

    async def close(self) -> None: ...


class CompletionsClient:
    """A client over HTTP. Servers are addresses such as http://host:8000; `timeout_s` is the time between two parts.
    `router_tokens` are what routers want to see, by their addresses."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        router_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._routers = {server: {TOKEN_HEADER: token} for server, token in (router_tokens or {}).items()}
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Connections live on one event loop: that which the session was made on.
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Return the JSON answer, None where there is none or it is a sentence. Raises `ServerFailure`."""
        timeout_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().request(
                    method, server + path, json=body, headers=self._routers.get(server)
                ) as reply:
                    data = await reply.read()
        except TimeoutError:
            raise ServerFailure(server, f"did not answer {path} within {timeout_s:g} s", is_transient=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(server, f"cannot be asked for {path}: {_message(error)}", is_transient=True) from error
        _check(server, path, reply.status, data)
        return _parsed(server, path, data) if data.strip() and path not in _PLAIN_TEXT else None

    async def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Yield the parts of a completion. Leaving it early closes the connection, which ends the request there."""
        path = "/v1/completions"
        loop = asyncio.get_running_loop()
        is_whole = False
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                headers = self._routers.get(server)
                async with self._open().post(server + path, json={**body, "stream": True}, headers=headers) as reply:
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
                            reason = f"broke off an answer: {_quoted(data)}"
                            raise ServerFailure(server, reason, is_transient=True)
                        yield part
                        limit.reschedule(loop.time() + self.timeout_s)
        except TimeoutError:
            reason = f"let an answer wait for {self.timeout_s:g} s"
            raise ServerFailure(server, reason, is_transient=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(server, f"broke the connection: {_message(error)}", is_transient=True) from error
        if not is_whole:
            raise ServerFailure(server, "ended an answer in the middle", is_transient=True)

    async def close(self) -> None:
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            if self._session is not None:
                self._session.detach()  # the connections went with their event loop
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the engine decides how many requests go ahead
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                headers=self._headers,
                trust_env=False,
            )
        return self._session


def chosen_log_probs(choice: Mapping[str, Any]) -> list[float]:
    """Return the log-probs of the tokens of a choice, or of one part of it."""
    return [float("nan") if value is None else float(value) for value in (choice["logprobs"]["token_logprobs"] or [])]


def token_names(choice: Mapping[str, Any]) -> Sequence[str]:
    """Return what the server calls the tokens of a choice: texts, or `token_id:5`."""
    names: Sequence[str] = choice["logprobs"]["tokens"] or []
    return names


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: the first part of an answer may repeat a long prompt."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _check(server: str, path: str, status: int, data: bytes) -> None:
    if not 200 <= status < 300:
        reason = f"answered {path} with {status}: {_quoted(data)}"
        raise ServerFailure(server, reason, is_transient=status in _TRANSIENT, status=status)


def _parsed(server: str, path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        reason = f"answered {path} with what is not JSON: {_quoted(data)}"
        raise ServerFailure(server, reason, is_transient=False) from None


def _quoted(data: bytes) -> str:
    text = data[: 4 * _MOST_QUOTED].decode(errors="replace")
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + " ..."


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__
