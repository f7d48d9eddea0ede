"""A client to ask model servers, and what to ask."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp


def texts(num: int, longest: int = 40) -> list[str]:
    """Sums of many lengths, all different."""
    return [("12+34=" * longest)[: 1 + (7 * i) % longest] + f"{i}" for i in range(num)]


def ask(
    url: str, path: str, body: Any = None, *, method: str = "POST", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of the answer; `body` as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    request = urllib.request.Request(url + path, data if method == "POST" else None, dict(headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask_all(
    url: str, path: str, bodies: Sequence[Any], timeout_s: float = 120.0, headers: Mapping[str, str] | None = None
) -> list[tuple[int, Any]]:
    """All at once, each on a connection of its own."""

    async def run() -> list[tuple[int, Any]]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def one(body: Any) -> tuple[int, Any]:
                async with session.post(url + path, json=body, headers=headers) as reply:
                    return reply.status, await reply.json()

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(run())


def score_of(answer: tuple[int, Any]) -> float:
    status, body = answer
    assert status == 200, body
    return float(body["data"][0]["probs"][0])
