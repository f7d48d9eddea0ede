"""A server's figures, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "practicum_server_requests", "Requests that were answered.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "practicum_server_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["path"],
            buckets=_BOUNDS_S,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "practicum_server_first_token_seconds",
            "From a streamed request's arrival to its first token.",
            buckets=_BOUNDS_S,
            registry=registry,
        )
        self.num_abandoned = Counter(
            "practicum_server_abandoned", "Requests whose client went away.", registry=registry
        )
        self.num_control_tokens = Counter(
            "practicum_server_control_tokens",
            "Control tokens in the messages of chats, read as plain text.",
            registry=registry,
        )
        self._read = Counter("practicum_server_prompt_tokens", "Tokens that were read.", registry=registry)
        self._written = Counter("practicum_server_written_tokens", "Tokens that were written.", registry=registry)

    def answered(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def add_tokens(self, num_read: int, num_written: int = 0) -> None:
        self._read.inc(num_read)
        self._written.inc(num_written)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a figure that is looked up whenever it is asked for."""
        Gauge(f"practicum_server_{name}", text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
