from __future__ import annotations

from pathlib import Path

import pytest

from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
from practicum.errors import WorkerDied
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import Batch, RolloutWorker
from tests.rollout.writers import hf_settings, requests_of

TIMES = {"start_timeout_s": 60.0, "timeout_s": 60.0}


def packed(model: Path) -> RayClassWithInitArgs[RolloutWorker]:
    return RayClassWithInitArgs(RolloutWorker, hf_settings(model))


def test_a_replica_of_its_own_can_be_started_again(tiny_model: Path) -> None:
    replica = RolloutReplica.placed(3, None, packed(tiny_model), **TIMES)
    assert (replica.name, replica.is_own, replica.num_lanes) == ("rollout-3", True, 1)
    for restarts in range(2):
        replica.wake_up()
        written = replica.begin(0, Batch(0, [0, 1], requests_of(2)), 30.0).result()
        assert len(written.samples) + len(replica.collect(0, 30.0).result().samples) == 2
        replica.sleep()
        replica.restart()
        assert replica.num_restarts == restarts + 1
    replica.end()
    with pytest.raises(WorkerDied):
        replica.wake_up()


def test_in_hybrid_placement_every_rank_of_the_trainer_writes(tiny_model: Path) -> None:
    with LocalWorkerGroup(packed(tiny_model), name="learners", world_size=2) as group:
        replica = RolloutReplica.hybrid(group, timeout_s=60.0)
        assert (replica.name, replica.is_own, replica.num_lanes) == ("learners", False, 2)
        replica.wake_up()
        for lane in range(2):
            assert len(replica.begin(lane, Batch(0, [lane], requests_of(1)), 30.0).result().samples) == 1
        replica.end()  # the processes are the trainer's
        replica.sleep()
