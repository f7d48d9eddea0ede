from __future__ import annotations

from typing import Any

import pytest
import yaml

from practicum import Config
from practicum.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "reward": {"grader": "exact"},
    "actor": {"micro_batch_tokens": 9999},
}


def load(*overrides: str) -> Config:
    return Config.from_tree(TREE, overrides)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "disabled"),
        (["actor.router_replay.mode=R2"], "R2"),
        (["actor.router_replay.mode=R3"], "R3"),
        (["rollout.enable_rollout_routing_replay=True"], "R3"),
        (["rollout.enable_rollout_routing_replay=true", "actor.router_replay.mode=R3"], "R3"),
        (["rollout.enable_rollout_routing_replay=false", "actor.router_replay.mode=R2"], "R2"),
        (["rollout.enable_rollout_routing_replay=True", "actor.router_replay.mode=R2"], "R2"),
    ],
)
def test_the_mode_decides_what_is_replayed_and_the_flag_what_the_engine_records(
    overrides: list[str], mode: str
) -> None:
    config = load(*overrides)
    assert config.actor.router_replay.mode == mode
    assert config.captures_routes == (mode == "R3" or "rollout.enable_rollout_routing_replay=True" in overrides)
    assert Config.from_tree(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.router_replay.mode=R4"], "should be 'disabled', 'R2' or 'R3'"),
        (["rollout.enable_rollout_routing_replay=true", "actor.router_replay.mode=disabled"], "nothing reads them"),
        (
            [
                "rollout.enable_rollout_routing_replay=true",
                "actor.router_replay.mode=R2",
                "actor.router_replay.replay_file=x",
            ],
            "nothing is generated",
        ),
        (
            ["rollout.enable_rollout_routing_replay=true", "actor.router_replay.mode=R2", "rollout.engine=hf"],
            "routing_replay=true needs an engine .* rollout.engine=hf does not",
        ),
        (["rollout.enable_rollout_routing_replay=false", "actor.router_replay.mode=R3"], "contradicts"),
        (["actor.router_replay.mode=R3", "rollout.engine=hf"], "rollout.engine=hf does not: set it to native or vllm"),
        (
            [
                "actor.router_replay.mode=R3",
                "rollout.engine=openai",
                "rollout.placement=standalone",
                "rollout.openai.servers=[http://a]",
            ],
            "rollout.engine=openai does not",
        ),
        (["actor.lora.rank=0"], "actor.lora.rank = 0: should be greater than or equal to 1"),
        (["actor.lora.alpha=4"], "actor.lora.rank is missing"),
        (["actor.lora.rank=4", "actor.lora.targets=[]"], "actor.lora.targets is empty"),
        (["actor.lora.rank=4", "actor.lora.dropout=0.1"], "unknown key 'actor.lora.dropout'"),
        (["actor.router_replay.record_file=x"], "need a mode"),
        (["actor.router_replay.replay_file=x"], "need a mode"),
        (["actor.router_replay.mode=R3", "actor.router_replay.replay_file=x"], "replay_file needs mode R2"),
        (
            [
                "actor.router_replay.mode=R2",
                "actor.router_replay.replay_file=x",
                "actor.router_replay.record_file=y",
            ],
            "leave out record_file",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_with_r2_the_recording_is_in_the_run_folder_unless_told_otherwise() -> None:
    assert load("actor.router_replay.mode=R2", "trainer.run_dir=runs/x").record_file == "runs/x/routes.rec"
    named = ["actor.router_replay.record_file=elsewhere.rec"]
    assert load("actor.router_replay.mode=R2", *named).record_file == "elsewhere.rec"
    assert load("actor.router_replay.mode=R3", *named).record_file == "elsewhere.rec"
    assert load("actor.router_replay.mode=R3").record_file is None
    repeated = load("actor.router_replay.mode=R2", "actor.router_replay.replay_file=old.rec")
    assert repeated.record_file is None


def test_adapters_are_scaled_by_two_unless_told_otherwise() -> None:
    assert load().actor.lora is None
    by_default, told = load("actor.lora.rank=8").actor.lora, load("actor.lora.rank=8", "actor.lora.alpha=4").actor.lora
    assert by_default is not None and (by_default.scale_by, by_default.targets) == (16, "all-linear")
    assert told is not None and told.scale_by == 4
