"""Recordings of routed experts: checks before anything is started, and the samples of a step that is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.loop.settings import recorded_shape
from practicum.models import empty_model, load_config
from practicum.replay import Recording, RecordingHeader, recording_header
from practicum.types import Sample


def check_recordings(config: Config, tokenizer: Any) -> None:
    """Raise where the model's routers or the files named in the config will not do."""
    replay = config.actor.router_replay
    if replay.mode == "disabled":
        return
    header = recording_header(empty_model(load_config(config.model.path)), tokenizer)
    if replay.replay_file is not None:
        with Recording(replay.replay_file) as recording:
            _check_repeated(config, recording, header)
    elif replay.record_file is not None and config.resume == "never" and Path(replay.record_file).is_file():
        with Recording(replay.record_file, rank=0) as recording:
            if len(recording):
                raise ConfigError(
                    f"actor.router_replay.record_file={replay.record_file} already holds a recording, of "
                    f"{len(recording.steps)} steps: name another file, or go on with its run by resume=auto."
                )


def check_resumed(config: Config) -> None:
    """Raise where a resumed run cannot append to its recording: each worker appends to a file of its own."""
    if config.record_file is None or not Path(config.record_file).is_file():
        return
    with Recording(config.record_file, rank=0) as recording:
        before, now = recording.header.num_ranks, config.trainer.num_workers
    if before != now:
        raise ConfigError(
            f"the run was recorded by {before} workers in {config.record_file}, and cannot be gone on with there by "
            f"{now}: set trainer.num_workers={before}, or name another actor.router_replay.record_file."
        )


def groups_of(samples: Sequence[Sample], answers_per_prompt: int) -> list[list[Sample]]:
    """Return recorded samples by their groups, in the order they have."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        _, group, *number = map(int, sample.id.split("/"))
        if not number:  # recorded before there were groups: by its place in the step
            group //= answers_per_prompt
        groups.setdefault(group, []).append(sample)
    return list(groups.values())


def _check_repeated(config: Config, recording: Recording, header: RecordingHeader) -> None:
    recording.check(header)
    for key, now in recorded_shape(config).items():
        before = recording.header.made.get(key, now)
        if before != now:
            raise ConfigError(f"{key}={now}, but the recording {recording.path} was made with {before}: set it so.")
    there = set(recording.steps)
    for step in range(1, config.trainer.steps + 1):
        if step not in there:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps}, but step {step} is not in the recording {recording.path}, "
                f"which has {len(there)} steps: lower trainer.steps."
            )
        recording.check_whole(step)
