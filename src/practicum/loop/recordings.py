"""What a run must know of recordings before anything is started: the one it repeats, and the one it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.loop.settings import recorded_shape
from practicum.models import empty_model, load_config
from practicum.replay import Recording, RecordingHeader, recording_header


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


def check_going_on(config: Config) -> None:
    """For a run that is resumed: each worker goes on with a file of its own."""
    if config.record_file is None or not Path(config.record_file).is_file():
        return
    with Recording(config.record_file, rank=0) as recording:
        before, now = recording.header.num_ranks, config.trainer.num_workers
    if before != now:
        raise ConfigError(
            f"the run was recorded by {before} workers in {config.record_file}, and cannot be gone on with there by "
            f"{now}: set trainer.num_workers={before}, or name another actor.router_replay.record_file."
        )


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
