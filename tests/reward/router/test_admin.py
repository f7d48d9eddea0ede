"""The control plane over HTTP: who may call it, what it says, and what it does to requests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from practicum.reward.router.admin import Metrics
from practicum.reward.router.dispatcher import Dispatcher
from practicum.reward.router.pool import State
from practicum.reward.router.settings import RouterSettings
from tests.reward.router.client import LOCAL, Client, Response, request, worker_states
from tests.reward.router.conftest import OPTIONS, Pair
from tests.reward.router.fakes import Exchange, FakeWorker, echo_target
from tests.reward.router.simulation import FakeRequest, begin, worker

StartWorker = Callable[..., FakeWorker]
StartRouter = Callable[..., Any]


def call(
    url: str, method: str, path: str, fields: Any = None, *, token: str | None = None, extra: tuple[bytes, ...] = ()
) -> Response:
    body = b"" if fields is None else json.dumps(fields).encode()
    given = (b"Authorization: Bearer " + token.encode(),) if token is not None else ()
    with Client(url) as client:
        return client.ask(request(method.encode(), path.encode(), [*given, *extra], body, LOCAL))


def message(response: Response) -> str:
    return str(json.loads(response.data)["error"]["message"])


def test_health_says_how_many_are_ready(pair: Pair) -> None:
    response = call(pair.url, "GET", "/router/health")
    told = json.loads(response.data)
    assert (response.status, told["status"], told["workers"], told["ready"]) == (200, "ok", 1, 1)


def test_health_is_503_when_nobody_is_ready(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = start_worker()
    router = start_router(worker)
    router.pause()
    response = call(router.url, "GET", "/router/health")
    assert (response.status, json.loads(response.data)["ready"]) == (503, 0)


def test_the_list_has_the_figures_of_each_worker(pair: Pair) -> None:
    with pair.client() as client:
        before = worker_states(pair.url)[0]["requests"]
        client.get(b"/x")
    (state,) = worker_states(pair.url)
    assert state["url"] == pair.worker.url
    assert state["requests"] == before + 1
    assert {
        "state",
        "reason",
        "in_flight",
        "limit",
        "failures",
        "ejections",
        "version",
        "pace",
        "slots",
    } <= state.keys()


def test_the_status_page_is_html_and_holds_no_figures(pair: Pair) -> None:
    for path in ("/router", "/router/"):
        response = call(pair.url, "GET", path)
        assert response.status == 200 and b"<!doctype html>" in response.data
        assert pair.worker.url.encode() not in response.data


def test_metrics_are_prometheus_text(pair: Pair) -> None:
    response = call(pair.url, "GET", "/router/metrics")
    assert response.head.raw.lower().count(b"content-type: text/plain; version=0.0.4") == 1
    assert f'practicum_router_worker_state{{state="up",worker="{pair.worker.url}"}} 1.0'.encode() in response.data


@pytest.mark.parametrize(
    "path", ["/router2", "/routers/workers", "/Router/health", "//router/health", "/x/router/health"]
)
def test_targets_that_only_look_like_the_control_plane_go_to_workers(pair: Pair, path: str) -> None:
    assert call(pair.url, "GET", path).data == path.encode()


def test_an_unknown_call_names_the_known_ones(pair: Pair) -> None:
    response = call(pair.url, "GET", "/router/nothing")
    assert response.status == 404 and "/router/workers" in message(response)


def test_a_wrong_method_names_the_right_ones(pair: Pair) -> None:
    response = call(pair.url, "PUT", "/router/workers")
    assert response.status == 405 and "GET, POST, DELETE" in message(response)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (None, "name the worker"),
        ([], "must be a JSON object"),
        ({"url": 5}, "name the worker"),
        ({"url": "ftp://x"}, "is not a URL"),
        ({"url": "http://127.0.0.1:9", "colour": 1}, "colour: only url and version"),
        ({"url": "http://127.0.0.1:9", "version": -1}, "whole number"),
        ({"url": "http://127.0.0.1:9", "version": True}, "whole number"),
    ],
)
def test_a_bad_body_is_400_and_says_why(pair: Pair, fields: Any, told: str) -> None:
    response = call(pair.url, "POST", "/router/workers", fields)
    assert response.status == 400 and told in message(response)
    assert len(worker_states(pair.url)) == 1


@pytest.mark.parametrize("fields", [None, {}, {"url": "http://127.0.0.1:9"}])
def test_a_version_that_is_not_named_changes_nothing(pair: Pair, fields: Any) -> None:
    response = call(pair.url, "POST", "/router/version", fields)
    assert response.status == 400 and "name the version" in message(response)


def test_a_body_that_is_not_json_is_400(pair: Pair) -> None:
    with pair.client() as client:
        response = client.ask(request(b"POST", b"/router/workers", body=b"{nonsense", host=LOCAL))
    assert response.status == 400 and "not JSON" in message(response)


def test_a_worker_that_is_here_already_is_409(pair: Pair) -> None:
    response = call(pair.url, "POST", "/router/workers", {"url": pair.worker.url + "/"})
    assert response.status == 409 and "already" in message(response)


def test_an_unknown_worker_is_404_and_the_known_are_named(pair: Pair) -> None:
    response = call(pair.url, "POST", "/router/drain", {"url": "http://127.0.0.1:1"})
    assert response.status == 404 and pair.worker.url in message(response)


@pytest.mark.parametrize("given", [None, "", "wrong", "secre", "secrets", "Secret"])
def test_without_the_right_token_every_call_but_health_and_the_page_is_401(
    start_worker: StartWorker, start_router: StartRouter, given: str | None
) -> None:
    from practicum.reward.router import Router

    worker = start_worker()
    with Router([worker.url], token="secret", **OPTIONS).start() as router:
        for method, path in (("GET", "/workers"), ("GET", "/metrics"), ("POST", "/drain"), ("DELETE", "/workers")):
            response = call(router.url, method, f"/router{path}", {"url": worker.url}, token=given)
            assert response.status == 401, path
            assert b"www-authenticate" in response.head.raw
        assert call(router.url, "GET", "/router/health").status == 200
        assert call(router.url, "GET", "/router").status == 200
        assert call(router.url, "GET", "/any").status == 200
        assert call(router.url, "GET", "/router/workers", token="secret").status == 200
        assert router.workers()[0]["state"] == "up"


def test_at_a_port_of_its_own_the_prefix_belongs_to_the_workers(start_worker: StartWorker) -> None:
    from practicum.reward.router import Router

    worker = start_worker()
    with Router([worker.url], admin_port=0, **OPTIONS).start() as router:
        assert call(router.url, "GET", "/router/health").data == b"/router/health"
        assert call(router.admin_url, "GET", "/health").status == 200
        assert call(router.admin_url, "GET", "/any").status == 404
        assert router.workers()[0]["url"] == worker.url


@pytest.mark.parametrize(
    ("host", "extra"), [(b"evil.test", ()), (b"127.0.0.1.evil.test", ()), (LOCAL, (b"Origin: http://evil.test",))]
)
def test_without_a_token_a_page_in_a_browser_may_not_call_it(pair: Pair, host: bytes, extra: tuple[bytes, ...]) -> None:
    body = json.dumps({"url": "http://127.0.0.1:9"}).encode()
    with pair.client() as client:
        response = client.ask(request(b"POST", b"/router/workers", extra, body, host))
        assert response.status == 403 and "without a token" in message(response)
    assert len(worker_states(pair.url)) == 1


def test_head_gets_the_head(pair: Pair) -> None:
    with pair.client() as client:
        for target in (b"/router/health", b"/router/nothing", b"/router/workers"):
            response = client.ask(request(b"HEAD", target, host=LOCAL))
            assert response.head.length() and not response.data
        assert client.is_kept()


def test_an_answer_keeps_the_connection(pair: Pair) -> None:
    with pair.client() as client:
        assert client.get(b"/router/health").status == 200
        assert client.get(b"/between").data == b"/between"
        assert client.ask(request(target=b"/router/nothing", host=LOCAL)).status == 404
        assert client.is_kept()


def test_a_long_or_chunked_body_is_413(pair: Pair) -> None:
    long = request(b"POST", b"/router/workers", [b"Content-Length: 100000"])
    chunked = request(b"POST", b"/router/workers", [b"Transfer-Encoding: chunked"])
    for raw in (long + b"x" * 100_000, chunked + b"0\r\n\r\n"):
        with pair.client() as client:
            client.offer([raw])
            assert client.response().status == 413


def test_paused_workers_let_requests_wait(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = start_worker()
    router = start_router(worker)
    router.pause(worker.url)
    assert worker_states(router.url)[0]["state"] == "paused"
    with Client(router.url) as client:
        client.send(request(target=b"/waits"))
        assert not worker.requests
        router.resume(worker.url)
        assert client.response().data == b"/waits"
    assert worker_states(router.url)[0]["failures"] == 0


def test_stale_workers_let_requests_wait_until_they_have_the_version(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    old, new = start_worker(), start_worker()
    router = start_router(old, new)
    router.set_version(old.url, 3)
    router.set_version(new.url, 4)
    router.want_version(4)
    assert [state["state"] for state in worker_states(router.url)] == ["stale", "up"]
    with Client(router.url) as client:
        for _ in range(4):
            client.get(b"/x")
    assert (len(old.requests), len(new.requests)) == (0, 4)
    router.want_version(5)
    with Client(router.url) as client:
        client.send(request(target=b"/waits"))
        router.set_version(old.url, 5)
        assert client.response().data == b"/waits"
    assert len(old.requests) == 1
    router.want_version(None)
    assert {state["state"] for state in worker_states(router.url)} == {"up"}


def test_a_draining_worker_finishes_what_it_has_and_gets_no_more(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    go_on = threading.Event()

    def slow(exchange: Exchange) -> None:
        exchange.read_body()
        go_on.wait(5.0)
        echo_target(exchange)

    drained, other = start_worker(slow), start_worker()
    router = start_router(drained, other)
    router.drain(other.url)
    with Client(router.url) as first, Client(router.url) as second:
        first.send(request(target=b"/first"))
        drained.wait_for(lambda worker: len(worker.requests) == 1, "a request")
        router.drain(drained.url)
        router.resume(other.url)
        assert second.get(b"/second").data == b"/second"
        go_on.set()
        assert first.response().data == b"/first"
    assert (len(drained.requests), len(other.requests)) == (1, 1)
    assert [state["state"] for state in worker_states(router.url)] == ["draining", "up"]


def test_workers_come_and_go_under_load_and_no_request_is_lost(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    workers = [start_worker() for _ in range(3)]
    router = start_router(workers[0], policy="expected_finish")
    stop, failures, num_done = threading.Event(), [], [0] * 8

    def ask_on(number: int) -> None:
        with Client(router.url) as client:
            while not stop.is_set():
                target = b"/%d/%d" % (number, num_done[number])
                if client.get(target).data != target:
                    failures.append(target)
                num_done[number] += 1

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        router.add(workers[1].url)
        router.add(workers[2].url)
        router.remove(workers[1].url)
        router.remove(workers[2].url)
    router.add(workers[1].url)
    workers[1].wait_for(lambda worker: bool(worker.requests), "a request")
    router.remove(workers[0].url)
    stop.set()
    for thread in threads:
        thread.join(5.0)
    assert failures == [] and min(num_done) > 0
    assert [state["url"] for state in worker_states(router.url)] == [workers[1].url]
    assert worker_states(router.url)[0]["in_flight"] == 0


FAMILIES = {
    "practicum_router_responses": "counter",
    "practicum_router_refusals": "counter",
    "practicum_router_latency_seconds": "histogram",
    "practicum_router_retries": "counter",
    "practicum_router_hedges": "counter",
    "practicum_router_abandoned": "counter",
    "practicum_router_truncated": "counter",
    "practicum_router_waiting": "gauge",
    "practicum_router_clients": "gauge",
    "practicum_router_worker_requests": "counter",
    "practicum_router_worker_failures": "counter",
    "practicum_router_worker_ejections": "counter",
    "practicum_router_worker_seconds": "counter",
    "practicum_router_worker_in_flight": "gauge",
    "practicum_router_worker_seconds_per_cost": "gauge",
    "practicum_router_worker_slots": "gauge",
    "practicum_router_worker_state": "gauge",
}
URLS = ("http://a:1", "http://b:1")


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(RouterSettings.make(workers=URLS))


def families(dispatcher: Dispatcher) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(Metrics(dispatcher).text().decode())}


def value(dispatcher: Dispatcher, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    samples = [sample for family in families(dispatcher).values() for sample in family.samples if sample.name == name]
    return next((sample.value for sample in samples if sample.labels == (labels or {})), None)


def test_all_families_are_there_from_the_start(dispatcher: Dispatcher) -> None:
    found = families(dispatcher)
    assert {name: family.type for name, family in found.items()} == FAMILIES
    assert all(family.documentation for family in found.values())
    assert families(Dispatcher(RouterSettings.make())).keys() == FAMILIES.keys()


def test_what_is_counted_can_be_read(dispatcher: Dispatcher) -> None:
    stats = dispatcher.stats
    for status in (200, 200, 404):
        stats.record(status, 0.25)
    stats.refusals["queue_full"] += 1
    stats.retries, stats.hedges, stats.abandoned, stats.truncated = 4, 3, 2, 1
    assert value(dispatcher, "practicum_router_responses_total", {"status": "200"}) == 2
    assert value(dispatcher, "practicum_router_responses_total", {"status": "404"}) == 1
    assert value(dispatcher, "practicum_router_refusals_total", {"reason": "queue_full"}) == 1
    for name, number in (("retries", 4), ("hedges", 3), ("abandoned", 2), ("truncated", 1)):
        assert value(dispatcher, f"practicum_router_{name}_total") == number
    assert value(dispatcher, "practicum_router_waiting") == 0
    assert value(dispatcher, "practicum_router_clients") == 0


def test_latencies_are_cumulative_buckets(dispatcher: Dispatcher) -> None:
    for latency_s in (0.0005, 0.003, 0.003, 0.7, 1.0, 10_000.0):
        dispatcher.stats.record(200, latency_s)
    family = families(dispatcher)["practicum_router_latency_seconds"]
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert list(buckets) == sorted(buckets) and list(buckets.values()) == sorted(buckets.values())
    at = {0.001: 1, 0.0025: 1, 0.005: 3, 0.5: 3, 1.0: 5, 600.0: 5, math.inf: 6}
    assert {bound: buckets[bound] for bound in at} == at
    assert value(dispatcher, "practicum_router_latency_seconds_count") == 6
    assert value(dispatcher, "practicum_router_latency_seconds_sum") == pytest.approx(10_001.7065)


def test_each_worker_has_its_figures(dispatcher: Dispatcher) -> None:
    busy = worker(dispatcher.pool, "http://a:1")
    begin(dispatcher.pool, busy, FakeRequest())
    begin(dispatcher.pool, busy, FakeRequest())
    busy.num_failures, busy.num_ejections, busy.seconds = 3, 1, 12.5
    expected = {
        "requests_total": 2,
        "in_flight": 2,
        "failures_total": 3,
        "ejections_total": 1,
        "seconds_total": 12.5,
        "seconds_per_cost": busy.estimate.seconds_per_cost,
        "slots": busy.estimate.slots,
    }
    for name, number in expected.items():
        assert value(dispatcher, f"practicum_router_worker_{name}", {"worker": "http://a:1"}) == number
    assert value(dispatcher, "practicum_router_worker_in_flight", {"worker": "http://b:1"}) == 0


def test_each_worker_is_in_exactly_one_state(dispatcher: Dispatcher) -> None:
    def states() -> dict[str, list[str]]:
        samples = families(dispatcher)["practicum_router_worker_state"].samples
        return {url: [s.labels["state"] for s in samples if s.labels["worker"] == url and s.value] for url in URLS}

    assert states() == {"http://a:1": ["starting"], "http://b:1": ["starting"]}
    one, other = dispatcher.pool
    for state in State:
        one.state = state
        assert states()["http://a:1"] == [state.value]
    one.state = other.state = State.UP
    one.paused = True
    assert states() == {"http://a:1": ["paused"], "http://b:1": ["up"]}
    one.draining = True
    other.version = 1
    dispatcher.pool.want_version(2)
    assert states() == {"http://a:1": ["draining"], "http://b:1": ["stale"]}


def test_a_removed_worker_has_no_figures(dispatcher: Dispatcher) -> None:
    dispatcher.pool.remove(worker(dispatcher.pool, "http://a:1"))
    assert value(dispatcher, "practicum_router_worker_requests_total", {"worker": "http://a:1"}) is None
    assert value(dispatcher, "practicum_router_worker_requests_total", {"worker": "http://b:1"}) == 0
