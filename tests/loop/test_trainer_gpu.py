"""The loop on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from practicum import Config, Trainer
from practicum.loop.run_folder import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(("dtype", "largest_kl"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_it_trains_on_the_gpu(
    make_config: MakeConfig, ray_session: None, backend: str, dtype: str, largest_kl: float
) -> None:
    config = make_config(
        "trainer.device=cuda", f"model.dtype={dtype}", f"controller.backend={backend}", "actor.mini_batches=2"
    )
    reports = list(Trainer(config).steps())
    assert all(report.kl < largest_kl for report in reports)
    assert all(report.metrics["actor/grad_norm"] > 0 for report in reports)


def test_the_first_step_is_that_of_the_cpu(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = {}
    for device in ("cpu", "cuda"):
        run_dir = tmp_path / device
        list(Trainer(make_config(f"trainer.device={device}", f"trainer.run_dir={run_dir}", "trainer.steps=1")).steps())
        rows[device] = {k: v for k, v in read_metrics(run_dir)[1].items() if not k.startswith(("time/", "rollout/"))}
    assert rows["cuda"] == pytest.approx(rows["cpu"], rel=1e-3, abs=1e-5)


def test_a_resumed_run_goes_on(make_config: MakeConfig) -> None:
    steps = Trainer(make_config("trainer.device=cuda", "trainer.checkpoint_every=1", "trainer.steps=3")).steps()
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    resumed = Trainer(make_config("trainer.device=cuda", "trainer.steps=3", "resume=auto"))
    reports = list(resumed.steps())
    assert reports[-1].number == 3
    assert all(report.kl < 1e-5 for report in reports)


@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_replayed(make_config: MakeConfig, ray_session: None, mode: str, dtype: str) -> None:
    config = make_config(
        "trainer.device=cuda",
        f"model.dtype={dtype}",
        "controller.backend=ray",
        "actor.mini_batches=2",
        "actor.gradient_checkpointing=true",
        f"actor.router_replay.mode={mode}",
    )
    reports = list(Trainer(config).steps())
    for report in reports:
        assert 0 <= report.metrics["replay/disagreement"] < 1
        assert (report.metrics["replay/unknown_share"] == 0) == (mode == "R2")
        assert report.kl < (1e-5 if dtype == "float32" else 1e-2)
    if mode == "R3":
        assert reports[0].metrics["replay/kl_with"] <= reports[0].metrics["replay/kl_without"] + 1e-3


def test_a_critic_and_a_reference_take_part(make_config: MakeConfig, ray_session: None) -> None:
    config = make_config(
        "trainer.device=cuda",
        "controller.backend=ray",
        "algorithm.advantage=gae",
        "algorithm.kl.coefficient=0.01",
        "actor.epochs=2",
    )
    reports = list(Trainer(config).steps())
    assert all(report.metrics["critic/grad_norm"] > 0 for report in reports)
    assert all(report.metrics["actor/reference_kl"] >= 0 for report in reports)
    assert all(report.kl < 1e-5 for report in reports)
