"""The recipes on sums: their configs are valid and run as they are, shortened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from practicum import Config, Trainer
from practicum.models import load_model, load_tokenizer
from recipes.arithmetic import prepare

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("arithmetic")
    prepare(made, seed=0, until_accuracy=0.0)  # it stops as soon as it may
    return made


def test_what_is_prepared_is_a_model_and_problems_to_practise_and_to_hold_out(folder: Path) -> None:
    assert load_model(str(folder / "model")).config.vocab_size >= len(load_tokenizer(str(folder / "model")))
    train, held_out = (
        {json.loads(line)["answer"] + str(json.loads(line)) for line in (folder / name).read_text().splitlines()}
        for name in ("train.jsonl", "held-out.jsonl")
    )
    assert len(held_out) == 400 and len(train) == 9600 and not train & held_out


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("ppo-arithmetic", "critic/loss"),
        ("dapo-arithmetic", "rollout/resampled_prompts"),
        ("lora", "actor/reference_kl"),
        ("async", "time/ahead/rollout_s"),
        ("moe-r3", "replay/kl_without"),
    ],
)
def test_a_recipe_runs_as_it_is(name: str, metric: str, folder: Path, tmp_path: Path) -> None:
    where = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.validation={folder / 'held-out.jsonl'}",
        f"trainer.run_dir={tmp_path}",
    ]
    short = ["trainer.steps=2", "data.prompts_per_step=8", "validation.max_prompts=4", "controller.backend=local"]
    warm = ["critic.warmup_steps=1"] if name.startswith("ppo") else []
    config = Config.load(RECIPES / name / "train.yaml", [*where, *short, *warm])
    reports = list(Trainer(config).steps())
    assert len(reports) == 2 and all(metric in report.metrics for report in reports)
