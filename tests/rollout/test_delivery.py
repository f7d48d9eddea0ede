from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from practicum.errors import RolloutError, WeightsGone, WorkerDied
from practicum.rollout.delivery import WeightDelivery
from practicum.rollout.manager import RolloutManager
from practicum.rollout.replica import RolloutReplica
from practicum.weights import Place, Ticket, WeightReceiver
from tests.rollout.replicas import ModelWeights, ScriptedReplica, in_a_loop


class FakeReplica(ScriptedReplica):
    """Has whatever version it was given; `fails` so many times, `is_wrong` about the weights it has."""

    def __init__(self, number: int, weights: ModelWeights, fails: int = 0, is_wrong: bool = False) -> None:
        super().__init__(number)
        self.fails = fails
        self.is_wrong = is_wrong
        self.tickets: list[Ticket | None] = []
        self._weights = weights

    async def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        if self.fails:
            self.fails -= 1
            raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])
        self.tickets.append(ticket)

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        factor = 1.5 if self.is_wrong and self.tickets else 1.0
        return [factor * found for found in await self._weights.log_probs(sequences)]


@pytest.fixture
def weights(tiny_model: Path) -> ModelWeights:
    weights = ModelWeights(tiny_model, channel="shm")
    asyncio.run(weights.open([Place.here()]))
    return weights


async def deliver(weights: ModelWeights, *replicas: Any) -> tuple[WeightDelivery, list[RolloutReplica]]:
    own = cast(list[RolloutReplica], list(replicas))
    delivery = WeightDelivery(weights, own, vocab_size=16)
    await delivery.calibrate(own)
    return delivery, own


@in_a_loop
async def test_all_get_the_same_ticket_and_late_comers_too(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights)
    delivery, own = await deliver(weights, one, other)
    assert await delivery.send(own, 3) == {}
    await delivery.send_again(own[1], 3)
    assert weights.num_sent == 1
    assert len(set(one.tickets + other.tickets)) == 1 and len(other.tickets) == 2


@in_a_loop
async def test_whoever_failed_once_is_sent_them_again_alone(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights, fails=1)
    delivery, own = await deliver(weights, one, other)
    assert await delivery.send(own, 3) == {}
    assert (len(one.tickets), len(other.tickets), weights.num_sent) == (1, 1, 2)


@in_a_loop
async def test_whoever_has_other_weights_than_the_trainer_is_named(weights: ModelWeights) -> None:
    one, other = FakeReplica(0, weights), FakeReplica(1, weights, is_wrong=True)
    delivery, own = await deliver(weights, one, other)
    failed = await delivery.send(own, 3)
    assert list(failed) == [own[1]] and "'rollout-1' with weights of version 3 is not the model" in failed[own[1]]
    with pytest.raises(RolloutError, match="is not the model that the trainer has"):
        await delivery.send_again(own[1], 3)


@in_a_loop
async def test_without_receivers_nothing_is_sent_until_one_comes(weights: ModelWeights) -> None:
    delivery, own = await deliver(weights, FakeReplica(0, weights))
    assert await delivery.send([], 3) == {} and weights.num_sent == 0
    await delivery.send_again(own[0], 3)
    assert weights.num_sent == 1


class MeetingReplica(FakeReplica):
    """Takes its weights where all meet."""

    def __init__(self, number: int, weights: ModelWeights, fails: int = 0) -> None:
        super().__init__(number, weights, fails)
        self.receiver = WeightReceiver(timeout_s=60.0)
        self.arrived: list[tuple[int, float]] = []  # versions, and what tells their weights apart

    async def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        await super().update_weights(version, ticket)
        assert ticket is not None
        await asyncio.to_thread(self._take, version, ticket)

    def _take(self, version: int, ticket: Ticket) -> None:
        update = self.receiver.receive(ticket)
        assert update.version == version
        self.arrived.append((version, sum(float(tensor.sum()) for _, tensor in update.tensors)))


@pytest.fixture
def meeting(tiny_model: Path) -> ModelWeights:
    weights = ModelWeights(tiny_model, channel="collective")
    asyncio.run(weights.open([Place.here(), Place.here()]))
    return weights


@in_a_loop
async def test_nobody_waits_for_a_replica_that_is_gone(meeting: ModelWeights) -> None:
    """The channel would wait for half a minute."""
    one, dead, other = MeetingReplica(0, meeting), MeetingReplica(1, meeting, fails=99), MeetingReplica(2, meeting)
    delivery, own = await deliver(meeting, one, dead, other)
    failed = await delivery.send(own, 3)
    assert list(failed) == [own[1]] and "rollout-1 died" in failed[own[1]]
    assert [version for version, _ in one.arrived] == [version for version, _ in other.arrived] == [3]
    dead.fails = 0
    await delivery.send_again(own[1], 3)  # started anew
    assert dead.arrived == one.arrived


@in_a_loop
async def test_two_that_are_gone_are_found_one_after_the_other(meeting: ModelWeights) -> None:
    replicas = [MeetingReplica(n, meeting, fails=99 if n % 2 else 0) for n in range(4)]
    delivery, own = await deliver(meeting, *replicas)
    assert set(await delivery.send(own, 3)) == {own[1], own[3]}
    assert [len(replica.arrived) for replica in replicas] == [1, 0, 1, 0]


@in_a_loop
async def test_a_version_that_the_trainer_has_learnt_on_from_is_gone(meeting: ModelWeights) -> None:
    one, late = MeetingReplica(0, meeting), MeetingReplica(1, meeting)
    delivery, own = await deliver(meeting, one, late)
    assert await delivery.send(own[:1], 3) == {}
    meeting.nudge()
    with pytest.raises(WeightsGone):
        await delivery.send_again(own[1], 3)
    assert late.arrived == []
    assert await delivery.send(own, 4) == {} and late.arrived == one.arrived[1:]


@in_a_loop
async def test_whoever_comes_back_while_the_trainer_learns_gets_the_next_weights_not_newer_ones_as_old(
    meeting: ModelWeights,
) -> None:
    stays, returns = MeetingReplica(0, meeting), MeetingReplica(1, meeting)
    delivery, own = await deliver(meeting, stays, returns)
    async with RolloutManager(own, window=8, delivery=delivery, sleeps=False) as manager:
        await manager.update_weights(1)
        meeting.nudge()  # the trainer learns, and only then the replica is back
        manager._mark_failed(own[1], "killed")
        await manager._wait_for_restarts()
        assert "gone" in own[1].problem
        assert manager.healthy == [own[0]] and returns.num_restarts == 1
        await manager.update_weights(2)
        assert manager.healthy == own and returns.num_restarts == 1
    assert [version for version, _ in returns.arrived] == [1, 2]
    assert returns.arrived == stays.arrived
