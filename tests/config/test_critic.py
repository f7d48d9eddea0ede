from __future__ import annotations

import pytest

from practicum.errors import ConfigError
from tests.config.test_algorithm import load

GAE = "algorithm.advantage=gae"


def test_a_critic_is_for_those_who_use_it() -> None:
    assert load(GAE, "critic.lr=1e-4").critic.lr == 1e-4
    with pytest.raises(ConfigError, match=r"advantage=grpo has no use for a critic.*set algorithm\.advantage=gae"):
        load("critic.lr=1e-4")


def test_the_actor_learns_in_some_step() -> None:
    assert load(GAE, "critic.warmup_steps=99").num_updates == 1
    with pytest.raises(ConfigError, match=r"warmup_steps=100 leaves the actor nothing of trainer\.steps=100"):
        load(GAE, "critic.warmup_steps=100")


def test_processes_of_its_own_need_ray() -> None:
    for placement in ("colocated", "standalone"):
        assert load(GAE, f"critic.placement={placement}").critic.placement == placement
        with pytest.raises(ConfigError, match=rf"critic\.placement={placement} needs processes of its own"):
            load(GAE, f"critic.placement={placement}", "controller.backend=local")


def test_a_recording_has_nothing_for_a_critic() -> None:
    with pytest.raises(ConfigError, match="holds no values for a critic"):
        load(GAE, "actor.router_replay.mode=R2", "actor.router_replay.replay_file=x.rec")
