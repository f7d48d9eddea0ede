"""The folder of a run: everything that outlives the process, written so that a kill at any moment loses nothing.

    config.yaml                     as resolved
    metrics.jsonl                   a line a step (step 0: before training)
    tensorboard/                    the same as events
    answers/step-000010.txt         some sampled answers, conversations as a whole
    validation/step-000000.jsonl    some held-out questions with answers
    checkpoints/step-000050/        see train/checkpoint.py; state.json says where the run stood
    logs/vllm-host-1234.log         what servers print that the run has started
    best.json                       which of them is the best, if trainer.keep_best asks for it
    wandb.json, wandb/              the run's id at W&B, and what W&B keeps on disk
    summary.json, report.html       written at the end

A checkpoint is written into a hidden folder, synced to disk, then renamed: it is either whole or not there. Its
state.json has the size of every file, so that damage that comes later is found before anything is started. Metrics of
a step are on disk before its checkpoint, so a resumed run cuts them off after that step and goes on. Which checkpoint
is the best follows from the metrics; best.json is only the mark of it, and names one that is there at any moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from practicum.config import Config
from practicum.errors import CheckpointError, ConfigError
from practicum.types import Prompt, Score, Trajectory

SHOWN_VALIDATIONS = 20
_BEST = "best.json"
_IN_DATA = "its checkpoint holds a position in the prompts as they are shuffled"
_CANNOT_CHANGE = {
    "model.path": "its checkpoint is of that model; where the model has only moved, leave a link at its old place",
    "algorithm.advantage": "a checkpoint holds a critic with gae, and only with gae",
    "critic.path": "its checkpoint holds a critic that was made from that model",
    "data.train": _IN_DATA,
    "trainer.seed": _IN_DATA,
    **dict.fromkeys(
        (f"actor.lora{key}" for key in ("", ".rank", ".alpha", ".targets")), "its checkpoint holds what these learn"
    ),
}


_CAN_CHANGE = (
    "learning rates, batch sizes, losses, rollout, rewards, trainer.steps and trainer.num_workers may change when a "
    "run is resumed"
)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after a step: all that is not in the model and the optimizer."""

    step: int
    data_position: int
    kl_coefficient: float | None = None  # as it stands, where it is adapted
    kl_began_at: float | None = None  # the config's, from which it was adapted
    data_again: tuple[int, ...] = ()  # what before that position was asked ahead, and was not learnt from yet


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint so far, and by what."""

    metric: str
    value: float
    step: int
    checkpoint: str  # within the run folder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    state: RunState

    @property
    def model_path(self) -> str:
        return str(self.folder / "model")


class RunFolder:
    """A run folder, opened by one process at a time; a second one is refused."""

    def __init__(self, config: Config, check_resumed: Callable[[Config], None] = lambda _: None) -> None:
        """`check_resumed` raises where more than is known here forbids to resume with that config. Nothing in the
        folder has changed by then."""
        self.path = Path(config.trainer.run_dir)
        self._keep = config.trainer.keep_checkpoints
        self._best_by = config.trainer.keep_best
        self.best: Best | None = None
        try:
            for name in ("checkpoints", "answers", "validation"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"run folder {self.path} cannot be written: {error.strerror}.") from error
        self._lock = lock_folder(self.path)
        try:
            self.checkpoint = self._prepare(config, check_resumed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def _prepare(self, config: Config, check_resumed: Callable[[Config], None]) -> Checkpoint | None:
        """Return the checkpoint to resume from, or None to start at the beginning."""
        saved = self.path / "config.yaml"
        # A run that never took a step, because it could not start, is nothing to protect.
        if config.resume == "never" and (self._checkpoints() or read_metrics(self.path)):
            raise CheckpointError(
                f"run folder {self.path} already holds a run: add resume=auto to continue it, "
                "or set another trainer.run_dir."
            )
        checkpoint, broken = newest_whole(self.path / "checkpoints")
        if broken and checkpoint is None:
            raise CheckpointError(
                f"{next(iter(broken.values()))}, and there is no other whole checkpoint in {self.path}: restore that "
                "file, or set another trainer.run_dir to start from the beginning."
            )
        self.changes = []
        if checkpoint is not None:
            self.changes = _changes(saved, config)
            check_resumed(config)
        for leftover in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(leftover)
        self.passed_over = [_set_aside(folder, problem) for folder, problem in broken.items()]
        self._cut_metrics(checkpoint.state.step if checkpoint else -1)
        write_durably(saved, config.to_yaml())
        self._find_best()
        return checkpoint

    def _checkpoints(self) -> list[Path]:
        return _checkpoints_in(self.path / "checkpoints")

    def _cut_metrics(self, last_step: int) -> None:
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= last_step]
        write_durably(self.path / "metrics.jsonl", "".join(kept))

    def _find_best(self) -> None:
        """Find the best checkpoint: a kill may have come before the mark, or the metric may be another now."""
        there = {path.name for path in self._checkpoints()}
        for row in read_metrics(self.path):
            if checkpoint_name(row["step"]) in there and self.is_best(row):
                self.best = self._as_best(row["step"], row)
        self._mark_best()

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these are better than the metrics of any checkpoint so far. Of equals the first is the
        best."""
        if self._best_by is None or self._best_by not in metrics:
            return False
        return self.best is None or metrics[self._best_by] > self.best.value

    def _as_best(self, step: int, metrics: Mapping[str, float]) -> Best:
        assert self._best_by is not None
        return Best(self._best_by, metrics[self._best_by], step, f"checkpoints/{checkpoint_name(step)}")

    def _mark_best(self) -> None:
        if self.best is not None:
            write_durably(self.path / _BEST, json.dumps(asdict(self.best)) + "\n")
        else:
            (self.path / _BEST).unlink(missing_ok=True)

    @contextmanager
    def new_checkpoint(self, state: RunState, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
        """Yield a folder to fill; it becomes the newest checkpoint at the end of the block, once all of it is on disk.

        `metrics` of its step, which must be on disk already, say whether it is the best.
        """
        name = checkpoint_name(state.step)
        hidden = self.path / "checkpoints" / f".{name}"
        final = self.path / "checkpoints" / name
        hidden.mkdir()
        yield hidden
        files = {str(path.relative_to(hidden)): path.stat().st_size for path in hidden.rglob("*") if path.is_file()}
        (hidden / "state.json").write_text(json.dumps({**asdict(state), "files": files}) + "\n")
        for path in [*hidden.rglob("*"), hidden]:
            _sync(path)
        hidden.rename(final)
        _sync(final.parent)
        if metrics is not None and self.is_best(metrics):
            self.best = self._as_best(state.step, metrics)
            self._mark_best()  # before the one that was the best is deleted
        for old in self._checkpoints()[: -self._keep]:
            if self.best is not None and old.name == checkpoint_name(self.best.step):
                continue
            # Renamed before it is deleted, so that a kill in between leaves no half-deleted checkpoint by that name.
            gone = old.rename(old.with_name(f".{old.name}"))
            shutil.rmtree(gone)

    def write_answers(self, step: int, trajectories: Sequence[Trajectory], decode: Callable[[Any], str]) -> None:
        """Write answers with their scores, and of conversations all that was said. `decode` makes text of tokens."""
        blocks = [
            f"--- {question(one.last.prompt)}\n{_turns(one, decode)}"
            f"answer: {one.last.text}\nexpected: {one.last.prompt.answer}\n"
            f"score: {_shown(one.score)} ({one.last.finish_reason}, {len(one.last.token_ids)} tokens)\n"
            for one in trajectories
        ]
        (self.path / "answers" / f"step-{step:06d}.txt").write_text("\n".join(blocks))

    def write_validation(self, step: int, trajectories: Sequence[Trajectory], right_above: float) -> None:
        rows = []
        for one in trajectories[:SHOWN_VALIDATIONS]:
            value = None if one.score is None else one.score.value
            rows.append(
                {
                    "question": question(one.last.prompt),
                    "expected": one.last.prompt.answer,
                    "answer": one.last.text,
                    "score": value,
                    "right": value is not None and value > right_above,
                }
            )
        lines = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        write_durably(self.path / "validation" / f"step-{step:06d}.jsonl", lines)


def _turns(trajectory: Trajectory, decode: Callable[[Any], str]) -> str:
    """Return a conversation with all turns of the model and what was said between them; nothing for a plain answer."""
    if not trajectory.counts:
        return ""
    lines = []
    for sample in trajectory.samples:
        lines.append(f"[prompt] {decode(sample.prompt_ids)}\n")
        edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        for ids, mask in zip(np.split(sample.token_ids, edges), np.split(sample.loss_mask, edges), strict=True):
            if len(ids):
                lines.append(f"[{'model' if mask[0] else 'reply'}] {decode(ids)}\n")
    return "".join(lines)


def _shown(score: Score | None) -> str:
    if score is None:
        return "not graded"
    return str(score.value) if score.status == "ok" else f"{score.status}: {score.reason}"


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def newest_whole(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest checkpoint in `folder` that is whole, and what is wrong with each newer one."""
    broken: dict[Path, str] = {}
    for own in reversed(_checkpoints_in(folder)):
        try:
            return _read_checkpoint(own), broken
        except CheckpointError as error:
            broken[own] = str(error)
    return None, broken


def check_checkpoint_path(key: str, path: str) -> None:
    """Raise where the path of a model, the value of `key`, is in a checkpoint and files of it are damaged."""
    own = Path(path)
    if own.parent.parent.name != "checkpoints" or not own.is_dir():
        return
    try:
        _read_checkpoint(own.parent, within=own.name)
    except CheckpointError as error:
        whole, _ = newest_whole(own.parent.parent)
        instead = f"set it to {whole.folder / own.name}, the newest whole checkpoint there" if whole else "set another"
        raise CheckpointError(f"{key}={path}: {error}: {instead}.") from error


def _read_checkpoint(folder: Path, within: str = "") -> Checkpoint:
    """Return a checkpoint; raise where a file of it, or of the folder `within` it, is missing or damaged."""
    try:
        told = json.loads((folder / "state.json").read_text())
        sizes = told.pop("files", {})  # of runs of earlier versions they are not known
        state = RunState(**{**told, "data_again": tuple(told.get("data_again", ()))})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no usable state.json ({error})") from error
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name in sorted({*sizes, *there}):
        if name.startswith(within) and (problem := _damage(folder / name, sizes.get(name))):
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} {problem}")
    return Checkpoint(folder, state)


def _damage(path: Path, expected: int | None) -> str | None:
    """Return what is wrong with a file, as far as its size and its table of contents tell; None if nothing is."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if expected not in (None, size):
        return f"has {size:,} of {expected:,} bytes"
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".pt":
            zipfile.ZipFile(path).close()
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length < size else {}
            ends = [own["data_offsets"][1] for name, own in header.items() if name != "__metadata__"]
            if not ends or 8 + length + max(ends) != size:
                return "is not whole"
    except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
        return f"cannot be read ({error})"
    return None


def _set_aside(folder: Path, problem: str) -> str:
    """Rename a damaged checkpoint, so that its step can be saved again; return what to tell of it."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)  # it was damaged once before
    folder.rename(aside)
    return f"{problem}; it is passed over, and is {aside.name} now: delete it when you have looked at it"


def _checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def read_best(run_dir: Path) -> Best | None:
    """Return the checkpoint that a run has marked as its best, if any."""
    path = run_dir / _BEST
    return Best(**json.loads(path.read_text())) if path.exists() else None


def lock_folder(path: Path) -> IO[str]:
    """Hold a run folder until the returned file is closed, or the process ends; refuse if another one holds it."""
    try:
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise CheckpointError(f"run folder {path} cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise CheckpointError(
            f"run folder {path} is in use by another process: wait for it or use another folder."
        ) from None
    return lock


def _changes(saved: Path, config: Config) -> list[str]:
    """Return how the config to resume with differs from the one the run was started with; refuse what cannot change."""
    try:
        before = Config.load(saved)
    except ConfigError as error:  # from a version with other keys
        return [f"the run's own config cannot be read any more: {error}"]
    changes = [change for change in config.changes_from(before) if not change.startswith("resume:")]
    can = {"actor.lora.alpha"} if _scale(before) == _scale(config) else set()
    if before.algorithm.needs_critic == config.algorithm.needs_critic:
        can |= {"algorithm.advantage"}
    refused = {
        change: _CANNOT_CHANGE[key]
        for change in changes
        if (key := change.partition(":")[0]) in _CANNOT_CHANGE.keys() - can
    }
    if refused:
        raise CheckpointError(
            f"the run in {saved.parent} cannot go on with another {'; '.join(refused)}: "
            f"{'; '.join(dict.fromkeys(refused.values()))}. Set it as it was, or another trainer.run_dir for a new "
            f"run; {_CAN_CHANGE}."
        )
    return changes


def _scale(config: Config) -> int | None:
    return None if config.actor.lora is None else config.actor.lora.scale_by


def question(prompt: Prompt) -> str:
    """Return a prompt as a person would quote it."""
    return prompt.text if prompt.messages is None else "\n".join(m.content for m in prompt.messages)  # type: ignore[return-value]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a run's metrics; a last line cut short by a kill is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise CheckpointError(f"{path}:{number} is not valid JSON ({error}): delete that line.") from error
    return rows


def read_validation(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the questions and answers kept of a validation; none if there was none at that step."""
    path = run_dir / "validation" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old or the new text, also after a crash."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(text)
    _sync(hidden)
    hidden.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
