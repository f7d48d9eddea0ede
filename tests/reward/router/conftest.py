"""Routers and fake workers for the tests of this folder; what a test starts is stopped after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.reward.router.client import Client, wait_until_up
from tests.reward.router.fakes import FakeWorker, echo_target


@dataclass(frozen=True, slots=True)
class Pair:
    """A router with one worker behind it."""

    worker: FakeWorker
    url: str

    def client(self, timeout_s: float = 5.0) -> Client:
        return Client(self.url, timeout_s)


# A worker that fails on purpose is not to be put out, unless a test is about that.
OPTIONS = {"policy": "least_requests", "eject_after": 1000}


@contextlib.contextmanager
def running_router(*workers: FakeWorker, **options: Any) -> Iterator[Any]:
    from practicum.reward.router import Router

    with Router(workers=[worker.url for worker in workers], port=0, **OPTIONS | options).start() as running:
        wait_until_up(running.url)
        yield running


@pytest.fixture(autouse=True)
def nothing_raised_in_the_loop(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception in a callback ends a connection, which a client may well expect at that moment: look for it."""
    yield
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.fixture
def start_worker() -> Iterator[Callable[..., FakeWorker]]:
    """`start_worker(handler, ...)`: a fake worker; at the end it must not have met anything malformed."""
    started: list[FakeWorker] = []

    def start(*args: Any, port: int = 0, **options: Any) -> FakeWorker:
        started.append(FakeWorker(*args, **options).start(port))
        return started[-1]

    yield start
    for worker in started:
        worker.close()
    assert [error for worker in started for error in worker.errors] == []


@pytest.fixture
def start_router() -> Iterator[Callable[..., Any]]:
    """`start_router(worker, ..., policy=...)`: a router on a thread of this process."""
    with contextlib.ExitStack() as stack:
        yield lambda *workers, **options: stack.enter_context(running_router(*workers, **options))


@pytest.fixture(scope="module")
def module_pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        worker = FakeWorker().start()
        stack.callback(worker.close)
        yield Pair(worker, stack.enter_context(running_router(worker)).url)


@pytest.fixture
def pair(module_pair: Pair) -> Iterator[Pair]:
    """One router and worker for all tests of a module, which echoes targets until a test says otherwise."""
    worker = module_pair.worker
    worker.handler = echo_target
    worker.forget()
    worker.errors.clear()
    yield module_pair
    assert worker.errors == []
