from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from practicum.config import AgentConfig
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
from practicum.errors import WorkerDied
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import Batch, RolloutWorker
from tests.rollout.writers import hf_settings, requests_of

TIMES = {"start_timeout_s": 60.0, "timeout_s": 60.0}


def packed(model: Path, **more: Any) -> RayClassWithInitArgs[RolloutWorker]:
    return RayClassWithInitArgs(RolloutWorker, hf_settings(model), **more)


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


def test_counts_are_those_of_each_worker(tiny_model: Path) -> None:
    agent = AgentConfig(environment=f"{Path(__file__).parent / 'talks.py'}:Once", max_turns=2)
    with LocalWorkerGroup(packed(tiny_model, agent=agent), name="learners", world_size=2) as group:
        replica = RolloutReplica.hybrid(group, timeout_s=60.0)
        replica.wake_up()
        for lane in range(2):
            left = 1 + lane
            written = replica.begin(lane, Batch(0, range(left), requests_of(left, 20)), 30.0).result()
            while left := left - len(written.samples):
                written = replica.collect(lane, 30.0).result()
        assert [counts["conversations"] for counts in replica.take_counts()] == [1, 2]
        assert replica.take_counts() == [{}, {}]
