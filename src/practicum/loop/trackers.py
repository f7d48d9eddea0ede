"""Trackers of metrics: a file, TensorBoard, and W&B if it is asked for. The console is `progress.py`'s."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.loop.run_folder import RunFolder, write_durably


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """A line a step, on disk before `log` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of steps that were done before a kill, but after its last checkpoint, are shown no more.
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """The same at Weights & Biases. The run folder keeps the run's id there, so a resumed run goes on in it."""

    def __init__(self, wandb: Any, folder: Path, config: Config) -> None:
        """`wandb` is the package."""
        settings = config.trainer.wandb
        assert settings is not None
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name or folder.resolve().name,
                id=_wandb_id(folder),
                resume="allow",
                mode=settings.mode,
                dir=str(folder),
                config=config.model_dump(mode="json"),
                allow_val_change=True,  # a run may be resumed with another config
                settings=wandb.Settings(console="off", quiet=True),  # the terminal is the display's
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.wandb: W&B cannot open the run: {error} "
                "(trainer.wandb.mode=offline needs neither network nor account.)"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B takes nothing back: of steps that were done before a kill and are done again it keeps the first.
        if step >= self._run.step:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    path = folder / "wandb.json"
    if not path.exists():
        write_durably(path, json.dumps({"id": uuid.uuid4().hex[:16]}) + "\n")
    return str(json.loads(path.read_text())["id"])


def load_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(_no_wandb(str(error))) from error
    if not hasattr(wandb, "init"):
        raise ConfigError(_no_wandb("what is found by that name is a folder without it"))
    return wandb


def _no_wandb(why: str) -> str:
    return (
        f"trainer.wandb is set, but the package wandb cannot be used ({why}): install it with "
        "`pip install 'practicum[wandb]'`, or leave trainer.wandb out."
    )


def check_trackers(config: Config) -> None:
    """Raises ConfigError if one that is asked for cannot be had."""
    if config.trainer.wandb is not None:
        load_wandb()


def open_trackers(
    folder: RunFolder, first_step: int, config: Config, load: Callable[[], Any] = load_wandb
) -> list[Tracker]:
    # The only one that may be refused, so it is opened before there is anything to close.
    wandb = [] if config.trainer.wandb is None else [WandbTracker(load(), folder.path, config)]
    return [
        JsonlTracker(folder.path / "metrics.jsonl"),
        TensorBoardTracker(folder.path / "tensorboard", first_step),
        *wandb,
    ]
