from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from practicum.loop.metrics import StepReport
from practicum.loop.progress import Progress, print_ending
from practicum.loop.run_folder import Best
from practicum.loop.summary import Summary


def report(number: int, **metrics: float) -> StepReport:
    return StepReport(
        number,
        100,
        {"reward/mean": 0.25, "rollout/kl": 1e-7, "time/tokens_per_s": 1234.0, "time/step_s": 2.0, **metrics},
    )


def shown(terminal: bool, *reports: StepReport) -> str:
    output = io.StringIO()
    with Progress(Console(file=output, force_terminal=terminal, width=160)) as progress:
        for step in reports:
            progress.show(step)
    return output.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = shown(False, report(1), report(2, **{"validation/accuracy": 0.5}), report(3), report(100))
    lines = text.splitlines()
    assert len(lines) == 3  # the first, the validated, the last; step 3 came too soon after
    assert lines[0] == "step 1/100  reward 0.250  held-out -  KL(rollout|trainer) 1.0e-07  tokens/s 1,234  left 0:03:18"
    assert "held-out 0.500" in lines[1] and "held-out 0.500" in lines[2]
    assert "\x1b" not in text


def test_a_live_display_on_a_terminal() -> None:
    text = shown(True, report(1), report(50))
    for part in ("50/100", "0.250", "1.0e-07", "1,234", "\x1b"):
        assert part in text


@pytest.mark.parametrize(("before", "line"), [(0.25, "0.250 before, 0.900 after"), (None, "0.100 in the first step")])
def test_the_ending_tells_before_and_after(tmp_path: Path, before: float | None, line: str) -> None:
    output = io.StringIO()
    summary = Summary(before, 0.9 if before else None, 0.1, 0.8, 1e-9, 10, 60.0, 1000, 100.0)
    print_ending(Console(file=output, width=120), tmp_path, summary, tmp_path / "report.html")
    assert line in output.getvalue()
    assert "report.html" in output.getvalue()


@pytest.mark.parametrize(("step", "is_told"), [(4, True), (10, False)])
def test_the_ending_names_the_best_model_where_it_is_not_the_last(tmp_path: Path, step: int, is_told: bool) -> None:
    output = io.StringIO()
    best = Best("validation/pass@4", 0.875, step, f"checkpoints/step-{step:06d}")
    (tmp_path / "best.json").write_text(json.dumps(asdict(best)))
    summary = Summary(0.25, 0.9, 0.1, 0.8, 1e-9, 10, 60.0, 1000, 100.0)
    print_ending(Console(file=output, width=200), tmp_path, summary, tmp_path / "report.html")
    line = f"best:   {tmp_path}/checkpoints/step-{step:06d}/model (validation/pass@4 0.875)"
    assert (line in output.getvalue()) == is_told
