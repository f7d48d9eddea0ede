"""Whole runs that learn adapters: engines agree with the trainer, a resumed run is the uninterrupted one."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from practicum import Config, Trainer
from practicum.errors import CheckpointError, ConfigError, ModelError
from practicum.loop.explain import explanation
from practicum.loop.placement import rollout_problems
from practicum.loop.run_folder import read_metrics
from practicum.models import load_model
from tests.loop.test_trainer import timeless, weights

MakeConfig = Callable[..., Config]
LORA = ("actor.lora.rank=4", "actor.lr=1e-2")


@pytest.mark.parametrize("engine", ["hf", "native"])
@pytest.mark.parametrize("placement", ["hybrid", "standalone"])
def test_engines_write_with_the_trainers_probabilities(make_config: MakeConfig, engine: str, placement: str) -> None:
    config = make_config(
        *LORA, "trainer.steps=4", "actor.mini_batches=2", f"rollout.engine={engine}", f"rollout.placement={placement}"
    )
    for report in Trainer(config).steps():
        assert report.metrics["rollout/max_log_prob_diff"] < 2e-5
    before, after = load_model(config.model.path), weights(Path(config.trainer.run_dir), 4)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before.get_parameter(name))}
    assert changed and all("self_attn" in name for name in changed)


@pytest.mark.slow
def test_so_do_engines_in_processes_of_their_own_and_two_workers(
    make_config: MakeConfig, tmp_path: Path, ray_session: None
) -> None:
    short = (*LORA, "trainer.steps=2", "data.prompts_per_step=5", "algorithm.kl.coefficient=0.01")
    results = {}
    for name, where in {
        "local": [],
        "two": ["controller.backend=ray", "trainer.num_workers=2"],
        "colocated": ["controller.backend=ray", "rollout.placement=colocated"],
    }.items():
        run_dir = tmp_path / name
        for report in Trainer(make_config(*short, *where, f"trainer.run_dir={run_dir}")).steps():
            assert report.metrics["rollout/max_log_prob_diff"] < 2e-5
        results[name] = weights(run_dir, 2)
    for name, tensor in results["local"].items():
        assert (tensor - results["two"][name]).abs().max() < 1e-4, name
        assert (tensor - results["colocated"][name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_it_makes_no_difference_whether_adapters_are_sent_alone(
    make_config: MakeConfig, tmp_path: Path, engine: str
) -> None:
    short = (*LORA, "actor.mini_batches=2", f"rollout.engine={engine}", "rollout.placement=standalone")
    told = {}
    for way in ("merged", "adapters"):
        run_dir = tmp_path / way
        list(Trainer(make_config(*short, f"actor.lora.send={way}", f"trainer.run_dir={run_dir}")).steps())
        told[way] = timeless(read_metrics(run_dir))
    assert told["adapters"] == told["merged"]


@pytest.mark.slow
def test_nor_with_processes_of_their_own_and_two_workers(make_config: MakeConfig, ray_session: None) -> None:
    short = (*LORA, "actor.lora.send=adapters", "data.prompts_per_step=5", "controller.backend=ray")
    config = make_config(*short, "trainer.num_workers=2", "rollout.placement=colocated")
    for report in Trainer(config).steps():
        assert report.metrics["rollout/max_log_prob_diff"] < 2e-5


@pytest.mark.parametrize(
    ("placement", "way"), [("hybrid", "merged"), ("standalone", "merged"), ("standalone", "adapters")]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    make_config: MakeConfig, tmp_path: Path, placement: str, way: str
) -> None:
    overrides = [
        *LORA,
        f"actor.lora.send={way}",
        "actor.lora.alpha=6",
        "trainer.steps=4",
        "trainer.checkpoint_every=2",
        "actor.mini_batches=2",
        "actor.router_replay.mode=R3",
        "algorithm.kl.coefficient=0.01",
        f"rollout.placement={placement}",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(Trainer(make_config(*overrides, f"trainer.run_dir={whole}")).steps())
    steps = Trainer(make_config(*overrides, f"trainer.run_dir={parts}")).steps()
    for report in steps:
        if report.number == 3:
            steps.close()  # type: ignore[attr-defined]
    resumed = Trainer(make_config(*overrides, f"trainer.run_dir={parts}", "resume=auto"), notify=lambda _: None)
    assert [report.number for report in resumed.steps()] == [3, 4]
    assert timeless(read_metrics(parts)) == timeless(read_metrics(whole))
    first, second = weights(whole, 4), weights(parts, 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    saved = json.loads((parts / "checkpoints/step-000004/model/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == make_config().model.path


def test_adapters_of_a_run_can_be_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    list(Trainer(make_config(*LORA)).steps())
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "model"
    more = (f"model.path={path}", f"trainer.run_dir={tmp_path / 'more'}", "algorithm.kl.coefficient=0.01")
    for own in (LORA, ()):  # on top of them, or all weights
        config = make_config(*own, *more, "resume=auto", f"trainer.run_dir={tmp_path / f'more-{len(own)}'}")
        reports = list(Trainer(config).steps())
        assert all(report.metrics["rollout/max_log_prob_diff"] < 2e-5 for report in reports)
        assert reports[0].metrics["actor/reference_kl"] < 1e-6  # the reference is the model with the first adapters


def test_a_run_may_go_on_sending_them_the_other_way(make_config: MakeConfig, tmp_path: Path) -> None:
    list(Trainer(make_config(*LORA, "trainer.steps=1")).steps())
    more = ("actor.lora.send=adapters", "rollout.placement=standalone", "trainer.steps=2", "resume=auto")
    (report,) = Trainer(make_config(*LORA, *more), notify=lambda _: None).steps()
    assert report.number == 2 and report.metrics["rollout/max_log_prob_diff"] < 2e-5


@pytest.mark.parametrize("change", ["actor.lora.rank=8", "actor.lora.alpha=4", "actor.lora.targets=[q_proj]"])
def test_a_run_cannot_go_on_with_other_adapters(make_config: MakeConfig, change: str) -> None:
    list(Trainer(make_config(*LORA, "trainer.steps=1")).steps())
    with pytest.raises(CheckpointError, match=r"cannot go on with another actor.lora.*: its checkpoint holds what"):
        list(Trainer(make_config(*LORA, change, "resume=auto")).steps())
    again = make_config(*LORA, "actor.lora.alpha=8", "resume=auto")  # what it was by default
    assert [report.number for report in Trainer(again, notify=lambda _: None).steps()] == [2]
    with pytest.raises(CheckpointError, match=r"cannot go on with another actor.lora"):
        list(Trainer(make_config("actor.lr=1e-2", "resume=auto")).steps())


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("actor.lora.targets=q_proj", r"write a list, actor\.lora\.targets=\[q_proj\], or all-linear"),
        ("actor.lora=16", r"actor\.lora = 16: it is a section, of actor\.lora\.rank, "),
    ],
)
def test_slips_are_answered_with_how_it_is_written(make_config: MakeConfig, told: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(*(() if told == "actor.lora=16" else LORA), told)


def test_mistakes_are_found_before_anything_starts(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"send=adapters is for engines that weights are sent to.*placement=hybrid"):
        make_config(*LORA, "actor.lora.send=adapters")
    alone = ("actor.lora.send=adapters", "actor.lora.rank=600", "rollout.placement=standalone", "rollout.engine=vllm")
    problems = rollout_problems(make_config(*LORA, *alone, f"rollout.vllm.python={sys.executable}"))
    assert any("rank 512 at most, and actor.lora.rank=600" in problem for problem in problems)
    assert any("on CPUs vLLM cannot compute a mixture of experts with adapters" in problem for problem in problems)
    with pytest.raises(ModelError, match=r"has no layer 'query'. Linear are q_proj"):
        Trainer(make_config(*LORA, "actor.lora.targets=[query]"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config(*LORA)
    with pytest.raises(ModelError, match=r"actor.lora needs the package 'peft'.*pip install 'practicum\[peft\]'"):
        Trainer(config)
    assert not Path(config.trainer.run_dir).exists()


def test_explain_tells_what_is_learnt_and_what_that_takes(make_config: MakeConfig) -> None:
    text = explanation(make_config(*LORA, "algorithm.kl.coefficient=0.1"))
    assert "LoRA of rank 4, scaled by 2, on 8 linear layers: q_proj, k_proj, v_proj, o_proj" in text
    num_learnt = 2 * 4 * (256 + 192 + 192 + 256)  # layers, rank, inputs + outputs
    assert f"{num_learnt:,} parameters are learnt (" in text
    assert "weights, frozen, the reference too (" in text
    assert f"adapters, gradients, AdamW ({num_learnt:,} parameters / 1)" in text
    assert "master weights" not in text and "GiB  reference" not in text
    assert "(shared with the actor)" not in text
    assert "# adapters" not in explanation(make_config())
    assert "engines get whole weights, with adapters merged" in text
    alone = explanation(make_config(*LORA, "actor.lora.send=adapters", "rollout.placement=standalone"))
    assert f"engines get the adapters alone: {4 * num_learnt / 1e6:.3g} MB a version" in alone
