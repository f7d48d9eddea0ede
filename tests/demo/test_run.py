from __future__ import annotations

from pathlib import Path

import pytest

from practicum.demo.run import demo_config, prepare
from practicum.errors import CheckpointError, ConfigError


def test_overrides_reach_the_demo_and_mistakes_are_named(tmp_path: Path) -> None:
    assert demo_config(tmp_path, ["trainer.steps=3"]).trainer.steps == 3
    with pytest.raises(ConfigError, match=r"practicum demo: unknown key 'trainer.step'"):
        demo_config(tmp_path, ["trainer.step=3"])


@pytest.fixture
def quick_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.demo.run.WARM_UP_ACCURACY", 0.0)


def test_a_second_demo_removes_only_what_the_first_made(tmp_path: Path, quick_warm_up: None) -> None:
    prepare(tmp_path, [])
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").mkdir()
    prepare(tmp_path, [])
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "mine").exists() and (tmp_path / "model" / "config.json").exists()


def test_files_of_somebody_else_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="model was not made by the demo"):
        prepare(tmp_path, [])
    assert (tmp_path / "model").exists()


def test_a_model_that_is_there_is_kept_for_a_resumed_demo(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = prepare(tmp_path, ["resume=auto"])
    assert list((tmp_path / "model").iterdir()) == []
    assert Path(config.data.train).exists() and config.data.validation is not None
