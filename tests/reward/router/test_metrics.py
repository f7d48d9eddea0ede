from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from practicum.reward.router.desk import Desk
from practicum.reward.router.metrics import Metrics
from practicum.reward.router.settings import RouterSettings
from practicum.reward.router.upstream import State
from tests.reward.router.simulation import FakeRequest, begin, worker

FAMILIES = {
    "practicum_router_answers": "counter",
    "practicum_router_refusals": "counter",
    "practicum_router_latency_seconds": "histogram",
    "practicum_router_retries": "counter",
    "practicum_router_hedges": "counter",
    "practicum_router_abandoned": "counter",
    "practicum_router_cut": "counter",
    "practicum_router_waiting": "gauge",
    "practicum_router_clients": "gauge",
    "practicum_router_worker_requests": "counter",
    "practicum_router_worker_failures": "counter",
    "practicum_router_worker_ejections": "counter",
    "practicum_router_worker_seconds": "counter",
    "practicum_router_worker_in_flight": "gauge",
    "practicum_router_worker_pace": "gauge",
    "practicum_router_worker_slots": "gauge",
    "practicum_router_worker_state": "gauge",
}
URLS = ("http://a:1", "http://b:1")


@pytest.fixture
def desk() -> Desk:
    return Desk(RouterSettings.make(workers=URLS))


def families(desk: Desk) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(Metrics(desk).text().decode())}


def value(desk: Desk, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    samples = [sample for family in families(desk).values() for sample in family.samples if sample.name == name]
    return next((sample.value for sample in samples if sample.labels == (labels or {})), None)


def test_all_families_are_there_from_the_start(desk: Desk) -> None:
    found = families(desk)
    assert {name: family.type for name, family in found.items()} == FAMILIES
    assert all(family.documentation for family in found.values())
    assert families(Desk(RouterSettings.make())).keys() == FAMILIES.keys()


def test_what_is_counted_can_be_read(desk: Desk) -> None:
    stats = desk.stats
    for status in (200, 200, 404):
        stats.answered(status, 0.25)
    stats.refused("queue_full")
    stats.retries, stats.hedges, stats.abandoned, stats.cut = 4, 3, 2, 1
    assert value(desk, "practicum_router_answers_total", {"status": "200"}) == 2
    assert value(desk, "practicum_router_answers_total", {"status": "404"}) == 1
    assert value(desk, "practicum_router_refusals_total", {"reason": "queue_full"}) == 1
    for name, number in (("retries", 4), ("hedges", 3), ("abandoned", 2), ("cut", 1)):
        assert value(desk, f"practicum_router_{name}_total") == number
    assert value(desk, "practicum_router_waiting") == 0
    assert value(desk, "practicum_router_clients") == 0


def test_latencies_are_cumulative_buckets(desk: Desk) -> None:
    for latency_s in (0.0005, 0.003, 0.003, 0.7, 1.0, 10_000.0):
        desk.stats.answered(200, latency_s)
    family = families(desk)["practicum_router_latency_seconds"]
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert list(buckets) == sorted(buckets) and list(buckets.values()) == sorted(buckets.values())
    at = {0.001: 1, 0.0025: 1, 0.005: 3, 0.5: 3, 1.0: 5, 600.0: 5, math.inf: 6}
    assert {bound: buckets[bound] for bound in at} == at
    assert value(desk, "practicum_router_latency_seconds_count") == 6
    assert value(desk, "practicum_router_latency_seconds_sum") == pytest.approx(10_001.7065)


def test_each_worker_has_its_figures(desk: Desk) -> None:
    busy = worker(desk.fleet, "http://a:1")
    begin(desk.fleet, busy, FakeRequest())
    begin(desk.fleet, busy, FakeRequest())
    busy.num_failures, busy.num_ejections, busy.seconds = 3, 1, 12.5
    expected = {
        "requests_total": 2,
        "in_flight": 2,
        "failures_total": 3,
        "ejections_total": 1,
        "seconds_total": 12.5,
        "pace": busy.pace.pace,
        "slots": busy.pace.slots,
    }
    for name, number in expected.items():
        assert value(desk, f"practicum_router_worker_{name}", {"worker": "http://a:1"}) == number
    assert value(desk, "practicum_router_worker_in_flight", {"worker": "http://b:1"}) == 0


def test_each_worker_is_in_exactly_one_state(desk: Desk) -> None:
    def states() -> dict[str, list[str]]:
        samples = families(desk)["practicum_router_worker_state"].samples
        return {url: [s.labels["state"] for s in samples if s.labels["worker"] == url and s.value] for url in URLS}

    assert states() == {"http://a:1": ["starting"], "http://b:1": ["starting"]}
    one, other = desk.fleet
    for state in State:
        one.state = state
        assert states()["http://a:1"] == [state.value]
    one.state = other.state = State.UP
    one.paused = True
    assert states() == {"http://a:1": ["paused"], "http://b:1": ["up"]}
    one.draining = True
    other.version = 1
    desk.fleet.want_version(2)
    assert states() == {"http://a:1": ["draining"], "http://b:1": ["stale"]}


def test_a_removed_worker_has_no_figures(desk: Desk) -> None:
    desk.fleet.remove(worker(desk.fleet, "http://a:1"))
    assert value(desk, "practicum_router_worker_requests_total", {"worker": "http://a:1"}) is None
    assert value(desk, "practicum_router_worker_requests_total", {"worker": "http://b:1"}) == 0
