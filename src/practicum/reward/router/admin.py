"""The control plane: a few calls under a prefix of the router's address, or at a port of their own.

    GET    /router            a page to look at        GET    /router/health    is it serving?
    GET    /router/metrics    for Prometheus           GET    /router/workers   the workers and their live figures
    POST   /router/workers    {"url": …} add           DELETE /router/workers   {"url": …} remove, after it is done
    POST   /router/drain | pause | resume {"url": …}   POST   /router/version   {"version": …[, "url": …]}

The page and /health are open to all; the rest wants the bearer token or, where none is set, a caller on this machine.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from practicum.errors import RouterError
from practicum.reward.router.answers import answer, error_answer
from practicum.reward.router.desk import Desk
from practicum.reward.router.heads import RequestHead
from practicum.reward.router.metrics import Metrics
from practicum.reward.router.upstream import Upstream

PREFIX = "/router"
_PAGE = Path(__file__).with_name("page.html")
_LOCAL_HOST = re.compile(rb"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]*)?", re.IGNORECASE)
Call = Callable[[Mapping[str, Any]], Any]


class Refused(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(status, code, reason)
        self.status, self.code, self.reason = status, code, reason


class Admin:
    def __init__(self, desk: Desk, token: str | None, prefix: str = PREFIX) -> None:
        self._desk = desk
        self._token = token.encode() if token is not None else None
        self._prefix = prefix
        self._start = prefix.encode()
        self._metrics = Metrics(desk)
        self._calls: dict[tuple[str, str], Call] = {
            ("GET", "/workers"): self._list,
            ("POST", "/workers"): self._add,
            ("DELETE", "/workers"): self._remove,
            ("POST", "/drain"): self._drain,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/version"): self._set_version,
        }

    def serves(self, target: bytes) -> bool:
        if not self._prefix:
            return True
        if not target.startswith(self._start):
            return False
        return target[len(self._start) :][:1] in (b"", b"/", b"?")

    def answer(self, head: RequestHead, body: bytes, peer: tuple[Any, ...] | None, *, close: bool) -> bytes:
        method = "GET" if head.method == b"HEAD" else head.method.decode()
        path = head.target.decode("ascii", "replace").partition("?")[0].removeprefix(self._prefix).rstrip("/")
        try:
            if method == "GET" and path == "":
                return answer(200, _PAGE.read_bytes(), "text/html; charset=utf-8", close=close)
            if method == "GET" and path == "/health":
                return self._health(close)
            self._check_caller(head, peer)
            if method == "GET" and path == "/metrics":
                return answer(200, self._metrics.text(), Metrics.CONTENT_TYPE, close=close)
            return _json(200, self._find(method, path)(_fields(body)), close=close)
        except RouterError as error:
            return error_answer(400, "not_possible", str(error), close=close)
        except Refused as error:
            return error_answer(error.status, error.code, error.reason, close=close)

    def _find(self, method: str, path: str) -> Call:
        call = self._calls.get((method, path))
        if call is not None:
            return call
        allowed = [known for known, known_path in self._calls if known_path == path]
        if allowed:
            raise Refused(405, "wrong_method", f"{self._prefix}{path} takes {', '.join(allowed)}.")
        paths = ["/health", "/metrics", *dict.fromkeys(path for _, path in self._calls)]
        known = ", ".join(f"{self._prefix}{path}" for path in paths)
        raise Refused(404, "unknown_call", f"there is no {self._prefix}{path}; there are: {known}.")

    def _check_caller(self, head: RequestHead, peer: tuple[Any, ...] | None) -> None:
        if self._token is None:
            # A page open in somebody's browser on this machine is not somebody on this machine.
            if not _is_loopback(peer) or head.origin is not None or not _LOCAL_HOST.fullmatch(head.host or b""):
                raise Refused(403, "no_token", "without a token the control plane serves callers on its machine only.")
            return
        scheme, _, given = (head.authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise Refused(401, "wrong_token", "send the router's token as `Authorization: Bearer TOKEN`.")

    def _health(self, close: bool) -> bytes:
        num_ready = len(self._desk.policy.ready)
        state = "draining" if self._desk.draining else "ok" if num_ready else "no worker is ready"
        figures = {
            "status": state,
            "policy": self._desk.settings.policy,
            "workers": len(self._desk.fleet),
            "ready": num_ready,
            "in_flight": self._desk.fleet.num_in_flight,
            "waiting": self._desk.num_waiting,
            "wanted_version": self._desk.fleet.wanted_version,
        }
        return _json(200 if state == "ok" else 503, figures, close=close)

    def _list(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._figures(upstream) for upstream in self._desk.fleet]

    def _add(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        url, version = _url(fields), _version(fields)
        if self._desk.fleet.find(url) is not None:
            raise Refused(409, "known_worker", f"worker {url} is here already.")
        upstream = self._desk.fleet.add(url)
        upstream.version = version
        return self._figures(upstream)

    def _remove(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        upstream = self._worker(fields)
        self._desk.fleet.remove(upstream)
        return self._figures(upstream)

    def _drain(self, fields: Mapping[str, Any]) -> Any:
        return self._set(fields, draining=True)

    def _pause(self, fields: Mapping[str, Any]) -> Any:
        return self._set(fields, paused=True)

    def _resume(self, fields: Mapping[str, Any]) -> Any:
        return self._set(fields, paused=False, draining=False)

    def _set(self, fields: Mapping[str, Any], **flags: bool) -> Any:
        chosen = list(self._desk.fleet) if fields.get("url") == "all" else [self._worker(fields)]
        for upstream in chosen:
            for name, value in flags.items():
                setattr(upstream, name, value)
            self._desk.fleet.refresh(upstream)
        told = [self._figures(upstream) for upstream in chosen]
        return told if fields.get("url") == "all" else told[0]

    def _set_version(self, fields: Mapping[str, Any]) -> Any:
        """With a URL: what this worker has. Without: what is wanted; who has less gets nothing until it has it."""
        if "version" not in fields:
            raise Refused(400, "no_version", 'name the version: {"version": 7}, or null for none.')
        version = _version(fields)
        if "url" in fields:
            upstream = self._worker(fields)
            upstream.version = version
            self._desk.fleet.refresh(upstream)
            return self._figures(upstream)
        self._desk.fleet.want_version(version)
        return {"wanted_version": version}

    def _worker(self, fields: Mapping[str, Any]) -> Upstream:
        url = _url(fields)
        upstream = self._desk.fleet.find(url)
        if upstream is None:
            known = ", ".join(one.url for one in self._desk.fleet) or "none"
            raise Refused(404, "unknown_worker", f"worker {url} is not here; the workers are: {known}.")
        return upstream

    def _figures(self, upstream: Upstream) -> dict[str, Any]:
        return {
            "url": upstream.url,
            "state": self._desk.fleet.status_of(upstream),
            "reason": self._desk.fleet.why(upstream),
            "in_flight": len(upstream.in_flight),
            "limit": upstream.limit,
            "requests": upstream.num_requests,
            "failures": upstream.num_failures,
            "ejections": upstream.num_ejections,
            "version": upstream.version,
            "pace": round(upstream.pace.pace, 6),
            "slots": upstream.pace.slots,
            "connections": len(upstream.idle) + len(upstream.in_flight),
        }


def _is_loopback(peer: tuple[Any, ...] | None) -> bool:
    return peer is not None and ip_address(str(peer[0]).partition("%")[0]).is_loopback


def _json(status: int, value: Any, *, close: bool) -> bytes:
    return answer(status, json.dumps(value, indent=1).encode() + b"\n", "application/json", close=close)


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body) if body else {}
    except ValueError as error:
        raise Refused(400, "bad_json", f"the body is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise Refused(400, "bad_json", "the body must be a JSON object.")
    unknown = fields.keys() - {"url", "version"}
    if unknown:
        raise Refused(400, "unknown_field", f"{', '.join(sorted(unknown))}: only url and version can be given.")
    return fields


def _url(fields: Mapping[str, Any]) -> str:
    url = fields.get("url")
    if not isinstance(url, str):
        raise Refused(400, "no_url", 'name the worker: {"url": "http://host:port"}.')
    return url


def _version(fields: Mapping[str, Any]) -> int | None:
    version = fields.get("version")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise Refused(400, "bad_version", "version must be a whole number from 0, or null.")
    return version
