"""Where the numbers of a step go."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from practicum.loop.run_folder import RunFolder


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


def open_trackers(folder: RunFolder, first_step: int) -> list[Tracker]:
    return [JsonlTracker(folder.path / "metrics.jsonl"), TensorBoardTracker(folder.path / "tensorboard", first_step)]
