from __future__ import annotations

from pathlib import Path

from practicum.reward.serving.placed import PlacedReplica
from practicum.reward.serving.replica import RewardModelReplica

from practicum.config import RewardModelConfig
from practicum.controller import RayClassWithInitArgs
from tests.rollout.server.models import ask


def test_the_life_of_a_replica(classifier_folder: Path) -> None:
    config = RewardModelConfig(path=str(classifier_folder))
    packed = RayClassWithInitArgs(RewardModelReplica, config, device="cpu", on_node=None, public=False, asleep=True)
    replica = PlacedReplica(3, None, packed, timeout_s=60.0)
    try:
        first = replica.url
        assert first is not None
        assert replica.is_well()  # asleep as it is
        replica.wake_up()
        assert ask(first, "/health", method="GET")[1] == {"status": "awake"}
        replica.sleep()
        assert ask(first, "/health", method="GET")[1] == {"status": "asleep"}
        replica.end()
        assert (replica.url, replica.is_well(), replica.memory()) == (None, False, None)
        replica.restart()
        assert replica.is_well()
        memory = replica.memory()
        assert memory is not None and memory.weights > 0
    finally:
        replica.end()
        replica.end()
