from __future__ import annotations

from pathlib import Path

from practicum.demo.arithmetic import Problem
from practicum.demo.warmup import warm_up
from practicum.models import load_model, load_tokenizer


def test_it_stops_once_answers_would_be_right_often_enough(tmp_path: Path) -> None:
    problems = [Problem(i, i) for i in range(8)]
    seen: list[float] = []
    warm_up(
        tmp_path / "model",
        problems,
        seed=0,
        until_accuracy=0.2,
        wrong_share=0.25,
        max_steps=300,
        batch_size=8,
        on_step=lambda step, accuracy: seen.append(accuracy),
    )
    assert seen[-1] >= 0.2 > seen[0]
    assert len(seen) < 300
    assert load_model(str(tmp_path / "model")) and load_tokenizer(str(tmp_path / "model"))
