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
