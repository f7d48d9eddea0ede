from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from practicum.rollout.remote.client import CompletionsClient, ServerFailure
from tests.rollout.fake_completions import FakeServer

BODY = {"model": "table", "prompt": [5], "max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "n": 1, "seed": 0}
BODY |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}


def run(work: Callable[[CompletionsClient], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def whole() -> Any:
        client = CompletionsClient(**settings)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(whole())


async def streamed(client: CompletionsClient, url: str, body: dict[str, Any]) -> list[int]:
    async with aclosing(client.stream(url, body)) as parts:
        return [token async for part in parts for token in part["choices"][0]["token_ids"]]


def test_an_answer_in_parts_is_the_same_as_whole() -> None:
    with FakeServer() as server:
        whole = run(lambda client: client.call(server.url, "POST", "/v1/completions", BODY))
        assert run(lambda client: streamed(client, server.url, BODY)) == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("500", "500: .*made up 500"), ("cut", "in the middle"), ("error", "made up"), ("hang", "wait for 0.4 s")],
)
def test_what_goes_wrong_is_transient(fault: str, said: str) -> None:
    with FakeServer(faults=[fault]) as server, pytest.raises(ServerFailure, match=said) as failure:
        run(lambda client: streamed(client, server.url, BODY), timeout_s=0.4)
    assert failure.value.is_transient and server.url in str(failure.value)


def test_a_refusal_is_not() -> None:
    with FakeServer(faults=["400"]) as server, pytest.raises(ServerFailure, match="made up 400") as failure:
        run(lambda client: client.call(server.url, "POST", "/v1/completions", BODY))
    assert not failure.value.is_transient and failure.value.status == 400


def test_the_limit_is_on_the_time_between_tokens_not_on_the_whole() -> None:
    with FakeServer(delay_s=0.2) as server:
        tokens = run(lambda client: streamed(client, server.url, BODY | {"max_tokens": 8}), timeout_s=1.0)
    assert len(tokens) == 8


def test_a_part_may_be_longer_than_any_buffer() -> None:
    from aiohttp import web

    ids = list(range(100_000))

    class Long(FakeServer):
        async def _completions(self, request: web.Request) -> web.StreamResponse:
            part = str({"choices": [{"index": 0, "token_ids": ids}]}).replace("'", '"')
            return web.Response(body=f": comment\n\ndata: {part}\r\n\r\ndata: [DONE]\n\n".encode())

    with Long() as server:
        assert run(lambda client: streamed(client, server.url, BODY)) == ids


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerFailure, match=r"http://127\.0\.0\.1:9 cannot be asked for /health") as failure:
        run(lambda client: client.call("http://127.0.0.1:9", "GET", "/health"))
    assert failure.value.is_transient


def test_a_client_outlives_the_event_loop_it_was_used_on_first() -> None:
    client = CompletionsClient()

    async def health(server: FakeServer, *, closes: bool) -> Any:
        found = await client.call(server.url, "GET", "/v1/models")
        if closes:
            await client.close()
        return found

    with FakeServer() as server:
        assert asyncio.run(health(server, closes=False)) == asyncio.run(health(server, closes=True))
