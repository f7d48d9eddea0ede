from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from practicum.config import Config
from practicum.errors import CheckpointError, ConfigError
from practicum.loop.run_folder import RunFolder, RunState, read_best, read_metrics, read_validation
from practicum.loop.trackers import JsonlTracker
from practicum.types import Prompt, Score
from tests.samples import graded_group

MakeConfig = Callable[..., Config]


def save(folder: RunFolder, state: RunState, metrics: dict[str, float] | None = None) -> None:
    with folder.new_checkpoint(state, metrics) as hidden:
        (hidden / "weights").write_text("w")


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
        save(folder, RunState(step, data_position=step * 4))
    folder.close()
    assert sorted(p.name for p in (folder.path / "checkpoints").iterdir()) == ["step-000010", "step-000100"]
    resumed = RunFolder(make_config("resume=auto"))
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.state == RunState(100, 400)
    assert (resumed.checkpoint.folder / "weights").read_text() == "w"
    resumed.close()


def test_a_checkpoint_interrupted_while_written_is_not_seen(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    save(folder, RunState(1, 4))

    with pytest.raises(KeyboardInterrupt), folder.new_checkpoint(RunState(2, 8)) as hidden:
        (hidden / "weights").write_text("w")
        raise KeyboardInterrupt
    folder.close()
    resumed = RunFolder(make_config("resume=auto"))
    assert resumed.checkpoint is not None and resumed.checkpoint.state.step == 1
    save(resumed, RunState(2, 8))  # the remains are out of the way
    resumed.close()


def test_metrics_after_the_checkpoint_are_cut_off(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    rows = [{"step": step, "x": step / 3} for step in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.path / "metrics.jsonl").write_text(text + '{"step": 5, "x": 0.1')  # killed in the middle of a line
    save(folder, RunState(3, 12))
    folder.close()
    resumed = RunFolder(make_config("resume=auto"))
    assert read_metrics(resumed.path) == rows[:4]
    resumed.close()


@pytest.mark.parametrize(
    ("start", "change", "told"),
    [
        ([], ["model.path=./other"], "model.path: .* -> ./other"),
        ([], ["data.train=other.jsonl"], "data.train: .* -> other.jsonl"),
        ([], ["trainer.seed=7"], "trainer.seed: 0 -> 7"),
        ([], ["algorithm.advantage=gae"], "algorithm.advantage: grpo -> gae"),
        (["algorithm.advantage=gae"], [], "algorithm.advantage: gae -> grpo"),
        (["algorithm.advantage=gae"], ["algorithm.advantage=gae", "critic.path=./c"], "critic.path: None -> ./c"),
        ([], ["actor.lora.rank=4"], "actor.lora.rank: None -> 4; actor.lora.targets: None -> all-linear"),
    ],
)
def test_what_the_checkpoint_depends_on_cannot_change(
    make_config: MakeConfig, start: list[str], change: list[str], told: str
) -> None:
    folder = RunFolder(make_config(*start))
    save(folder, RunState(3, 12))
    folder.close()
    (folder.path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    (folder.path / "checkpoints" / ".step-000004").mkdir()
    before = contents(folder.path)
    with pytest.raises(CheckpointError, match=rf"cannot go on with another {told}.*may change when a run is resumed"):
        RunFolder(make_config("resume=auto", *change))
    assert contents(folder.path) == before


def test_whoever_else_refuses_to_resume_does_so_before_anything_is_written(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    save(folder, RunState(3, 12))
    folder.close()
    before = contents(folder.path)

    def refuse(config: Config) -> None:
        raise ConfigError("not with this one")

    with pytest.raises(ConfigError, match="not with this one"):
        RunFolder(make_config("resume=auto", "actor.lr=2"), refuse)
    assert contents(folder.path) == before


def contents(folder: Path) -> dict[str, str | None]:
    return {str(path): path.read_text() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def damage_weights(checkpoint: Path) -> str:
    (checkpoint / "weights").write_text("")
    return "weights has 0 of 1 bytes"


def lose_weights(checkpoint: Path) -> str:
    (checkpoint / "weights").unlink()
    return "weights is missing"


def damage_state(checkpoint: Path) -> str:
    (checkpoint / "state.json").write_text("{}")
    return "no usable state.json"


def damage_table(name: str) -> Callable[[Path], str]:
    """As a file system does that loses what was written last, in a run of an earlier version."""

    def damage(checkpoint: Path) -> str:
        told = json.loads((checkpoint / "state.json").read_text())
        del told["files"]
        (checkpoint / "state.json").write_text(json.dumps(told))
        (checkpoint / name).write_bytes(bytes(1000))
        return f"{name} (cannot be read|is not whole)"

    return damage


DAMAGES = [
    damage_weights,
    lose_weights,
    damage_state,
    *map(damage_table, ("rng-0.pt", "config.json", "model.safetensors")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(make_config: MakeConfig, damage: Callable[[Path], str]) -> None:
    folder = RunFolder(make_config())
    for step in (1, 3):
        save(folder, RunState(step, 4 * step))
    folder.close()
    told = damage(folder.path / "checkpoints" / "step-000003")
    resumed = RunFolder(make_config("resume=auto"))
    assert resumed.checkpoint is not None and resumed.checkpoint.state.step == 1
    (text,) = resumed.passed_over
    assert re.search(rf"step-000003.*{told}.*damaged-step-000003", text)
    save(resumed, RunState(3, 12))  # the damaged one is out of the way
    resumed.close()


def test_without_a_whole_checkpoint_nothing_is_begun_anew(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    save(folder, RunState(3, 12))
    folder.close()
    damage_weights(folder.path / "checkpoints" / "step-000003")
    before = contents(folder.path)
    with pytest.raises(CheckpointError, match=r"step-000003 is damaged: weights.*no other whole checkpoint.*run_dir"):
        RunFolder(make_config("resume=auto"))
    assert contents(folder.path) == before


def test_a_damaged_line_of_metrics_is_named(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    folder.close()
    (folder.path / "metrics.jsonl").write_text('{"step": 0}\n{garbage\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 is not valid JSON"):
        RunFolder(make_config("resume=auto"))


def test_answers_and_validations_can_be_read(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config())
    group = graded_group(("4", Score.failed("timeout", "late")), ("5", Score(1.0)))
    for trajectory in group.trajectories:
        trajectory.last.prompt = Prompt("p", text="?", answer="5")
    folder.write_answers(3, group.trajectories, str)
    text = (folder.path / "answers" / "step-000003.txt").read_text()
    assert "--- ?\nanswer: 4\nexpected: 5\nscore: timeout: late (stop, 3 tokens)" in text
    folder.write_validation(3, group.trajectories, right_above=0.5)
    assert [row["score"] for row in read_validation(folder.path, 3)] == [None, 1.0]
    assert [row["right"] for row in read_validation(folder.path, 3)] == [False, True]
    folder.write_validation(3, group.trajectories, right_above=1.0)
    assert [row["right"] for row in read_validation(folder.path, 3)] == [False, False]
    assert read_validation(folder.path, 4) == []
    folder.close()


def test_conversations_are_written_down_with_all_their_turns(make_config: MakeConfig) -> None:
    (trajectory,) = graded_group(("the end", Score(1.0)), answer=6).trajectories
    trajectory.counts = {"turns": 2}
    mask = np.array([True, True, False, False, True, True])
    trajectory.samples[0] = replace(trajectory.last, loss_mask=mask, token_ids=np.arange(1, 7, dtype=np.int32))
    folder = RunFolder(make_config())
    folder.write_answers(1, [trajectory], lambda ids: " ".join(map(str, ids)))
    folder.close()
    text = (folder.path / "answers" / "step-000001.txt").read_text()
    prompt = " ".join(map(str, trajectory.last.prompt_ids))
    assert f"[prompt] {prompt}\n[model] 1 2\n[reply] 3 4\n[model] 5 6\nanswer: the end\n" in text


# The best checkpoint

BY_ACCURACY = ("trainer.keep_best=validation/accuracy", "trainer.keep_checkpoints=1")


def steps_done(folder: RunFolder, accuracies: dict[int, float], every: int = 100) -> None:
    """As the trainer has it: metrics, then a checkpoint if one is due or the step is the best."""
    tracker = JsonlTracker(folder.path / "metrics.jsonl")
    for step, accuracy in accuracies.items():
        metrics = {"validation/accuracy": accuracy}
        tracker.log(step, metrics)
        if step % every == 0 or folder.is_best(metrics):
            save(folder, RunState(step, step), metrics)
    tracker.close()


def kept(folder: RunFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((folder.path / "checkpoints").iterdir())]


def test_the_best_checkpoint_outlives_newer_ones(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config(*BY_ACCURACY))
    assert read_best(folder.path) is None
    steps_done(folder, {1: 0.2, 2: 0.5, 3: 0.9, 4: 0.4, 5: 0.9, 6: 0.1}, every=2)
    assert kept(folder) == [3, 6]
    best = read_best(folder.path)
    assert best is not None and (best.step, best.value, best.metric) == (3, 0.9, "validation/accuracy")
    assert (folder.path / best.checkpoint / "weights").exists()
    steps_done(folder, {7: 0.95})
    assert kept(folder) == [7]  # the newest and the best in one
    folder.close()


def test_without_keep_best_nothing_is_marked(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config("trainer.keep_checkpoints=1"))
    steps_done(folder, {1: 0.9, 2: 0.2}, every=1)
    assert kept(folder) == [2] and read_best(folder.path) is None
    folder.close()


def test_a_resumed_run_knows_its_best(make_config: MakeConfig) -> None:
    folder = RunFolder(make_config(*BY_ACCURACY))
    steps_done(folder, {1: 0.2, 2: 0.8, 3: 0.3, 4: 0.4}, every=4)
    JsonlTracker(folder.path / "metrics.jsonl").log(5, {"validation/accuracy": 0.99})  # killed before its checkpoint
    folder.close()
    (folder.path / "best.json").unlink()  # or before the mark
    resumed = RunFolder(make_config(*BY_ACCURACY, "resume=auto"))
    assert resumed.checkpoint is not None and resumed.checkpoint.state.step == 4
    assert resumed.best == read_best(folder.path) is not None
    assert resumed.best is not None and resumed.best.step == 2
    steps_done(resumed, {5: 0.7, 6: 0.8, 8: 0.1}, every=4)
    assert kept(resumed) == [2, 8]
    resumed.close()
    without = RunFolder(make_config("resume=auto"))
    assert read_best(folder.path) is None  # nobody protects it any more
    without.close()


_SAVES_FOR_EVER = """
import itertools, sys
from practicum.config import Config
from practicum.loop.run_folder import RunFolder
from tests.loop.test_run_folder import steps_done

folder = RunFolder(Config.load(sys.argv[1], ["resume=auto"]))
first = folder.checkpoint.state.step + 1 if folder.checkpoint else 1
for step in itertools.count(first):
    print("working", flush=True)
    steps_done(folder, {step: step * 37 % 101 + step / 50}, every=3)
"""


def test_killed_at_any_moment_the_mark_is_right(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*BY_ACCURACY, "resume=auto")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    run_dir = Path(config.trainer.run_dir)
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVES_FOR_EVER, str(tmp_path / "config.yaml")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == b"working\n"
        time.sleep(0.002 * attempt)  # somewhere in the fourth step from where it began, or in the next
        process.kill()
        process.wait()
        process.stdout.close()
        marked = read_best(run_dir)
        if marked is not None:
            assert (run_dir / marked.checkpoint / "state.json").exists()
        folder = RunFolder(config)
        rows = {row["step"]: row["validation/accuracy"] for row in read_metrics(run_dir)}
        if rows:
            assert folder.best is not None
            assert (folder.best.step, folder.best.value) == max(rows.items(), key=lambda row: row[1])
            assert (run_dir / folder.best.checkpoint / "weights").exists()
        folder.close()
    assert len(rows) >= 6
