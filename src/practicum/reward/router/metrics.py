"""The router's figures in Prometheus' text format, read off when asked: passing a request touches no metric object."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from practicum.reward.router.desk import Desk
from practicum.reward.router.stats import BOUNDS_S

_STATES = ("starting", "up", "trial", "ejected", "draining", "paused", "stale")


class RouterCollector:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        yield from self._of_router()
        yield from self._of_workers()

    def _of_router(self) -> Iterator[Metric]:
        stats = self._desk.stats
        answers = CounterMetricFamily("practicum_router_answers", "Answers of workers passed on.", labels=["status"])
        for status, num in sorted(stats.statuses.items()):
            answers.add_metric([str(status)], num)
        yield answers
        refusals = CounterMetricFamily("practicum_router_refusals", "Requests the router answered.", labels=["reason"])
        for reason, num in sorted(stats.refusals.items()):
            refusals.add_metric([reason], num)
        yield refusals
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        latency = HistogramMetricFamily("practicum_router_latency_seconds", "From a request's arrival to its answer.")
        latency.add_metric([], list(zip(bounds, accumulate(stats.latencies), strict=True)), stats.seconds)
        yield latency
        for name, value, text in (
            ("retries", stats.retries, "Attempts after a failed one."),
            ("hedges", stats.hedges, "Second attempts beside a slow one."),
            ("abandoned", stats.abandoned, "Requests whose client hung up."),
            ("cut", stats.cut, "Answers whose worker failed in the middle."),
        ):
            yield CounterMetricFamily(f"practicum_router_{name}", text, value=value)
        yield GaugeMetricFamily("practicum_router_waiting", "Requests without a worker.", value=self._desk.num_waiting)
        yield GaugeMetricFamily("practicum_router_clients", "Open connections.", value=len(self._desk.clients))

    def _of_workers(self) -> Iterator[Metric]:
        fleet = self._desk.fleet
        requests = CounterMetricFamily("practicum_router_worker_requests", "Requests sent to it.", labels=["worker"])
        failures = CounterMetricFamily("practicum_router_worker_failures", "Failures of it.", labels=["worker"])
        ejections = CounterMetricFamily("practicum_router_worker_ejections", "Times put out.", labels=["worker"])
        seconds = CounterMetricFamily("practicum_router_worker_seconds", "Its answers took.", labels=["worker"])
        in_flight = GaugeMetricFamily("practicum_router_worker_in_flight", "Requests it has.", labels=["worker"])
        pace = GaugeMetricFamily("practicum_router_worker_pace", "Seconds a unit of cost takes it.", labels=["worker"])
        slots = GaugeMetricFamily("practicum_router_worker_slots", "Requests it works on at once.", labels=["worker"])
        state = GaugeMetricFamily(
            "practicum_router_worker_state", "1 for the state it is in.", labels=["worker", "state"]
        )
        for upstream in fleet:
            url = [upstream.url]
            requests.add_metric(url, upstream.num_requests)
            failures.add_metric(url, upstream.num_failures)
            ejections.add_metric(url, upstream.num_ejections)
            seconds.add_metric(url, upstream.seconds)
            in_flight.add_metric(url, len(upstream.in_flight))
            pace.add_metric(url, upstream.pace.pace)
            slots.add_metric(url, upstream.pace.slots)
            for name in _STATES:
                state.add_metric([upstream.url, name], float(name == fleet.status_of(upstream)))
        yield from (requests, failures, ejections, seconds, in_flight, pace, slots, state)


class Metrics:
    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, desk: Desk) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RouterCollector(desk))

    def text(self) -> bytes:
        return generate_latest(self._registry)
