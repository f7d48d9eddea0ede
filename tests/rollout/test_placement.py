from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from practicum.config import RolloutConfig
from practicum.controller import Controller, RayResourcePool
from practicum.errors import ModelError, ResourceError
from practicum.rollout.placement import engine_problems, open_replicas, room_problems, window
from tests.rollout.fake_completions import FakeServer
from tests.rollout.replicas import ModelWeights, groups_of, hf_settings, in_a_loop, written


def test_what_waits_at_a_replica_depends_on_how_its_engine_batches() -> None:
    assert window(RolloutConfig(engine="hf", max_batch=16)) == 32
    assert window(RolloutConfig(engine="native", max_batch=16)) == 18
    assert window(RolloutConfig(engine="native", max_batch=1)) == 2


@in_a_loop
async def test_more_replicas_than_places_are_refused_with_the_arithmetic(tiny_model: Path, ray_session: None) -> None:
    config = RolloutConfig(engine="hf", placement="colocated", replicas=3)
    with RayResourcePool([2], resources_per_process={"CPU": 0.1}) as pool:
        opening = open_replicas(config, Controller(pool, 60, 60), hf_settings(tiny_model), ModelWeights(tiny_model))
        with pytest.raises(
            ResourceError, match=r"replicas=3 of the rollout engine asked for, but the pool has 2 places"
        ):
            await opening.__aenter__()


@in_a_loop
async def test_standalone_replicas_need_room_beside_the_trainer(tiny_model: Path, ray_session: None) -> None:
    config = RolloutConfig(engine="hf", placement="standalone", replicas=999)
    with RayResourcePool([1], resources_per_process={"CPU": 0.1}) as pool:
        opening = open_replicas(config, Controller(pool, 60, 60), hf_settings(tiny_model), ModelWeights(tiny_model))
        with pytest.raises(ResourceError, match=r"rollout.placement=standalone needs CPUs beside .* \(replicas: 999\)"):
            await opening.__aenter__()


@in_a_loop
async def test_what_keeps_an_engine_from_starting_is_told_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    config = RolloutConfig(engine="hf", placement="standalone")
    opening = open_replicas(
        config, Controller(None, 60, 60), hf_settings(tmp_path / "nowhere"), ModelWeights(tiny_model)
    )
    with pytest.raises(ModelError, match="does not exist"):
        await opening.__aenter__()


@in_a_loop
async def test_in_this_process_there_is_one(tiny_model: Path) -> None:
    config = RolloutConfig(engine="hf", placement="colocated")
    weights = ModelWeights(tiny_model)
    async with open_replicas(config, Controller(None, 60, 60), hf_settings(tiny_model), weights, threads=1) as manager:
        await manager.update_weights(0)
        assert manager.sleeps and len(manager.replicas) == 1
        assert len(await written(manager, groups_of(3))) == 3


@pytest.mark.slow
@in_a_loop
async def test_weights_reach_replicas_that_must_be_invited(tiny_model: Path, ray_session: None) -> None:
    """As between machines: all receive at once, and one that comes back alone is sent them again."""
    config = RolloutConfig(engine="hf", placement="colocated")
    weights = ModelWeights(tiny_model, channel="collective")
    with RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool:
        opening = open_replicas(config, Controller(pool, 120, 120), hf_settings(tiny_model), weights, threads=1)
        async with opening as manager:
            weights.nudge()
            await manager.update_weights(4)
            manager._mark_failed(manager.replicas[1], "for a test")
            await manager._wait_for_restarts()
            assert [replica.problem for replica in manager.replicas] == ["", ""]
            samples = [sample for group in await written(manager, groups_of(40)) for sample in group.samples]
            assert {version for sample in samples for version in sample.versions.tolist()} == {4}


def a_config(**fields: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"placement": "standalone"} | fields)


def python_with(folder: Path, modules: list[str]) -> str:
    """A Python that finds these modules beside its own."""
    for name in modules:
        (folder / f"{name}.py").write_text("")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_vllm_is_looked_for_where_it_is_said_to_be(tmp_path: Path) -> None:
    python = python_with(tmp_path, [])
    (problem,) = engine_problems(a_config(engine="vllm", vllm={"python": python}), runs_here=True)
    assert f"rollout.vllm.python={python}" in problem and "pip install 'practicum[vllm]'" in problem
    python_with(tmp_path, ["vllm"])
    assert engine_problems(a_config(engine="vllm", vllm={"python": python}), runs_here=True) == []
    elsewhere = a_config(engine="vllm", vllm={"python": "/on/another/machine"})
    assert engine_problems(elsewhere, runs_here=False) == []
    assert engine_problems(a_config(), runs_here=True) == []


def test_servers_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sesame")
    with FakeServer() as there, FakeServer(token="sesame") as guarded:
        gone = "http://127.0.0.1:9"
        servers = a_config(engine="openai", openai={"servers": [there.url, gone, guarded.url]})
        problems = engine_problems(servers, runs_here=False)
        assert len(problems) == 2 and f"server {gone} does not answer" in problems[0]
        assert f"server {guarded.url} wants another token (401)" in problems[1]
        assert "rollout.openai.api_key_env" in problems[1]
        known = a_config(engine="openai", openai={"servers": [guarded.url + "/v1"], "api_key_env": "SERVER_KEY"})
        assert engine_problems(known, runs_here=True) == []
    unset = a_config(engine="openai", openai={"servers": [there.url], "api_key_env": "NOT_THERE"})
    assert "api_key_env=NOT_THERE" in engine_problems(unset, runs_here=True)[0]
    odd = a_config(engine="openai", openai={"servers": ["localhost:8000"]})
    assert "is no address" in engine_problems(odd, runs_here=True)[0]


def test_many_servers_are_asked_at_once() -> None:
    silent = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4, 5, 6, 7, 9)]
    assert len(engine_problems(a_config(engine="openai", openai={"servers": silent}), runs_here=True)) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": "colocated", "replicas": 3}, "rollout.replicas=3, but the trainer has room for 2 beside it"),
        ({"placement": "colocated", "replicas": 2}, ""),
        ({"replicas": 5}, "needs 5 GPUs beside the trainer's, and this machine has 4: lower rollout.replicas"),
        ({"replicas": 4}, ""),
        ({"engine": "vllm", "replicas": 3, "vllm": {"tensor_parallel": 2}}, r"needs 6 GPUs (3 replicas of 2)"),
        ({"engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel": 2}}, ""),
        ({"placement": "hybrid"}, ""),
    ],
)
def test_more_replicas_than_fit(fields: dict[str, Any], message: str) -> None:
    told = " ".join(room_problems(a_config(**fields), num_places=2, num_free=4, unit="GPU"))
    assert message in told and bool(message) == bool(told)


def test_auto_needs_a_place_too() -> None:
    (problem,) = room_problems(a_config(), num_places=2, num_free=-1, unit="CPU")
    assert "needs 1 CPU beside the trainer's, and this machine has 0" in problem
    assert room_problems(a_config(), num_places=2, num_free=None, unit="CPU") == []
