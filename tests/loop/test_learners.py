"""Algorithms as whole runs: what each adds to a step, in this process on a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from practicum import Config, Trainer
from practicum.errors import ConfigError, ModelError
from practicum.loop.run_folder import read_metrics
from tests.loop.test_trainer import timeless, weights

MakeConfig = Callable[..., Config]
GAE = ("algorithm.advantage=gae", "critic.lr=1e-3")
KL = ("algorithm.kl.coefficient=0.1",)


def rows(config: Config) -> list[dict[str, float]]:
    list(Trainer(config).steps())
    return [row for row in read_metrics(Path(config.trainer.run_dir)) if row["step"] > 0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.advantage=dr_grpo", "algorithm.aggregation=constant", "algorithm.constant_tokens=6"),
        ("algorithm.advantage=rloo", "algorithm.loss=cispo", "algorithm.aggregation=sequence_sum"),
        ("algorithm.advantage=pass_at_k", "algorithm.k=2", "algorithm.loss=gmpo"),
        ("algorithm.advantage=remax", "rollout.answers_per_prompt=1", "data.prompts_per_step=8"),
        ("algorithm.advantage=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.loss=sapo"),
        ("algorithm.advantage=reinforce_plus_plus_baseline", "algorithm.loss=gspo_token", "algorithm.whiten=true"),
        ("algorithm.loss=gspo", "algorithm.aggregation=sequence_mean", "algorithm.entropy_bonus=0.01"),
        ("algorithm.dual_clip=3", "algorithm.correction.kind=masked", "algorithm.correction.level=geometric"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_choice_runs_and_learns_something(make_config: MakeConfig, overrides: tuple[str, ...]) -> None:
    for row in rows(make_config("actor.epochs=2", "data.validation=null", *overrides)):
        assert all(np.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0
        assert row["rollout/kl"] < 1e-5


def test_epochs_go_on_from_the_same_old_policy(make_config: MakeConfig) -> None:
    (first, _) = rows(make_config("actor.epochs=3", "actor.mini_batches=2", "actor.lr=2e-2", "data.validation=null"))
    assert first["actor/clipped_share"] > 0 and first["rollout/kl"] < 1e-5


def test_the_figures_of_a_correction_are_those_of_no_gap_on_policy(make_config: MakeConfig) -> None:
    for row in rows(make_config("algorithm.correction.kind=truncated", "data.validation=null")):
        assert row["correction/cut_share"] == 0
        assert row["correction/effective_share"] == pytest.approx(1, abs=1e-5)
        assert row["correction/max_weight"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_a_reference_holds_the_policy_back(make_config: MakeConfig, tmp_path: Path, place: str) -> None:
    strayed = {}
    for coefficient in (1e-9, 5.0):
        run_dir = tmp_path / str(coefficient)
        told = [f"algorithm.kl.place={place}", f"algorithm.kl.coefficient={coefficient}", "trainer.steps=12"]
        estimator = "k1" if place == "reward" else "k2"
        config = make_config(
            *told, f"algorithm.kl.estimator={estimator}", "data.validation=null", f"trainer.run_dir={run_dir}",
            "data.prompts_per_step=8",
        )  # fmt: skip
        found = rows(config)
        assert found[0]["actor/reference_kl"] == pytest.approx(0, abs=1e-6)
        strayed[coefficient] = found[-1]["actor/reference_kl"]
    assert strayed[5.0] < 0.5 * strayed[1e-9]


def test_an_adapted_coefficient_and_its_reference_outlive_a_restart(make_config: MakeConfig, tmp_path: Path) -> None:
    told = [*KL, "algorithm.kl.target=0.001", "trainer.steps=4", "trainer.checkpoint_every=2", "data.validation=null"]
    found = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'whole'}"))
    assert [row["actor/kl_coefficient"] for row in found[:2]] == [0.1, pytest.approx(0.098)]
    steps = Trainer(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}")).steps()
    for report in steps:
        if report.number == 3:
            steps.close()  # type: ignore[attr-defined]
    again = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}", "resume=auto"))
    assert timeless(again) == timeless(found)


def test_another_coefficient_counts_from_the_restart_on(make_config: MakeConfig) -> None:
    told = [*KL, "algorithm.kl.target=0.001", "data.validation=null"]
    rows(make_config(*told))
    other = [*told, "algorithm.kl.coefficient=0.7", "resume=auto"]
    for number in (3, 4):  # and goes on being adapted from there
        (*_, row) = rows(make_config(*other, f"trainer.steps={number}"))
        assert row["actor/kl_coefficient"] == pytest.approx({3: 0.7, 4: 0.7 * 1.02}[number])


def test_a_reference_that_reads_tokens_as_other_text_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(make_config().model.path, other)
    for told in ((*KL, f"algorithm.kl.reference={other}"), (*GAE, f"critic.path={other}")):
        Trainer(make_config(*told))
    words = json.loads((other / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["0"], ids["1"] = ids["1"], ids["0"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    for told in ((*KL, f"algorithm.kl.reference={other}"), (*GAE, f"critic.path={other}")):
        with pytest.raises(ConfigError, match=r"other reads 2 tokens as other text than model .*: token \d+ is '[01]'"):
            Trainer(make_config(*told))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    Trainer(make_config(*KL, f"algorithm.kl.reference={other}"))  # nothing is known of what it reads


def test_a_reference_of_vocabulary_conflicts_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = AutoConfig.from_pretrained(make_config().model.path)
    config.vocab_size = 50
    config.save_pretrained(other)
    for told in ((*KL, f"algorithm.kl.reference={other}"), (*GAE, f"critic.path={other}")):
        with pytest.raises(
            ConfigError, match=r"(kl\.reference|critic\.path)=.* has a vocabulary of 50 tokens, but model .* has \d+"
        ):
            Trainer(make_config(*told))


def test_a_reference_or_a_critic_that_is_not_there_is_named_by_its_key(make_config: MakeConfig, tmp_path: Path) -> None:
    for told, key in ((KL, "algorithm.kl.reference"), (GAE, "critic.path")):
        with pytest.raises(ModelError, match=rf"{key}=.*/nothing: model folder .* does not exist"):
            Trainer(make_config(*told, f"{key}={tmp_path / 'nothing'}"))


def test_ppo_with_a_critic_learns_and_the_critic_explains_more_and_more(make_config: MakeConfig) -> None:
    sizes = ("data.prompts_per_step=8", "rollout.answers_per_prompt=8", "actor.mini_batches=4", "actor.epochs=2")
    critic = ("algorithm.advantage=gae", "critic.lr=3e-3", "critic.value_clip=1.0", "critic.warmup_steps=9")
    found = rows(make_config(*sizes, *critic, "actor.lr=3e-4", "trainer.steps=16", "data.validation=null"))
    rewards, explained = ([row[name] for row in found] for name in ("reward/mean", "critic/explained_variance"))
    assert np.mean(explained[6:9]) > np.mean(explained[:3]) + 0.15  # while the actor stays as it is
    assert np.mean(rewards[-3:]) > 1.3 * np.mean(rewards[:9])


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(make_config: MakeConfig) -> None:
    config = make_config(*GAE, "critic.warmup_steps=2", "trainer.steps=3", "trainer.checkpoint_every=1",
                         "trainer.keep_checkpoints=3", "data.validation=null")  # fmt: skip
    found = rows(config)
    assert [row["actor/grad_norm"] > 0 for row in found] == [False, False, True]
    assert all(row["critic/grad_norm"] > 0 and row["rollout/kl"] < 1e-5 for row in found)
    first, second, third = (weights(Path(config.trainer.run_dir), step) for step in (1, 2, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_a_resumed_run_with_all_roles_is_the_uninterrupted_one(
    make_config: MakeConfig, tmp_path: Path, mode: str
) -> None:
    told = [*GAE, *KL, "actor.epochs=2", "actor.mini_batches=2", f"actor.router_replay.mode={mode}",
            "trainer.steps=4", "trainer.checkpoint_every=2", "critic.warmup_steps=1"]  # fmt: skip
    found = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'whole'}"))
    assert ("replay/disagreement" in found[0]) == (mode != "disabled")
    steps = Trainer(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}")).steps()
    for report in steps:
        if report.number == 3:
            steps.close()  # type: ignore[attr-defined]
    again = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}", "resume=auto"))
    assert timeless(again) == timeless(found)
    first, second = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writers", "critic", "reference", "num_workers"),  # the session's cores are two in all
    [
        ("hybrid", "hybrid", "hybrid", 2),
        ("colocated", "hybrid", "colocated", 2),
        ("hybrid", "colocated", "hybrid", 2),
        ("hybrid", "standalone", "hybrid", 1),
        ("hybrid", "hybrid", "standalone", 1),
    ],
)
def test_all_roles_give_the_same_result_wherever_they_are(
    make_config: MakeConfig,
    tmp_path: Path,
    ray_session: None,
    writers: str,
    critic: str,
    reference: str,
    num_workers: int,
) -> None:
    told = [*GAE, *KL, "actor.mini_batches=2", "data.prompts_per_step=6", "data.validation=null"]
    local = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'local'}"))
    there = ["controller.backend=ray", f"trainer.num_workers={num_workers}", f"rollout.placement={writers}"]
    there += [f"critic.placement={critic}", f"algorithm.kl.placement={reference}"]
    apart = rows(make_config(*told, *there, f"trainer.run_dir={tmp_path / 'apart'}"))
    for row, other in zip(timeless(apart), timeless(local), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_prompts_that_teach_nothing_give_way_and_the_run_can_be_resumed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    reward = f"reward.function={Path(__file__).parents[1] / 'rewards.py'}:odd_prompts_are_all_right"
    sizes = ("trainer.steps=4", "trainer.checkpoint_every=2", "data.validation=null")
    told = [reward, "algorithm.resampling_rounds=3", *sizes]
    found = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'whole'}"))
    assert sum(row["rollout/resampled_prompts"] for row in found) > 0
    without = rows(make_config(*told, "algorithm.resampling_rounds=0", f"trainer.run_dir={tmp_path / 'without'}"))
    signal, plain = (np.mean([row["reward/groups_with_signal"] for row in some]) for some in (found, without))
    assert signal > plain
    assert "rollout/resampled_prompts" not in without[0]
    steps = Trainer(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}")).steps()
    for report in steps:
        if report.number == 3:
            steps.close()  # type: ignore[attr-defined]
    again = rows(make_config(*told, f"trainer.run_dir={tmp_path / 'parts'}", "resume=auto"))
    assert timeless(again) == timeless(found)
