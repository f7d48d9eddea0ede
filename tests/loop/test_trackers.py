from __future__ import annotations

from pathlib import Path

from practicum.loop.run_folder import read_metrics
from practicum.loop.trackers import JsonlTracker, TensorBoardTracker


def test_a_line_is_on_disk_once_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": 0.1 + 0.2})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.1 + 0.2}]  # every bit of it
    tracker.close()


def test_tensorboard_can_read_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, first_step=1)
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 2})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]
