"""The control plane: a few calls under a prefix of the router's address, or at a port of their own.

    GET    /router            a page to look at        GET    /router/health    is it serving?
    GET    /router/metrics    for Prometheus           GET    /router/workers   the workers and their live figures
    POST   /router/workers    {"url": …} add           DELETE /router/workers   {"url": …} remove, after it is done
    POST   /router/drain | pause | resume {"url": …}   POST   /router/version   {"version": …[, "url": …]}

The page and /health are open to all; the rest wants the bearer token or, where none is set, a caller on this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from practicum.errors import RouterError
from practicum.reward.router.dispatcher import BOUNDS_S, Dispatcher
from practicum.reward.router.http1 import RequestHead, error_response, response
from practicum.reward.router.pool import Upstream
from practicum.secret import is_bearer

PREFIX = "/router"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = Path(__file__).with_name("page.html")
_LOCAL_HOST = re.compile(rb"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]*)?", re.IGNORECASE)
_STATES = ("starting", "up", "trial", "ejected", "draining", "paused", "stale")
_OF_WORKERS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[Upstream], float]], ...] = (
    (CounterMetricFamily, "requests", "Requests sent to it.", lambda one: one.num_requests),
    (CounterMetricFamily, "failures", "Failures of it.", lambda one: one.num_failures),
    (CounterMetricFamily, "ejections", "Times it was ejected.", lambda one: one.num_ejections),
    (CounterMetricFamily, "seconds", "Its responses took.", lambda one: one.seconds),
    (GaugeMetricFamily, "in_flight", "Requests it has.", lambda one: len(one.in_flight)),
    (GaugeMetricFamily, "seconds_per_cost", "A unit of cost takes it.", lambda one: one.estimate.seconds_per_cost),
    (GaugeMetricFamily, "slots", "Requests it works on at once.", lambda one: one.estimate.slots),
)


class Refused(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(status, code, reason)
        self.status, self.code, self.reason = status, code, reason


class Metrics:
    """The router's figures in Prometheus' text format, read when asked: passing a request touches no metric object."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus' registry."""
        stats, pool = self._dispatcher.stats, self._dispatcher.pool
        responses = CounterMetricFamily(
            "practicum_router_responses", "Workers' responses forwarded.", labels=["status"]
        )
        for status, num in sorted(stats.statuses.items()):
            responses.add_metric([str(status)], num)
        yield responses
        refusals = CounterMetricFamily("practicum_router_refusals", "Requests the router answered.", labels=["reason"])
        for reason, num in sorted(stats.refusals.items()):
            refusals.add_metric([reason], num)
        yield refusals
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        latency = HistogramMetricFamily("practicum_router_latency_seconds", "From a request's arrival to its response.")
        latency.add_metric([], list(zip(bounds, accumulate(stats.latencies), strict=True)), stats.seconds)
        yield latency
        for name, value, text in (
            ("retries", stats.retries, "Attempts after a failed one."),
            ("hedges", stats.hedges, "Second attempts beside a slow one."),
            ("abandoned", stats.abandoned, "Requests whose client hung up."),
            ("truncated", stats.truncated, "Responses whose worker failed in the middle."),
        ):
            yield CounterMetricFamily(f"practicum_router_{name}", text, value=value)
        num_waiting, num_clients = self._dispatcher.num_waiting, len(self._dispatcher.clients)
        yield GaugeMetricFamily("practicum_router_waiting", "Requests without a worker.", value=num_waiting)
        yield GaugeMetricFamily("practicum_router_clients", "Open connections.", value=num_clients)
        for kind, name, text, figure in _OF_WORKERS:
            family = kind(f"practicum_router_worker_{name}", text, labels=["worker"])
            for upstream in pool:
                family.add_metric([upstream.url], figure(upstream))
            yield family
        labels = ["worker", "state"]
        states = GaugeMetricFamily("practicum_router_worker_state", "1 for the state it is in.", labels=labels)
        for upstream in pool:
            for name in _STATES:
                states.add_metric([upstream.url, name], float(name == pool.status(upstream)))
        yield states


