from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from practicum.loop.report import _ticks, write_report
from practicum.loop.summary import Summary


def test_the_report_is_one_file_with_its_curves(tmp_path: Path) -> None:
    rows = [{"step": 0, "validation/accuracy": 0.25}] + [
        {"step": i, "reward/mean": i / 10, "rollout/kl": 10.0**-i, "actor/entropy": 0.5} for i in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("model: {path: <b>}")
    (tmp_path / "validation").mkdir()
    for step in (0, 5):
        answer = json.dumps({"question": "1<2?", "expected": "y", "answer": "y", "score": step / 5})
        (tmp_path / "validation" / f"step-{step:06d}.jsonl").write_text(answer + "\n")
    summary = Summary(0.25, 0.75, 0.1, 0.5, 1e-3, 5, 10.0, 100, 10.0)
    page = write_report(tmp_path, summary, "a <run>").read_text()
    assert "0.25 → 0.75" in page
    assert "&lt;b&gt;" in page and "1&lt;2?" in page and "a &lt;run&gt;" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    figures = page.split("<svg")[1:]
    assert len(figures) == 3  # charts without data are left out
    drawn = [ElementTree.fromstring("<svg" + figure.split("</svg>")[0] + "</svg>") for figure in figures]
    curve = drawn[0].find("polyline")
    assert curve is not None
    heights = [float(point.split(",")[1]) for point in curve.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True) and len(heights) == 5  # up the page as the reward rises


@pytest.mark.parametrize(("low", "high"), [(0, 0.887), (1, 250), (-12.9, -12.0), (0, 5.93), (0, 1e-9), (3, 3e6)])
def test_axes_are_labelled_with_a_few_round_numbers(low: float, high: float) -> None:
    ticks = _ticks(low, high)
    assert 3 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
