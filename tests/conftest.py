"""Small things that many tests use: a tiny model on disk, a prompt file, a config around them, a Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.config import Config

# Before torch is imported: threads that wait for each other by spinning stand still where tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


SLOW_FILES = {
    "algo/test_losses.py",
    "bench/test_replay.py",
    "controller/test_async.py",
    "controller/test_chaos.py",
    "controller/test_cluster.py",
    "controller/test_group.py",
    "controller/test_pool.py",
    "controller/test_ray_group.py",
    "controller/test_register.py",
    "controller/test_three_nodes.py",
    "controller/test_typing.py",
    "controller/test_watchdog.py",
    "loop/test_failing_agents.py",
    "loop/test_learners.py",
    "loop/test_lora_runs.py",
    "loop/test_pipeline.py",
    "loop/test_placement.py",
    "loop/test_trainer.py",
    "processes/test_pool.py",
    "replay/test_hooks.py",
    "replay/test_store.py",
    "reward/graders/test_code.py",
    "reward/graders/test_function.py",
    "reward/graders/test_hostile_answers.py",
    "reward/graders/test_misbehaving_functions.py",
    "reward/graders/test_nasty_answers.py",
    "reward/router/test_backpressure.py",
    "reward/router/test_dispatcher.py",
    "reward/router/test_http1.py",
    "reward/router/test_launch.py",
    "reward/router/test_policy.py",
    "reward/router/test_refusals.py",
    "reward/sandbox/test_attacks.py",
    "reward/sandbox/test_box.py",
    "reward/sandbox/test_judge.py",
    "reward/test_centre.py",
    "reward/test_executors.py",
    "reward/test_manager.py",
    "reward/test_model_manager.py",
    "reward/test_worker.py",
    "rollout/agent/test_conversation.py",
    "rollout/agent/test_tools.py",
    "rollout/engine/test_kernels.py",
    "rollout/remote/test_servers.py",
    "rollout/test_manager_processes.py",
    "rollout/test_native.py",
    "rollout/test_openai.py",
    "rollout/test_placement.py",
    "rollout/vllm/test_engine.py",
    "test_cli.py",
    "test_docs.py",
    "train/test_actor.py",
    "train/test_actor_lora.py",
    "train/test_critic.py",
    "train/test_fsdp.py",
    "train/test_learner.py",
    "train/test_reference.py",
}
"""Files that start Ray, servers or whole runs, and take more than ten seconds: `make test-fast` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(tests) and str(item.path.relative_to(tests)) in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's mixture of experts with random weights, and its tokenizer."""
    from practicum.demo.arithmetic import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_model(seed=0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import save_classifier

    return save_classifier(tmp_path_factory.mktemp("classifier") / "model")


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from practicum.demo.arithmetic import all_problems, write_problems

    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    write_problems(path, all_problems(seed=0, num_held_out=0)[0][:64])
    return path


@pytest.fixture
def make_config(tiny_model: Path, sums_file: Path, tmp_path: Path) -> Callable[..., Config]:
    """`make_config("actor.lr=1e-3", ...)`: a small run in this process, with overrides."""

    def make(*overrides: str) -> Config:
        return Config.from_tree(config_tree(tiny_model, sums_file, tmp_path / "run"), overrides)

    return make


def config_tree(model: Path, data: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"train": str(data), "validation": str(data), "prompts_per_step": 4, "max_prompt_tokens": 16},
        "rollout": {"answers_per_prompt": 4, "max_new_tokens": 6},
        "validation": {"max_prompts": 8},
        # Random weights hardly ever add: an answer with even digits is as good a goal.
        "reward": {"function": f"{Path(__file__).parent / 'rewards.py'}:share_of_even_digits"},
        "actor": {"lr": 1e-3, "micro_batch_tokens": 64},
        "trainer": {"steps": 2, "device": "cpu", "threads_per_worker": 1, "run_dir": str(run_dir)},
        "controller": {"backend": "local"},
    }


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    from practicum.controller import ray_cluster

    with ray_cluster():
        yield


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
