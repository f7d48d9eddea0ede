from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.loop.run_folder import RunFolder, read_metrics
from practicum.loop.trackers import JsonlTracker, TensorBoardTracker, WandbTracker, check_trackers, open_trackers

MakeConfig = Callable[..., Config]


def test_a_line_is_on_disk_once_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": 0.1 + 0.2})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.1 + 0.2}]  # every bit of it
    tracker.close()


def test_tensorboard_can_read_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, first_step=1)
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 2})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]


# W&B


class FakeRun:
    """One at W&B: a step is the last one logged, after a resumption the one after; steps before it are ignored."""

    def __init__(self, history: dict[int, dict[str, float]], is_offline: bool) -> None:
        self.history = history
        self.step = 0 if is_offline or not history else max(history) + 1
        self.is_finished = False

    def log(self, data: dict[str, Any], step: int) -> None:
        assert not self.is_finished and step >= self.step, "W&B would complain"
        self.step = step
        self.history[step] = data

    def finish(self) -> None:
        self.is_finished = True


class FakeWandb:
    class Error(Exception):
        pass

    def __init__(self, complaint: str | None = None) -> None:
        self.complaint = complaint
        self.given: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.histories: dict[str, dict[int, dict[str, float]]] = {}

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **given: Any) -> FakeRun:
        if self.complaint is not None:
            raise self.Error(self.complaint)
        self.given.append(given)
        history = self.histories.setdefault(given["id"], {})
        self.runs.append(FakeRun(history, given["mode"] == "offline"))
        return self.runs[-1]


def logged(wandb: FakeWandb, folder: Path, config: Config, steps: dict[int, float]) -> None:
    tracker = WandbTracker(wandb, folder, config)
    for step, reward in steps.items():
        tracker.log(step, {"reward/mean": reward})
    tracker.close()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resumed_run_goes_on_in_the_same_wandb_run(make_config: MakeConfig, tmp_path: Path, mode: str) -> None:
    wandb, config = FakeWandb(), make_config("trainer.wandb.project=sums", f"trainer.wandb.mode={mode}")
    logged(wandb, tmp_path, config, {0: 0.1, 1: 0.2, 2: 0.3})
    logged(wandb, tmp_path, config, {2: 0.3, 3: 0.4})  # killed after step 2, resumed after step 1
    first, second = wandb.given
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert list(wandb.histories.values()) == [{i: {"reward/mean": (i + 1) / 10} for i in range(4)}]
    assert all(run.is_finished for run in wandb.runs)
    assert not set(first["id"]) & set("/\\#?%:")  # which W&B refuses


def test_wandb_is_told_what_the_run_is(make_config: MakeConfig, tmp_path: Path) -> None:
    wandb, config = FakeWandb(), make_config("trainer.wandb.project=sums", "trainer.wandb.name=first try")
    logged(wandb, tmp_path, config, {})
    given = wandb.given[0]
    assert (given["project"], given["name"], given["mode"]) == ("sums", "first try", "online")
    assert given["config"]["actor"]["lr"] == config.actor.lr and json.dumps(given["config"])
    assert given["dir"] == str(tmp_path)
    logged(wandb, tmp_path, make_config("trainer.wandb.project=sums"), {})
    assert wandb.given[1]["name"] == tmp_path.name


def test_what_wandb_refuses_is_said_with_a_way_out(make_config: MakeConfig, tmp_path: Path) -> None:
    wandb = FakeWandb("No API key configured.")
    with pytest.raises(ConfigError, match=r"No API key configured\. .*trainer\.wandb\.mode=offline"):
        WandbTracker(wandb, tmp_path, make_config("trainer.wandb.project=sums"))


def test_wandb_is_asked_only_if_it_is_wanted(make_config: MakeConfig) -> None:
    for overrides, num_runs in (([], 0), (["trainer.wandb.project=sums"], 1)):
        wandb, config = FakeWandb(), make_config(*overrides)
        folder = RunFolder(config)
        trackers = open_trackers(folder, 1, config, lambda wandb=wandb: wandb)  # type: ignore[misc]
        for tracker in trackers:
            tracker.log(1, {"a": 1.0})
            tracker.close()
        folder.close()
        assert len(wandb.runs) == num_runs
        assert read_metrics(folder.path) == [{"step": 1, "a": 1.0}]
        (folder.path / "metrics.jsonl").unlink()


def test_a_missing_package_is_named_with_its_extra(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("trainer.wandb.project=sums")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    check_trackers(make_config())
    with pytest.raises(ConfigError, match=r"trainer\.wandb is set, but .* `pip install 'practicum\[wandb\]'`"):
        check_trackers(config)


def test_a_folder_that_is_called_wandb_is_not_taken_for_the_package(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()  # W&B makes one where it runs
    with pytest.raises(ConfigError, match=r"a folder without it\): install it"):
        check_trackers(make_config("trainer.wandb.project=sums"))
    sys.modules.pop("wandb")