class Admin:
    def __init__(self, dispatcher: Dispatcher, token: str | None, prefix: str = PREFIX) -> None:
        self._dispatcher = dispatcher
        self._token = token
        self._prefix = prefix
        self._metrics = Metrics(dispatcher)
        self._calls: dict[tuple[str, str], Callable[[Mapping[str, Any]], Any]] = {
            ("GET", "/workers"): self._list,
            ("POST", "/workers"): self._add,
            ("DELETE", "/workers"): self._remove,
            ("POST", "/drain"): partial(self._set, draining=True),
            ("POST", "/pause"): partial(self._set, paused=True),
            ("POST", "/resume"): partial(self._set, paused=False, draining=False),
            ("POST", "/version"): self._set_version,
        }

    def serves(self, target: bytes) -> bool:
        start = self._prefix.encode()
        return not start or (target.startswith(start) and target[len(start) :][:1] in (b"", b"/", b"?"))

    def respond(self, head: RequestHead, body: bytes, peer: tuple[Any, ...] | None, *, close: bool) -> bytes:
        method = "GET" if head.method == b"HEAD" else head.method.decode()
        path = head.target.decode("ascii", "replace").partition("?")[0].removeprefix(self._prefix).rstrip("/")
        try:
            if method == "GET" and path == "":
                return response(200, _PAGE.read_bytes(), "text/html; charset=utf-8", close=close)
            if method == "GET" and path == "/health":
                return self._health(close)
            self._check_caller(head, peer)
            if method == "GET" and path == "/metrics":
                return response(200, self._metrics.text(), METRICS_TYPE, close=close)
            return _json(200, self._find(method, path)(_fields(body)), close=close)
        except RouterError as error:
            return error_response(400, "not_possible", str(error), close=close)
        except Refused as error:
            return error_response(error.status, error.code, error.reason, close=close)

    def _find(self, method: str, path: str) -> Callable[[Mapping[str, Any]], Any]:
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
            # A page in a browser on this machine is not a caller of this machine.
            if not _is_loopback(peer) or head.origin is not None or not _LOCAL_HOST.fullmatch(head.host or b""):
                raise Refused(403, "no_token", "without a token the control plane serves callers on its machine only.")
            return
        if not is_bearer(head.authorization, self._token):
            raise Refused(401, "wrong_token", "send the router's token as `Authorization: Bearer TOKEN`.")

    def _health(self, close: bool) -> bytes:
        num_ready = len(self._dispatcher.policy.ready)
        state = "draining" if self._dispatcher.draining else "ok" if num_ready else "no worker is ready"
        figures = {
            "status": state,
            "policy": self._dispatcher.settings.policy,
            "workers": len(self._dispatcher.pool),
            "ready": num_ready,
            "in_flight": self._dispatcher.pool.num_in_flight,
            "waiting": self._dispatcher.num_waiting,
            "wanted_version": self._dispatcher.pool.wanted_version,
        }
        return _json(200 if state == "ok" else 503, figures, close=close)

    def _list(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._figures(upstream) for upstream in self._dispatcher.pool]

    def _add(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        url, version = _url(fields), _version(fields)
        if self._dispatcher.pool.find(url) is not None:
            raise Refused(409, "known_worker", f"worker {url} is here already.")
        upstream = self._dispatcher.pool.add(url)
        upstream.version = version
        return self._figures(upstream)

    def _remove(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        upstream = self._worker(fields)
        self._dispatcher.pool.remove(upstream)
        return self._figures(upstream)

    def _set(self, fields: Mapping[str, Any], **flags: bool) -> Any:
        chosen = list(self._dispatcher.pool) if fields.get("url") == "all" else [self._worker(fields)]
        for upstream in chosen:
            for name, value in flags.items():
                setattr(upstream, name, value)
            self._dispatcher.pool.refresh(upstream)
        figures = [self._figures(upstream) for upstream in chosen]
        return figures if fields.get("url") == "all" else figures[0]

    def _set_version(self, fields: Mapping[str, Any]) -> Any:
        """Set the version a worker has or, without a URL, the one that is wanted: older workers get no requests."""
        if "version" not in fields:
            raise Refused(400, "no_version", 'name the version: {"version": 7}, or null for none.')
        version = _version(fields)
        if "url" in fields:
            upstream = self._worker(fields)
            upstream.version = version
            self._dispatcher.pool.refresh(upstream)
            return self._figures(upstream)
        self._dispatcher.pool.want_version(version)
        return {"wanted_version": version}

    def _worker(self, fields: Mapping[str, Any]) -> Upstream:
        url = _url(fields)
        upstream = self._dispatcher.pool.find(url)
        if upstream is None:
            known = ", ".join(one.url for one in self._dispatcher.pool) or "none"
            raise Refused(404, "unknown_worker", f"worker {url} is not here; the workers are: {known}.")
        return upstream

    def _figures(self, upstream: Upstream) -> dict[str, Any]:
        return {
            "url": upstream.url,
            "state": self._dispatcher.pool.status(upstream),
            "reason": self._dispatcher.pool.reason(upstream),
            "in_flight": len(upstream.in_flight),
            "limit": upstream.limit,
            "requests": upstream.num_requests,
            "failures": upstream.num_failures,
            "ejections": upstream.num_ejections,
            "version": upstream.version,
            "pace": round(upstream.estimate.seconds_per_cost, 6),
            "slots": upstream.estimate.slots,
            "connections": len(upstream.idle) + len(upstream.in_flight),
        }


def _is_loopback(peer: tuple[Any, ...] | None) -> bool:
    return peer is not None and ip_address(str(peer[0]).partition("%")[0]).is_loopback


def _json(status: int, value: Any, *, close: bool) -> bytes:
    return response(status, json.dumps(value, indent=1).encode() + b"\n", "application/json", close=close)


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
