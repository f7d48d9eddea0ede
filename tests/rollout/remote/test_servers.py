"""Servers that die, come back with old weights, or hold wrong ones; with and without a router in front."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.models import load_model
from practicum.reward.router import Router
from practicum.rollout.openai import OpenAIRollout
from practicum.types import Sample, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.asking import ask, run, written
from tests.rollout.fake_completions import FakeServer

TOKEN = "secret"
SEQUENCES = [np.array([3, 5, 9], np.int32)]


class Scene:
    """Two servers, and an engine that asks them, through a router or in turn."""

    def __init__(self, stack: ExitStack, model: Path, *, has_router: bool) -> None:
        self.servers = [FakeServer("practicum", version=0, delay_s=0.002) for _ in range(2)]
        for server in self.servers:
            server.on_update = self._taker(server)
            server.__enter__()
        self._alive = list(self.servers)
        stack.callback(lambda: [self.kill(server) for server in list(self._alive)])
        router: dict[str, Any] = {}
        if has_router:
            made = Router([server.url for server in self.servers], token=TOKEN, retrial_s=0.1, probe_interval_s=0.1)
            self.router = stack.enter_context(made.start())
            router = {"router": self.router.url, "router_token": TOKEN}
        self.engine = OpenAIRollout([one.url for one in self.servers], model_path=str(model), timeout_s=20.0, **router)
        stack.callback(lambda: run(self.engine.close()))
        self._weights = [(name, parameter.detach()) for name, parameter in load_model(str(model)).named_parameters()]

    @staticmethod
    def _taker(server: FakeServer) -> Callable[[dict[str, Any]], None]:
        def take(body: dict[str, Any]) -> None:
            server.version = body["version"]

        return take

    def kill(self, server: FakeServer) -> None:
        self._alive.remove(server)
        server.__exit__()

    def start_again(self, server: FakeServer) -> None:
        """A new process: it has the weights it was first started with."""
        server.version = 0
        server.requests.clear()
        server.calls.clear()
        server.__enter__()
        self._alive.append(server)

    def update(self, version: int) -> None:
        run(self.engine.update_weights(WeightUpdate(version, self._weights, shared=False)))
        run(self.engine.log_probs(SEQUENCES))

    def write(self, num: int = 24) -> list[Sample]:
        params = SamplingParams(6, ignore_eos=True)
        return written(self.engine, *(ask(params, seed=seed) for seed in range(num)))


def versions(samples: list[Sample]) -> set[int]:
    return {int(version) for sample in samples for version in sample.versions}


@pytest.fixture(params=["in turn", "router"])
def scene(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        made = Scene(stack, tiny_model, has_router=request.param == "router")
        run(made.engine.resume())
        yield made


def test_others_take_what_a_dying_server_had(scene: Scene) -> None:
    one, other = scene.servers
    scene.update(1)
    one.requests.clear()
    one.delay_s = other.delay_s = 0.05
    dying = threading.Timer(0.15, scene.kill, [one])
    dying.start()
    samples = scene.write()
    dying.join()
    assert one.requests, "it had some in hand"
    assert len(samples) == 24 and versions(samples) == {1}
    assert all(len(sample.token_ids) == 6 for sample in samples)


def test_weights_go_to_the_living_and_the_dead_one_gets_the_newest_before_it_serves(scene: Scene) -> None:
    one, other = scene.servers
    scene.update(1)
    scene.kill(one)
    scene.update(2)
    assert versions(scene.write()) == {2}
    scene.start_again(one)
    time.sleep(0.5)  # the router has probed it by now
    assert versions(scene.write()) == {2}
    assert not one.requests, "it has old weights"
    scene.update(3)
    assert [body["version"] for path, body in one.calls if path == "/update_weights"] == [3]
    one.requests.clear()
    assert versions(scene.write(60)) == {3}
    assert one.requests and other.requests


def test_a_server_that_came_back_unseen_is_found_out_by_its_weights(scene: Scene) -> None:
    one, _ = scene.servers
    scene.update(7)
    scene.kill(one)
    scene.start_again(one)  # between two requests: nobody was refused
    assert versions(scene.write()) == {7}
    one.requests.clear()
    assert versions(scene.write()) == {7}
    assert not one.requests
    scene.update(8)
    assert versions(scene.write(60)) == {8} and one.requests


def test_versions_may_go_back(scene: Scene) -> None:
    """As after a checkpoint was loaded: a server that is left out does not count as newer."""
    one, _ = scene.servers
    scene.update(9)
    scene.kill(one)
    scene.update(4)
    scene.start_again(one)
    time.sleep(0.5)
    one.requests.clear()
    assert versions(scene.write()) == {4} and not one.requests


def test_with_none_left_all_are_named(scene: Scene) -> None:
    scene.update(1)
    for server in scene.servers:
        server.delay_s = 1.0  # nothing is finished before they die, however busy the machine is
    dying = [threading.Timer(0.2, scene.kill, [server]) for server in scene.servers]
    for timer in dying:
        timer.start()
    began = time.monotonic()
    with pytest.raises(RolloutError) as failed:
        scene.write()
    assert time.monotonic() - began < 10
    assert all(server.url in str(failed.value) for server in scene.servers)
    with pytest.raises(RolloutError, match=r"none of rollout\.openai\.servers"):
        scene.update(2)
    for timer in dying:
        timer.join()


def test_whoever_comes_back_with_other_log_probs_stays_out(scene: Scene) -> None:
    one, other = scene.servers
    scene.update(1)
    scene.kill(one)
    scene.update(2)
    scene.start_again(one)
    one.table = one.table + np.eye(len(one.table))  # it takes weights wrongly
    scene.update(3)
    one.requests.clear()
    assert versions(scene.write()) == {3} and not one.requests
    one.table = other.table
    scene.update(4)
    assert versions(scene.write(60)) == {4} and one.requests


def test_a_server_that_is_not_there_at_first_is_taken_in_with_the_next_weights(tiny_model: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(stack, tiny_model, has_router=False)
        one, _ = scene.servers
        scene.kill(one)
        run(scene.engine.resume())
        scene.update(1)
        assert len(scene.write()) == 24
        scene.start_again(one)
        scene.update(2)
        assert versions(scene.write()) == {2} and one.requests


def test_servers_that_take_no_weights_are_asked_again_when_they_answer(tiny_model: Path) -> None:
    with FakeServer() as other:
        one = FakeServer()
        with one:
            engine = OpenAIRollout([one.url, other.url], model_path=str(tiny_model))
            run(engine.resume())

        def write() -> int:
            return len(written(engine, *(ask(SamplingParams(6), seed=seed) for seed in range(9))))

        assert write() == 9
        with one:
            one.requests.clear()
            other.faults = ["500"]  # which is a reason to look round
            assert write() == 9
            assert write() == 9 and one.requests
        run(engine.close())
