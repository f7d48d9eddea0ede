"""What a program holds of a router that runs somewhere: its address, its control plane, and how to stop it."""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from practicum.errors import RouterError

TIMEOUT_S = 10.0


class RouterControl:
    """The control plane from Python, such as at http://127.0.0.1:9000/router. Calls that fail raise a `RouterError`."""

    def __init__(self, admin_url: str, token: str | None = None) -> None:
        self.admin_url = admin_url.rstrip("/")
        self._token = token

    def workers(self) -> list[dict[str, Any]]:
        """The workers and their live figures."""
        told: list[dict[str, Any]] = self._call("GET", "/workers")
        return told

    def add(self, url: str, version: int | None = None) -> None:
        """A worker from now on. It gets requests once it has answered a probe."""
        self._call("POST", "/workers", url=url, **({} if version is None else {"version": version}))

    def remove(self, url: str) -> None:
        """No worker any more. What it has, it finishes."""
        self._call("DELETE", "/workers", url=url)

    def drain(self, url: str) -> None:
        """No new requests, but it stays in the book. `resume` undoes it."""
        self._call("POST", "/drain", url=url)

    def pause(self, url: str = "all") -> None:
        """No requests for a while: they wait, as far as others don't take them."""
        self._call("POST", "/pause", url=url)

    def resume(self, url: str = "all") -> None:
        self._call("POST", "/resume", url=url)

    def set_version(self, url: str, version: int) -> None:
        """The version of the weights this worker has."""
        self._call("POST", "/version", url=url, version=version)

    def want_version(self, version: int | None) -> None:
        """Workers with an older version get nothing until they have this one. None: any will do."""
        self._call("POST", "/version", version=version)

    def metrics(self) -> str:
        return self._ask("GET", "/metrics", None).decode()

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        data = self._ask(method, path, json.dumps(fields).encode() if fields else None)
        try:
            return json.loads(data)
        except ValueError:
            raise RouterError(
                f"{self.admin_url} is not a router's control plane: that is at /router of its address, unless it has a "
                "port of its own."
            ) from None

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        parts = urlsplit(self.admin_url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request(method, f"{parts.path}{path}", body, headers)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise RouterError(f"the router at {self.admin_url} does not answer: {error}.") from None
        finally:
            connection.close()
        if reply.status != 200:
            raise RouterError(f"{method} {self.admin_url}{path}: {_message(data)}")
        return data


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")


class RouterHandle(RouterControl, ABC):
    """A router that was started from here. Leaving its `with` block stops it."""

    def __init__(self, url: str, admin_url: str, token: str | None) -> None:
        super().__init__(admin_url, token)
        self.url = url
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0

    @abstractmethod
    def stop(self) -> None:
        """Finish what is under way, then end. Stopping twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
