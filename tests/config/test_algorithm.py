from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

from practicum import Config
from practicum.algo import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LEVELS, LOSSES
from practicum.config import CorrectionConfig, KLConfig
from practicum.config.algorithm import GROUP_ESTIMATORS, OPTIONS
from practicum.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "reward": {"grader": "exact"},
}


def load(*overrides: str) -> Config:
    return Config.from_tree(TREE, overrides)


def test_choices_are_those_of_their_tables() -> None:
    assert get_args(KLConfig.model_fields["estimator"].annotation) == tuple(KL_ESTIMATORS)
    assert get_args(CorrectionConfig.model_fields["kind"].annotation) == ("none", *CORRECTIONS)
    assert get_args(CorrectionConfig.model_fields["level"].annotation) == tuple(LEVELS)
    assert {name for name, entry in ADVANTAGES.items() if "groups" in entry.needs} == set(GROUP_ESTIMATORS)


@pytest.mark.parametrize("choice", ["advantage", "loss"])
def test_every_option_of_a_function_is_a_key_and_reaches_it(choice: Any) -> None:
    functions = LOSSES if choice == "loss" else {name: entry.function for name, entry in ADVANTAGES.items()}
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"eps"}
        assert options == set(OPTIONS[choice].get(name, ())), name
        assert load(f"algorithm.{choice}={name}").algorithm.options(choice) == {}
        for option in options:
            value = False if option == "with_std" else 2 if option in ("k", "dual_clip") else 0.25
            told = load(f"algorithm.{choice}={name}", f"algorithm.{option}={value}").algorithm
            assert told.options(choice) == {option: value}


def test_gae_alone_whitens_unless_told_otherwise() -> None:
    assert load("algorithm.advantage=gae").algorithm.whitens
    assert not load("algorithm.advantage=gae", "algorithm.whiten=false").algorithm.whitens
    assert not load().algorithm.whitens
    assert load("algorithm.whiten=true").algorithm.whitens


def test_bounds_that_are_set_are_handed_on() -> None:
    told = load("algorithm.correction.kind=masked", "algorithm.correction.high=3").algorithm.correction
    assert told.bounds == {"high": 3.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=grpo"], r"unknown key 'algorithm\.name'\. Did you mean"),
        (["actor.clip_low=0.1"], r"unknown key 'actor\.clip_low'\. Did you mean 'algorithm\.clip_low'"),
        (["algorithm.advantage=magic"], r"algorithm\.advantage = 'magic': should be 'grpo'"),
        (["algorithm.k=3"], r"algorithm\.k is for algorithm\.advantage=pass_at_k, and with grpo nothing reads it"),
        (["algorithm.lam=0.9"], r"algorithm\.lam is for algorithm\.advantage=gae"),
        (["algorithm.loss=gspo", "algorithm.dual_clip=3"], r"algorithm\.dual_clip is for algorithm\.loss=ppo"),
        (["algorithm.loss=sapo", "algorithm.clip_low=0.1"], "with sapo nothing reads it"),
        (["algorithm.constant_tokens=9"], r"for algorithm\.aggregation=constant, and with token_mean"),
        (["algorithm.advantage=gae", "algorithm.resampling_rounds=2"], "teach algorithm.advantage=gae as much"),
        (["algorithm.clip_low=1"], "leaves ppo no bound from below"),
        (["algorithm.kl.target=0.1"], "do nothing while coefficient is 0"),
        (["algorithm.kl.reference=base"], "do nothing while coefficient is 0"),
        (["algorithm.kl.placement=colocated"], "do nothing while coefficient is 0"),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.placement=standalone", "controller.backend=local"],
            r"algorithm\.kl\.placement=standalone needs processes of its own",
        ),
        (["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1"], "its gradient is noise around 0"),
        (
            ["algorithm.advantage=pass_at_k", "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward"],
            "a divergence in the reward would not be seen",
        ),
        (["algorithm.correction.low=0.1"], "do nothing while kind is none"),
        (["algorithm.correction.level=sequence"], "do nothing while kind is none"),
        (["algorithm.correction.kind=masked", "algorithm.correction.low=6"], "low=6 must be below high=5"),
        (["algorithm.correction.kind=truncated", "algorithm.correction.low=2"], "low=2 must be below high=2"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_one_answer_is_no_group(estimator: str) -> None:
    fewest = 5 if estimator == "pass_at_k" else 2
    chosen = f"algorithm.advantage={estimator}"
    with pytest.raises(ConfigError, match=rf"answers_per_prompt={fewest - 1} must be at least {fewest}"):
        load(chosen, f"rollout.answers_per_prompt={fewest - 1}")
    load(chosen, f"rollout.answers_per_prompt={fewest}")


@pytest.mark.parametrize("estimator", ["remax", "gae", "reinforce_plus_plus"])
def test_others_are_content_with_one(estimator: str) -> None:
    assert load(f"algorithm.advantage={estimator}", "rollout.answers_per_prompt=1").samples_per_step == 32
