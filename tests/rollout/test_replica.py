from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from practicum.controller import Controller, LocalWorkerGroup, RayClassWithInitArgs
from practicum.errors import WorkerDied
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import RolloutWorker
from practicum.types import PromptGroup
from tests.rollout.replicas import groups_of, hf_settings, in_a_loop


def packed(model: Path, **more: Any) -> RayClassWithInitArgs[RolloutWorker]:
    return RayClassWithInitArgs(RolloutWorker, hf_settings(model), **more)


async def generated(replica: RolloutReplica, rank: int, groups: list[PromptGroup]) -> list[PromptGroup]:
    async with aclosing(replica.generate(rank, groups)) as generating:
        return [group for some in [some async for some in generating] for group in some]


@in_a_loop
async def test_a_replica_of_its_own_can_be_started_again(tiny_model: Path) -> None:
    replica = await RolloutReplica.start(3, Controller(None, 60.0, 60.0), packed(tiny_model))
    assert (replica.name, replica.is_own, replica.num_workers) == ("rollout-3", True, 1)
    for restarts in range(2):
        await replica.wake_up()
        await replica.ping(0)
        assert len(await generated(replica, 0, groups_of(2))) == 2
        await replica.sleep()
        await replica.restart()
        assert replica.num_restarts == restarts + 1
    await replica.end()
    with pytest.raises(WorkerDied):
        await replica.wake_up()


@in_a_loop
async def test_in_hybrid_placement_every_rank_of_the_trainer_writes(tiny_model: Path) -> None:
    with LocalWorkerGroup(packed(tiny_model), name="learners", world_size=2) as group:
        replica = RolloutReplica.hybrid(group)
        assert (replica.name, replica.is_own, replica.num_workers) == ("learners", False, 2)
        await replica.wake_up()
        for rank in range(2):
            assert len(await generated(replica, rank, groups_of(1))) == 1
        await replica.end()  # the processes are the trainer's
        await replica.sleep()
