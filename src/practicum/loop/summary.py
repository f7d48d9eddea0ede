"""The end of a run in a few numbers and answers, all taken from its folder, so that a resumed run tells the whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from practicum.loop.run_folder import read_metrics, read_validation, write_durably


@dataclass(frozen=True, slots=True)
class Summary:
    """Accuracies are mean scores on held-out prompts, None where nothing was validated."""

    accuracy_before: float | None
    accuracy_after: float | None
    reward_first: float
    reward_last: float
    largest_kl: float
    steps: int
    seconds: float
    tokens: int
    tokens_per_s: float


def write_summary(run_dir: Path) -> Summary:
    rows = read_metrics(run_dir)
    steps = [row for row in rows if row["step"] > 0]
    validated = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    tokens = sum(row["time/step_s"] * row["time/tokens_per_s"] for row in steps)
    step_seconds = sum(row["time/step_s"] for row in steps)
    summary = Summary(
        accuracy_before=validated[0] if validated and rows[0]["step"] == 0 else None,
        accuracy_after=validated[-1] if validated and "validation/accuracy" in rows[-1] else None,
        reward_first=steps[0]["reward/mean"],
        reward_last=steps[-1]["reward/mean"],
        largest_kl=max(row["rollout/kl"] for row in steps),
        steps=len(steps),
        seconds=step_seconds + sum(row.get("time/validation_s", 0.0) for row in rows),
        tokens=round(tokens),
        tokens_per_s=tokens / step_seconds,
    )
    write_durably(run_dir / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
    return summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """One held-out question as answered before and after."""

    question: str
    expected: str
    before: str
    after: str
    correct_before: bool
    correct_after: bool


def comparisons(run_dir: Path, last_step: int) -> list[Comparison]:
    """Return held-out questions answered before and after, those that were learnt first."""
    after = {row["question"]: row for row in read_validation(run_dir, last_step)}
    first = [row for row in read_validation(run_dir, 0) if row["question"] in after]
    found = [_compared(row, after[row["question"]]) for row in first]
    return sorted(found, key=lambda c: (not (c.correct_after and not c.correct_before), not c.correct_after))


def _compared(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    return Comparison(
        question=before["question"],
        expected=str(before["expected"]),
        before=before["answer"],
        after=after["answer"],
        correct_before=_is_right(before),
        correct_after=_is_right(after),
    )


def _is_right(row: dict[str, Any]) -> bool:
    return bool(row.get("right", (row["score"] or 0) > 0))  # runs of before did not say
