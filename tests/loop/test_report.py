from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

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


def page_of(run_dir: Path, rows: list[dict[str, Any]]) -> str:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "config.yaml").write_text("{}")
    return write_report(run_dir, Summary(None, None, 0.1, 0.5, 1e-3, 5, 10.0, 100, 10.0), "run").read_text()


def figure(page: str, title: str) -> tuple[ElementTree.Element, list[str]]:
    """The drawing under a title and its legend."""
    found = page.partition(f"<figcaption>{title}")[2].partition("</figure>")[0]
    assert found, f"no figure {title}"
    drawn = ElementTree.fromstring("<svg" + found.partition("<svg")[2].partition("</svg>")[0] + "</svg>")
    return drawn, re.findall(r"</i>([^<]+)</span>", found)


def corners(shape: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in shape.attrib["points"].split())]


def test_each_k_has_a_curve_where_there_are_several_answers(tmp_path: Path) -> None:
    rows = [
        {"step": i, **{f"validation/pass@{k}": k / 20 + i / 100 for k in (1, 2, 4, 16)}, "validation/maj@16": i / 100}
        for i in range(4)
    ]
    page = page_of(tmp_path, rows)
    drawn, legend = figure(page, "pass@k on held-out prompts")
    assert legend == ["pass@1", "pass@2", "pass@4", "pass@16"]
    curves = [corners(line) for line in drawn.findall("polyline")]
    assert [len(curve) for curve in curves] == [4] * 4
    starts = [curve[0][1] for curve in curves]
    assert starts == sorted(starts, reverse=True)  # more answers, higher on the page
    assert figure(page, "maj@k on held-out prompts")[1] == ["maj@16"]
    assert "by dataset" not in page
    single = page_of(tmp_path, [{"step": i, "validation/pass@1": 0.5} for i in range(3)])
    assert "@k" not in single  # that is the accuracy again


def test_each_dataset_has_a_curve(tmp_path: Path) -> None:
    sources = [f"org/set-{i}" for i in range(11)]  # more than there are colours
    rows = [{"step": i, **{f"validation/{source}/accuracy": 0.5 for source in sources}} for i in range(3)]
    drawn, legend = figure(page_of(tmp_path, rows), "Accuracy (held out) by dataset")
    assert legend == sources and len(drawn.findall("polyline")) == 11


def profile(step: int, **seconds: float) -> dict[str, float]:
    total = sum(seconds.values())
    shares = {f"time/share/{name}": value / total for name, value in seconds.items()}
    return {"step": step, **{f"time/{name}_s": value for name, value in seconds.items()}, **shares}


def test_phases_are_stacked(tmp_path: Path) -> None:
    rows = [profile(i, rollout=2.0, update=1.0 + i, idle=0.5) for i in (1, 2)]
    drawn, legend = figure(page_of(tmp_path, [{"step": 0}, *rows]), "Seconds a step, by phase")
    assert [label.split()[0] for label in legend] == ["rollout", "update", "idle"]
    assert legend[0] == f"rollout {(2 / 4.5 + 2 / 5.5) / 2:.0%}"
    rollout, update, idle = (corners(area) for area in drawn.findall("polygon"))
    half = len(rollout) // 2
    assert update[half:] == rollout[:half][::-1]  # it stands on what is below
    assert idle[half:] == update[:half][::-1]
    one_second = (rollout[-1][1] - rollout[0][1]) / 2
    assert update[-1][1] - update[0][1] == pytest.approx(2 * one_second, abs=0.2)
    assert idle[-1][1] - idle[0][1] == pytest.approx(0.5 * one_second, abs=0.2)


def test_a_phase_of_some_steps_only_and_a_run_of_one_step_can_be_drawn(tmp_path: Path) -> None:
    drawn, legend = figure(page_of(tmp_path, [profile(1, rollout=1.0, idle=0.0)]), "Seconds a step, by phase")
    assert legend == ["rollout 100%", "idle 0%"] and len(drawn.findall("polygon")) == 2
    rows = [profile(1, rollout=1.0, idle=1.0), profile(2, rollout=1.0, looking=1.0, idle=0.0)]
    assert figure(page_of(tmp_path, rows), "Seconds a step, by phase")[1] == ["rollout 50%", "looking 25%", "idle 25%"]


def test_long_runs_are_drawn_in_few_columns(tmp_path: Path) -> None:
    rows = [profile(i, rollout=1.0 + (i % 2), idle=0.1) for i in range(1, 3001)]
    drawn, _ = figure(page_of(tmp_path, rows), "Seconds a step, by phase")
    area = drawn.find("polygon")
    assert area is not None and len(corners(area)) <= 4 * 200
