"""The control plane from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from practicum.errors import RouterError
from practicum.reward.router import Router, RouterControl
from tests.reward.router.fakes import FakeWorker


def test_a_control_drives_a_router_by_its_address(
    start_worker: Callable[..., FakeWorker], start_router: Callable[..., Any]
) -> None:
    first, second = start_worker(), start_worker()
    router = start_router(first)
    control = RouterControl(f"{router.url}/router/")
    control.add(second.url, version=7)
    assert [worker["url"] for worker in control.workers()] == [first.url, second.url]
    assert control.workers()[1]["version"] == 7
    control.remove(first.url)
    assert [worker["url"] for worker in control.workers()] == [second.url]
    assert "practicum_router_waiting 0.0" in control.metrics()


def test_errors_of_the_router_are_raised_with_its_words() -> None:
    with Router().start() as router:
        with pytest.raises(RouterError, match="worker http://a:1 is not here; the workers are: none"):
            router.drain("http://a:1")
        router.add("http://127.0.0.1:9")
        with pytest.raises(RouterError, match="already"):
            router.add("http://127.0.0.1:9")


def test_a_wrong_token_is_an_error() -> None:
    with Router(token="right").start() as router, pytest.raises(RouterError, match="Authorization: Bearer"):
        RouterControl(router.admin_url, "wrong").workers()


def test_a_router_that_is_not_there_is_an_error() -> None:
    with Router().start() as router:
        url = router.admin_url
    with pytest.raises(RouterError, match="does not answer"):
        RouterControl(url).workers()


def test_an_address_that_is_no_control_plane_is_an_error(start_worker: Callable[..., FakeWorker]) -> None:
    with (
        Router([start_worker().url]).start() as router,
        pytest.raises(RouterError, match="not a router's control plane"),
    ):
        RouterControl(router.url).workers()
