"""Malformed requests are refused, and nothing a worker could take for a request comes through behind them."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.reward.router.client import Client, request
from tests.reward.router.conftest import Pair
from tests.reward.router.corpus import HEADS, SMUGGLED, HeadCase
from tests.reward.router.corpus_bodies import BODIES, CHOICES, TRUNCATED, BodyCase, ChoiceCase
from tests.reward.router.wire import Head

REFUSAL_S = 2.0
MARK = b"/still-serving"


def refuse(client: Client, pieces: list[bytes], half_close: bool = False) -> bytes:
    """Send, and return all that comes until the router closes; it has two seconds for that."""
    client.offer(pieces)
    if half_close:
        with contextlib.suppress(OSError):
            client.half_close()
    return client.rest(REFUSAL_S)


def check_refusal(answered: bytes, statuses: frozenset[int]) -> None:
    """A refusal is one complete answer, or none if the router had to close at once."""
    if not answered:
        return
    assert answered.startswith(b"HTTP/1.1 "), answered[:200]
    head = Head(answered.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert head.status in statuses, answered[:300]
    assert b"close" in head.tokens(b"connection"), "the client should be told that the connection ends"
    assert len(answered) - len(head.raw) == head.length(), "one answer, whole and alone"


def check_still_serving(pair: Pair) -> None:
    with pair.client() as client:
        assert client.get(MARK).data == MARK


def seen_by_worker(pair: Pair) -> list[bytes]:
    """What reached the worker on each connection, without the request that shows that the router still serves."""
    pair.worker.settle()
    mark = request(target=MARK)
    return [rest for data in pair.worker.received().values() if (rest := data.removesuffix(mark))]


def in_pieces(raw: bytes) -> list[bytes]:
    return [raw[start : start + 7] for start in range(0, len(raw), 7)]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_a_malformed_head_is_refused(pair: Pair, case: HeadCase) -> None:
    with pair.client() as client:
        answered = refuse(client, [case.raw + SMUGGLED])
    check_still_serving(pair)
    assert seen_by_worker(pair) == []
    check_refusal(answered, case.statuses)


@pytest.mark.parametrize("case", [case for case in HEADS if len(case.raw) < 1000], ids=lambda case: case.name)
def test_a_malformed_head_in_small_packets_is_refused(pair: Pair, case: HeadCase) -> None:
    with pair.client() as client:
        answered = refuse(client, in_pieces(case.raw + SMUGGLED))
    check_still_serving(pair)
    assert seen_by_worker(pair) == []
    check_refusal(answered, case.statuses)


def check_body_case(pair: Pair, case: BodyCase, answered: bytes) -> None:
    seen = seen_by_worker(pair)
    assert len(seen) <= 1
    assert all(case.may_be_seen(data) for data in seen), seen
    assert [arrived.head.target for arrived in pair.worker.requests] == [MARK]
    if answered:
        check_refusal(answered, frozenset({400, 408, 413, 431, 502}))


@pytest.mark.parametrize("case", BODIES, ids=lambda case: case.name)
@pytest.mark.parametrize("split", ["one packet", "head first", "small packets"])
def test_a_malformed_body_is_never_completed(pair: Pair, case: BodyCase, split: str) -> None:
    body = case.good + case.bad + SMUGGLED
    with pair.client() as client:
        if split == "head first":
            client.send(case.head)
            pair.worker.wait_for(lambda worker: bool(worker.received()), "the head")
        pieces = {"one packet": [case.head + body], "head first": [body], "small packets": in_pieces(case.head + body)}
        answered = refuse(client, pieces[split])
    check_still_serving(pair)
    check_body_case(pair, case, answered)


@pytest.mark.parametrize("case", TRUNCATED, ids=lambda case: case.name)
@pytest.mark.parametrize("then", ["half-close", "reset"])
def test_a_truncated_request_is_never_completed(pair: Pair, case: BodyCase, then: str) -> None:
    raw = case.head + case.good + case.bad
    answered = b""
    with pair.client() as client:
        if then == "half-close":
            answered = refuse(client, [raw], half_close=True)
        else:
            client.send(raw)
            client.reset()
    check_still_serving(pair)
    if not case.head.endswith(b"\r\n\r\n"):
        assert seen_by_worker(pair) == []
    check_body_case(pair, case, answered)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_a_doubtful_request_is_refused_or_read_alike_by_both(pair: Pair, case: ChoiceCase) -> None:
    with pair.client() as client:
        client.offer([case.raw + request(target=b"/second", fields=[b"Connection: close"])])
        answered = client.rest(REFUSAL_S)
    check_still_serving(pair)
    served = [(seen.head.target, seen.data) for seen in pair.worker.requests]
    if answered.startswith(b"HTTP/1.1 200 "):
        assert served == [(case.target, case.data), (b"/second", b""), (MARK, b"")]
    else:
        assert served == [(MARK, b"")]
        check_refusal(answered, frozenset({400, 413, 414, 431, 501}))


@pytest.mark.parametrize("case", HEADS[::12], ids=lambda case: case.name)
def test_what_came_before_a_malformed_request_is_served(pair: Pair, case: HeadCase) -> None:
    with pair.client() as client:
        client.offer([request(target=b"/before") + case.raw + SMUGGLED])
        assert client.response().data == b"/before"
        answered = client.rest(REFUSAL_S)
    check_still_serving(pair)
    assert [seen.head.target for seen in pair.worker.requests] == [b"/before", MARK]
    assert seen_by_worker(pair) in ([], [request(target=b"/before")])
    check_refusal(answered, case.statuses)


@pytest.mark.parametrize("case", BODIES[::20], ids=lambda case: case.name)
def test_a_malformed_body_takes_its_workers_connection_down(pair: Pair, case: BodyCase) -> None:
    """Half a request was sent on it, so nothing else may ever be."""
    with pair.client() as client:
        client.send(case.head)
        pair.worker.wait_for(lambda worker: bool(worker.received()), "the head")
        (connection,) = pair.worker.received()
        refuse(client, [case.good + case.bad + SMUGGLED])
        pair.worker.wait_for_closed(connection, REFUSAL_S)


def test_refusals_are_quick_and_leave_nothing_behind(pair: Pair) -> None:
    started = time.monotonic()
    for _ in range(200):
        with pair.client() as client:
            assert refuse(client, [b"garbage\r\n\r\n"]).startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - started < 5.0
    check_still_serving(pair)


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len({case.raw for case in HEADS} | {case.head + case.good + case.bad for case in BODIES}) >= 750
    for cases in (HEADS, BODIES, TRUNCATED, CHOICES):
        assert len({case.name for case in cases}) == len(cases)
