from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from practicum.errors import RolloutError, WorkerDied
from practicum.rollout.delivery import WeightDelivery
from practicum.rollout.replica import RolloutReplica
from practicum.weights import Place, Ticket
from tests.rollout.writers import ModelWeights


class FakeReplica:
    """Has whatever version it was given; `fails` so many times, `is_wrong` about the weights it has."""

    def __init__(self, number: int, weights: ModelWeights, fails: int = 0, is_wrong: bool = False) -> None:
        self.number = number
        self.name = f"rollout-{number}"
        self.fails = fails
        self.is_wrong = is_wrong
        self.tickets: list[Ticket | None] = []
        self._weights = weights

    def wake_up(self) -> None: ...

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
