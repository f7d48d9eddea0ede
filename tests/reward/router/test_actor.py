"""A router as an actor of Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from practicum.controller import RayResourcePool, ray_cluster
from practicum.errors import RouterError
from practicum.reward.router import Router, RouterControl
from tests.reward.router.client import Client
from tests.reward.router.fakes import FakeWorker


@pytest.mark.slow
def test_an_actor_serves_and_ends(start_worker: Callable[..., FakeWorker]) -> None:
    worker = start_worker()
    with ray_cluster():
        with Router([worker.url]).start_actor() as router:
            with Client(router.url) as client:
                assert client.get(b"/x").data == b"/x"
            assert router.workers()[0]["requests"] == 1
            with pytest.raises(RouterError, match="Bearer"):  # it has a token, since callers come from anywhere
                RouterControl(router.admin_url).workers()
        with pytest.raises(OSError):
            Client(router.url)
        with (
            RayResourcePool([1]) as pool,
            Router([worker.url]).start_actor(pool) as router,
            Client(router.url) as client,
        ):
            assert client.get(b"/pool").data == b"/pool"
