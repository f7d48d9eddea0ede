from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from practicum.loop.summary import comparisons, write_summary


def step(number: int, **more: float) -> dict[str, Any]:
    times = {"time/step_s": 2.0, "time/tokens_per_s": 50.0}
    return {"step": number, "reward/mean": number / 10, "rollout/kl": number * 1e-9, **times, **more}


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_summary_tells_before_after_and_speed(tmp_path: Path) -> None:
    before = {"step": 0, "validation/accuracy": 0.3, "time/validation_s": 1.0}
    write(tmp_path, [before, step(1), step(2, **{"validation/accuracy": 0.8, "time/validation_s": 1.0})])
    summary = write_summary(tmp_path)
    assert (summary.accuracy_before, summary.accuracy_after, summary.steps) == (0.3, 0.8, 2)
    assert (summary.seconds, summary.tokens, summary.tokens_per_s) == (6.0, 200, 50.0)
    assert summary.largest_kl == 2e-9
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy_after"] == 0.8


def test_without_validation_there_is_no_accuracy(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    summary = write_summary(tmp_path)
    assert summary.accuracy_before is None and summary.accuracy_after is None


def test_what_was_learnt_comes_first(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    for number, scores in ((0, [1, 0, 0]), (5, [1, 0, 1])):
        rows = [{"question": f"q{i}", "expected": 7, "answer": f"a{i}", "score": s} for i, s in enumerate(scores)]
        path = tmp_path / "validation" / f"step-{number:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [c.question for c in comparisons(tmp_path, 5)] == ["q2", "q0", "q1"]


def test_an_answer_is_right_if_the_validation_says_so(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    for number, right in ((0, False), (5, True)):
        row = {"question": "q", "expected": 7, "answer": "a", "score": 0.3 + number / 10, "right": right}
        (tmp_path / "validation" / f"step-{number:06d}.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = comparisons(tmp_path, 5)
    assert (found.correct_before, found.correct_after) == (False, True)
