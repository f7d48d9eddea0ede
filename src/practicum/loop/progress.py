"""The display of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from practicum.loop.metrics import StepReport
from practicum.loop.run_folder import checkpoint_name, read_best
from practicum.loop.summary import Summary, comparisons

_PLAIN_LINES_EVERY_S = 10.0
PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}


class Progress:
    """A display that shows each step. `with Progress(console) as progress: progress.show(step)`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._accuracy: float | None = None
        self._durations: list[float] = []
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, step: StepReport) -> None:
        self._accuracy = self._accuracy if step.accuracy is None else step.accuracy
        self._durations = [*self._durations[-49:], step.metrics["time/step_s"]]
        if self._live:
            self._live.update(self._table(step))
        elif self._is_due(step):
            self._last_line = time.monotonic()
            self._console.print("  ".join(f"{name} {value}" for name, value in self._columns(step)), **PLAIN)

    def _is_due(self, step: StepReport) -> bool:
        noteworthy = step.number in (1, step.num_steps) or step.accuracy is not None
        return noteworthy or time.monotonic() - self._last_line >= _PLAIN_LINES_EVERY_S

    def _columns(self, step: StepReport) -> list[tuple[str, str]]:
        left = (step.num_steps - step.number) * sum(self._durations) / len(self._durations)
        return [
            ("step", f"{step.number}/{step.num_steps}"),
            ("reward", f"{step.reward:.3f}"),
            ("held-out", "-" if self._accuracy is None else f"{self._accuracy:.3f}"),
            ("KL(rollout|trainer)", f"{step.kl:.1e}"),
            ("tokens/s", f"{step.tokens_per_s:,.0f}"),
            ("left", str(timedelta(seconds=int(left)))),
        ]

    def _table(self, step: StepReport) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(*(f"[dim]{name}[/]" for name, _ in self._columns(step)), "")
        bar = ProgressBar(total=step.num_steps, completed=step.number, width=24)
        table.add_row(*(value for _, value in self._columns(step)), bar)
        return table


def print_ending(console: Console, run_dir: Path, summary: Summary, report: Path) -> None:
    """Print accuracy before and after, three answers side by side, and where the rest is."""
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        console.print(
            f"held-out accuracy: {summary.accuracy_before:.3f} before, {summary.accuracy_after:.3f} after "
            f"{summary.steps} steps ({summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s)",
            **PLAIN,
        )
    else:
        console.print(
            f"reward: {summary.reward_first:.3f} in the first step, {summary.reward_last:.3f} in the last", **PLAIN
        )
    found = comparisons(run_dir, summary.steps)[:3]
    if found:
        table = Table("held-out question", "expected", "before", "after", box=None, padding=(0, 3, 0, 0))
        for c in found:
            table.add_row(
                Text(_one_line(c.question)),
                Text(_one_line(c.expected)),
                _judged(c.before, c.correct_before),
                _judged(c.after, c.correct_after),
            )
        console.print(table)
    model = run_dir / "checkpoints" / checkpoint_name(summary.steps) / "model"
    console.print(f"report: {report}\nmodel:  {model}", **PLAIN)
    best = read_best(run_dir)
    if best is not None and best.step != summary.steps:
        console.print(f"best:   {run_dir / best.checkpoint / 'model'} ({best.metric} {best.value:.3f})", **PLAIN)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _judged(answer: str, correct: bool) -> Text:
    return Text(f"{_one_line(answer)} {'✓' if correct else '✗'}", style="green" if correct else "red")
