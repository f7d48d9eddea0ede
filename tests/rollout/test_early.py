from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from practicum.config import RolloutConfig
from practicum.rollout.early import engine_problems, room_problems
from tests.rollout.fake_completions import FakeServer


def config(**fields: Any) -> RolloutConfig:
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
    (problem,) = engine_problems(config(engine="vllm", vllm={"python": python}), runs_here=True)
    assert f"rollout.vllm.python={python}" in problem and "pip install 'practicum[vllm]'" in problem
    python_with(tmp_path, ["vllm"])
    assert engine_problems(config(engine="vllm", vllm={"python": python}), runs_here=True) == []
    elsewhere = config(engine="vllm", vllm={"python": "/on/another/machine"})
    assert engine_problems(elsewhere, runs_here=False) == []
    assert engine_problems(config(), runs_here=True) == []


def test_servers_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sesame")
    with FakeServer() as there, FakeServer(token="sesame") as guarded:
        gone = "http://127.0.0.1:9"
        servers = config(engine="openai", openai={"servers": [there.url, gone, guarded.url]})
        problems = engine_problems(servers, runs_here=False)
        assert len(problems) == 2 and f"server {gone} does not answer" in problems[0]
        assert f"server {guarded.url} wants another token (401)" in problems[1]
        assert "rollout.openai.api_key_env" in problems[1]
        known = config(engine="openai", openai={"servers": [guarded.url + "/v1"], "api_key_env": "SERVER_KEY"})
        assert engine_problems(known, runs_here=True) == []
    unset = config(engine="openai", openai={"servers": [there.url], "api_key_env": "NOT_THERE"})
    assert "api_key_env=NOT_THERE" in engine_problems(unset, runs_here=True)[0]
    odd = config(engine="openai", openai={"servers": ["localhost:8000"]})
    assert "is no address" in engine_problems(odd, runs_here=True)[0]


def test_many_servers_are_asked_at_once() -> None:
    silent = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4, 5, 6, 7, 9)]
    began = time.monotonic()
    assert len(engine_problems(config(engine="openai", openai={"servers": silent}), runs_here=True)) == 8
    assert time.monotonic() - began < 10


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
    told = " ".join(room_problems(config(**fields), num_places=2, num_free=4, unit="GPU"))
    assert message in told and bool(message) == bool(told)


def test_auto_needs_a_place_too() -> None:
    (problem,) = room_problems(config(), num_places=2, num_free=-1, unit="CPU")
    assert "needs 1 CPU beside the trainer's, and this machine has 0" in problem
    assert room_problems(config(), num_places=2, num_free=None, unit="CPU") == []
