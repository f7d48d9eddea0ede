from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from practicum import Config
from practicum.errors import ConfigError, ReplayError
from practicum.loop.recordings import check_recordings, check_resumed
from practicum.models import load_model, load_tokenizer
from practicum.replay import RouteWriter, recording_header

MakeConfig = Callable[..., Config]


def write(model: Path, file: Path, num_ranks: int = 1) -> None:
    header = recording_header(load_model(str(model)), load_tokenizer(str(model)), num_ranks=num_ranks)
    RouteWriter(file, header).close()


def test_without_replay_nothing_is_looked_at(make_config: MakeConfig, tiny_model: Path) -> None:
    check_recordings(make_config(), load_tokenizer(str(tiny_model)))
    check_resumed(make_config())


def test_a_recording_that_is_not_there_is_named(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config("actor.router_replay.mode=R2", f"actor.router_replay.replay_file={tmp_path / 'none.rec'}")
    with pytest.raises(ReplayError, match=r"none\.rec cannot be read"):
        check_recordings(config, load_tokenizer(str(tiny_model)))


def test_a_run_goes_on_with_as_many_workers(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    write(tiny_model, file, num_ranks=2)
    config = make_config("actor.router_replay.mode=R2", f"actor.router_replay.record_file={file}")
    with pytest.raises(ConfigError, match=r"recorded by 2 workers in .*routes\.rec.*by 1: set trainer\.num_workers=2"):
        check_resumed(config)


def test_an_empty_recording_may_be_begun_anew(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    write(tiny_model, file)
    config = make_config("actor.router_replay.mode=R2", f"actor.router_replay.record_file={file}")
    check_recordings(config, load_tokenizer(str(tiny_model)))
    check_resumed(config)
