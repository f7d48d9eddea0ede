"""The one HTTP client of a reward worker: questions to routers, answers as JSON, failures with a status.

What a router has tried in vain is not tried again here. A refusal (4xx) is the question's fault and `invalid`; a broken
connection, 429 and 5xx are `infra_error`, but 504 is `timeout`. The caller sets a deadline by
cancelling.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from practicum.reward.limits import Permit
from practicum.types import ScoreStatus

_MOST_QUOTED = 300
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is asked over HTTP."""

    address: str
    """Of the router in front."""
    window: int
    """Questions one worker may have out: enough to keep everybody busy, so few that none of them waits for long."""
    timeout_s: float
    """From when a question goes out."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the router in front wants to see."""


class AskFailed(Exception):
    """Raised where a question has no usable answer."""

    def __init__(self, status: ScoreStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class RewardClient:
    """Asks targets by name. Belongs to the loop it is made in."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self.targets = targets
        self._permit: Permit | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the router decides how many go ahead
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
        )

    async def post(
        self, target: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Any:
        """Return the JSON answer of `target`. Raises `AskFailed`."""
        url = self.targets[target].address + path
        headers = {**(headers or {}), **self.targets[target].headers}
        try:
            # A redirection would lead past the router, and take its headers along.
            async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as reply:
                data = await reply.read()
                status = reply.status
        except (aiohttp.ClientError, OSError) as error:
            raise AskFailed("infra_error", f"{url} cannot be asked: {error!r}") from error
        if status != 200:  # 504 is a router's word for a server that did not answer in its time
            kind: ScoreStatus
            kind = "timeout" if status == 504 else "infra_error" if status >= 500 or status == 429 else "invalid"
            raise AskFailed(kind, f"{url} answered {status}: {_quoted(data)}")
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise AskFailed("invalid", f"{url} answered with what is not JSON: {_quoted(data)}") from error
        self._note_usage(answer)
        return answer

    def using(self, permit: Permit) -> RewardClient:
        """Return the same client, which writes the tokens it really uses on a permit."""
        view = copy.copy(self)
        view._permit = permit
        return view

    def _note_usage(self, answer: Any) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        if self._permit is not None and isinstance(total, int) and total >= 0:
            self._permit.tokens = total

    async def close(self) -> None:
        await self._session.close()


def _quoted(data: bytes) -> str:
    text = data[: 4 * _MOST_QUOTED].decode(errors="replace")
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + " ..."
