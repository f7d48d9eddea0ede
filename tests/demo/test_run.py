from __future__ import annotations

from pathlib import Path

import pytest

from practicum.demo.run import demo_config, prepare, start_afresh
from practicum.errors import ConfigError


def test_overrides_reach_the_demo_and_mistakes_are_named(tmp_path: Path) -> None:
    assert demo_config(tmp_path, ["trainer.steps=3"]).trainer.steps == 3
    with pytest.raises(ConfigError, match=r"practicum demo: unknown key 'trainer.step'"):
        demo_config(tmp_path, ["trainer.step=3"])


def test_starting_afresh_removes_only_what_the_demo_made(tmp_path: Path) -> None:
    for name in ("run/checkpoints", "model", "mine"):
        (tmp_path / name).mkdir(parents=True)
    start_afresh(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_model_that_is_there_is_kept_for_a_resumed_demo(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = prepare(tmp_path, [])
    assert list((tmp_path / "model").iterdir()) == []
    assert Path(config.data.train).exists() and config.data.validation is not None
