from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from practicum.errors import RolloutError, WeightsGone, WorkerDied
from practicum.rollout.delivery import WeightDelivery
from practicum.rollout.manager import RolloutManager
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.writing import HandingOut
from practicum.weights import Place, Ticket, WeightReceiver
from tests.rollout.writers import ModelWeights


class FakeReplica:
    """Has whatever version it was given; `fails` so many times, `is_wrong` about the weights it has."""

    is_own = True

    def __init__(self, number: int, weights: ModelWeights, fails: int = 0, is_wrong: bool = False) -> None:
        self.number = number
        self.name = f"rollout-{number}"
        self.fails = fails
        self.is_wrong = is_wrong
        self.tickets: list[Ticket | None] = []
        self.problem = ""
        self.num_restarts = 0
        self._weights = weights

    def wake_up(self) -> None: ...

    def sleep(self) -> None: ...

    def end(self) -> None: ...

    def restart(self) -> None:
        self.num_restarts += 1

    def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        if self.fails:
            self.fails -= 1
            raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])
        self.tickets.append(ticket)

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        factor = 1.5 if self.is_wrong and self.tickets else 1.0
        return [factor * found for found in self._weights.log_probs(sequences)]


@pytest.fixture
def weights(tiny_model: Path) -> ModelWeights:
    weights = ModelWeights(tiny_model, channel="shm")
    weights.open([Place.here()])
    return weights


def deliver(weights: ModelWeights, *replicas: Any) -> tuple[WeightDelivery, list[RolloutReplica]]:
    own = cast(list[RolloutReplica], list(replicas))
    return WeightDelivery(weights, own, vocab_size=16), own


def test_all_get_the_same_ticket_and_late_comers_too(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights)
    delivery, own = deliver(weights, one, other)
    assert delivery.send(own, 3) == {}
    delivery.send_again(own[1], 3)
    assert weights.num_sent == 1
    assert len(set(one.tickets + other.tickets)) == 1 and len(other.tickets) == 2


def test_whoever_failed_once_is_sent_them_again_alone(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights, fails=1)
    delivery, own = deliver(weights, one, other)
    assert delivery.send(own, 3) == {}
    assert (len(one.tickets), len(other.tickets), weights.num_sent) == (1, 1, 2)


def test_whoever_has_other_weights_than_the_trainer_is_named(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights, is_wrong=True)
    delivery, own = deliver(weights, one, other)
    failed = delivery.send(own, 3)
    assert list(failed) == [own[1]] and "'rollout-1' with weights of version 3 is not the model" in failed[own[1]]
    with pytest.raises(RolloutError, match="is not the model that the trainer has"):
        delivery.send_again(own[1], 3)


def test_without_receivers_nothing_is_sent_until_one_comes(weights: ModelWeights) -> None:
    delivery, own = deliver(weights, FakeReplica(0, weights))
    assert delivery.send([], 3) == {} and weights.num_sent == 0
    delivery.send_again(own[0], 3)
    assert weights.num_sent == 1


class MeetingReplica(FakeReplica):
    """Takes its weights where all meet."""

    def __init__(self, number: int, weights: ModelWeights, fails: int = 0) -> None:
        super().__init__(number, weights, fails)
        self.receiver = WeightReceiver(timeout_s=60.0)
        self.arrived: list[tuple[int, float]] = []  # versions, and what tells their weights apart

    def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        super().update_weights(version, ticket)
        assert ticket is not None
        update = self.receiver.receive(ticket)
        assert update.version == version
        self.arrived.append((version, sum(float(tensor.sum()) for _, tensor in update.tensors)))


@pytest.fixture
def meeting(tiny_model: Path) -> ModelWeights:
    weights = ModelWeights(tiny_model, channel="collective")
    weights.open([Place.here(), Place.here()])
    return weights


def test_nobody_waits_for_a_replica_that_is_gone(meeting: ModelWeights) -> None:
    """The channel would wait for half a minute."""
    one, dead, other = MeetingReplica(0, meeting), MeetingReplica(1, meeting, fails=99), MeetingReplica(2, meeting)
    delivery, own = deliver(meeting, one, dead, other)
    began = time.monotonic()
    failed = delivery.send(own, 3)
    assert time.monotonic() - began < 10
    assert list(failed) == [own[1]] and "rollout-1 died" in failed[own[1]]
    assert [version for version, _ in one.arrived] == [version for version, _ in other.arrived] == [3]
    dead.fails = 0
    delivery.send_again(own[1], 3)  # started anew
    assert dead.arrived == one.arrived


def test_two_that_are_gone_are_found_one_after_the_other(meeting: ModelWeights) -> None:
    replicas = [MeetingReplica(n, meeting, fails=99 if n % 2 else 0) for n in range(4)]
    delivery, own = deliver(meeting, *replicas)
    began = time.monotonic()
    assert set(delivery.send(own, 3)) == {own[1], own[3]}
    assert time.monotonic() - began < 15
    assert [len(replica.arrived) for replica in replicas] == [1, 0, 1, 0]


def test_a_version_that_the_trainer_has_learnt_on_from_is_gone(meeting: ModelWeights) -> None:
    one, late = MeetingReplica(0, meeting), MeetingReplica(1, meeting)
    delivery, own = deliver(meeting, one, late)
    assert delivery.send(own[:1], 3) == {}
    meeting.nudge()
    with pytest.raises(WeightsGone):
        delivery.send_again(own[1], 3)
    assert late.arrived == []
    assert delivery.send(own, 4) == {} and late.arrived == one.arrived[1:]


def test_whoever_comes_back_while_the_trainer_learns_gets_the_next_weights_not_newer_ones_as_old(
    meeting: ModelWeights,
) -> None:
    stays, returns = MeetingReplica(0, meeting), MeetingReplica(1, meeting)
    delivery, own = deliver(meeting, stays, returns)
    with RolloutManager(own, HandingOut(8, 60.0), delivery=delivery, sleeps=False) as manager:
        manager.update_weights(1)
        meeting.nudge()  # the trainer learns, and only then the replica is back
        manager.lose(own[1], "killed")
        wait_until(lambda: "gone" in own[1].problem)
        assert manager.well() == [own[0]] and returns.num_restarts == 1
        manager.update_weights(2)
        assert manager.well() == own and returns.num_restarts == 1
    assert [version for version, _ in returns.arrived] == [1, 2]
    assert returns.arrived == stays.arrived


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
