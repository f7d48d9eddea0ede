from __future__ import annotations

from pathlib import Path

import pytest

from practicum.config import RolloutConfig
from practicum.controller import Controller, RayResourcePool
from practicum.errors import ModelError, ResourceError
from practicum.rollout.placement import ReplicaSettings, open_replicas, window
from tests.rollout.writers import ModelWeights, hf_settings, requests_of

QUICK = ReplicaSettings(threads=1, start_timeout_s=120.0, call_timeout_s=120.0)


def test_what_waits_at_a_replica_depends_on_how_its_engine_batches() -> None:
    assert window(RolloutConfig(engine="hf", max_batch=16)) == 32
    assert window(RolloutConfig(engine="native", max_batch=16)) == 18
    assert window(RolloutConfig(engine="native", max_batch=1)) == 2


def test_more_replicas_than_places_are_refused_with_the_arithmetic(tiny_model: Path, ray_session: None) -> None:
    config = RolloutConfig(engine="hf", placement="colocated", replicas=3)
    with RayResourcePool([2], resources_per_process={"CPU": 0.1}) as pool:
        opening = open_replicas(config, Controller(pool, 60, 60), hf_settings(tiny_model), ModelWeights(tiny_model))
        with pytest.raises(
            ResourceError, match=r"replicas=3 of the rollout engine asked for, but the pool has 2 places"
        ):
            opening.__enter__()


def test_standalone_replicas_need_room_beside_the_trainer(tiny_model: Path, ray_session: None) -> None:
    config = RolloutConfig(engine="hf", placement="standalone", replicas=999)
    with RayResourcePool([1], resources_per_process={"CPU": 0.1}) as pool:
        opening = open_replicas(config, Controller(pool, 60, 60), hf_settings(tiny_model), ModelWeights(tiny_model))
        with pytest.raises(ResourceError, match=r"rollout.placement=standalone needs CPUs beside .* \(replicas: 999\)"):
            opening.__enter__()


def test_what_keeps_an_engine_from_starting_is_told_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    config = RolloutConfig(engine="hf", placement="standalone")
    opening = open_replicas(
        config, Controller(None, 60, 60), hf_settings(tmp_path / "nowhere"), ModelWeights(tiny_model)
    )
    with pytest.raises(ModelError, match="does not exist"):
        opening.__enter__()


def test_in_this_process_there_is_one(tiny_model: Path) -> None:
    config = RolloutConfig(engine="hf", placement="colocated")
    weights = ModelWeights(tiny_model)
    with open_replicas(config, Controller(None, 60, 60), hf_settings(tiny_model), weights, QUICK) as manager:
        manager.update_weights(0)
        assert manager.sleeps and len(manager.replicas) == 1
        assert sum(len(answers) for answers in manager.write(requests_of(3))) == 3


@pytest.mark.slow
def test_weights_reach_replicas_that_must_be_invited(tiny_model: Path, ray_session: None) -> None:
    """As between machines: all receive at once, and one that comes back alone is sent them again."""
    config = RolloutConfig(engine="hf", placement="colocated")
    weights = ModelWeights(tiny_model, channel="collective")
    with RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool:
        opening = open_replicas(config, Controller(pool, 120, 120), hf_settings(tiny_model), weights, QUICK)
        with opening as manager:
            weights.nudge()
            manager.update_weights(4)
            manager.lose(manager.replicas[1], "for a test")
            manager._wait_for_returning()
            assert [replica.problem for replica in manager.replicas] == ["", ""]
            told = [answer.sample for answers in manager.write(requests_of(40)) for answer in answers]
            assert {version for sample in told for version in sample.versions.tolist()} == {4}
