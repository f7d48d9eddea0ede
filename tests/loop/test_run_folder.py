from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.config import Config
from practicum.errors import CheckpointError
from practicum.loop.run_folder import RunFolder, RunState, read_metrics, read_validation
from practicum.types import Score
from tests.samples import make_sample

MakeConfig = Callable[..., Config]


def fill(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_a_folder_that_holds_a_run_is_not_overwritten(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    folder.close()
    RunFolder(make_config()).close()  # it never took a step: there is nothing to lose
    (folder.path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(CheckpointError, match=r"already holds a run: add resume=auto"):
        RunFolder(make_config())


def test_two_processes_cannot_share_a_folder(make_config: MakeConfig) -> None:
    first = RunFolder(make_config())
    with pytest.raises(CheckpointError, match="in use by another process"):
        RunFolder(make_config("resume=auto"))
    first.close()
    RunFolder(make_config("resume=auto")).close()


def test_a_folder_that_cannot_be_written_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run cannot be written"):
        RunFolder(make_config(f"trainer.run_dir={tmp_path}/file/run"))


def test_the_newest_checkpoints_are_kept_and_the_last_is_resumed(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config("trainer.keep_checkpoints=2"))
    for step in (2, 4, 10, 100):
        folder.save_checkpoint(RunState(step, data_position=step * 4), fill)
    folder.close()
    assert sorted(p.name for p in (folder.path / "checkpoints").iterdir()) == ["step-000010", "step-000100"]
    resumed = RunFolder(make_config("resume=auto"))
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.state == RunState(100, 400)
    assert (resumed.checkpoint.folder / "weights").read_text() == "w"
    resumed.close()


def test_a_checkpoint_interrupted_while_written_is_not_seen(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    folder.save_checkpoint(RunState(1, 4), fill)

    def fails(hidden: Path) -> None:
        fill(hidden)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint(RunState(2, 8), fails)
    folder.close()
    resumed = RunFolder(make_config("resume=auto"))
    assert resumed.checkpoint is not None and resumed.checkpoint.state.step == 1
    resumed.save_checkpoint(RunState(2, 8), fill)  # the remains are out of the way
    resumed.close()


def test_metrics_after_the_checkpoint_are_cut_off(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    rows = [{"step": step, "x": step / 3} for step in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.path / "metrics.jsonl").write_text(text + '{"step": 5, "x": 0.1')  # killed in the middle of a line
    folder.save_checkpoint(RunState(3, 12), fill)
    folder.close()
    resumed = RunFolder(make_config("resume=auto"))
    assert read_metrics(resumed.path) == rows[:4]
    resumed.close()


@pytest.mark.parametrize("change", ["model.path=./other", "data.train=other.jsonl", "trainer.seed=7"])
def test_what_the_checkpoint_depends_on_cannot_change(make_config: MakeConfig, change: str) -> None:
    folder = RunFolder(make_config())
    folder.save_checkpoint(RunState(3, 12), fill)
    folder.close()
    with pytest.raises(CheckpointError, match=rf"cannot go on with another {change.partition('=')[0]}: "):
        RunFolder(make_config("resume=auto", change))


def test_a_damaged_checkpoint_says_what_to_do(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    folder.save_checkpoint(RunState(3, 12), fill)
    folder.close()
    (folder.path / "checkpoints" / "step-000003" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-000003 has no usable state.json.*delete that folder"):
        RunFolder(make_config("resume=auto"))


def test_a_damaged_line_of_metrics_is_named(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    folder.close()
    (folder.path / "metrics.jsonl").write_text('{"step": 0}\n{garbage\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 is not valid JSON"):
        RunFolder(make_config("resume=auto"))


def test_answers_and_validations_can_be_read(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    samples = [make_sample(text="4", truth="5"), make_sample(text="5", truth="5")]
    scores = [Score(None, status="timeout"), Score(1.0)]
    folder.write_answers(3, samples, scores)
    text = (folder.path / "answers" / "step-000003.txt").read_text()
    assert "answer: 4\nexpected: 5\nscore: timeout" in text
    folder.write_validation(3, samples, scores, right_above=0.5)
    assert [row["score"] for row in read_validation(folder.path, 3)] == [None, 1.0]
    assert [row["right"] for row in read_validation(folder.path, 3)] == [False, True]
    folder.write_validation(3, samples, scores, right_above=1.0)
    assert [row["right"] for row in read_validation(folder.path, 3)] == [False, False]
    assert read_validation(folder.path, 4) == []
    folder.close()
