"""`report.html`: the run's curves and answers in one file that needs nothing else to be read."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.loop.metrics import PHASE_SHARE
from practicum.loop.run_folder import Best, read_best, read_metrics, write_durably
from practicum.loop.summary import Comparison, Summary, comparisons

Points = list[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 460, 220, 56, 28, 10, 12
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d")
_IDLE_COLOUR = "#9ca3af"
_MOST_COLUMNS = 200  # of a stacked chart: more are narrower than they can be seen


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: a title, and for each line its label and the metric it shows."""

    title: str
    lines: tuple[tuple[str, str], ...]
    log_scale: bool = False


CHARTS = (
    Chart("Learning", (("reward (training)", "reward/mean"), ("accuracy (held out)", "validation/accuracy"))),
    Chart("KL(rollout | trainer) per token", (("KL", "rollout/kl"),), log_scale=True),
    Chart("Routing: tokens x layers that the live router would send elsewhere", (("share", "replay/disagreement"),)),
    Chart("Routing: tokens x layers that rollout and trainer route apart", (("share", "replay/rollout_disagreement"),)),
    Chart(
        "KL(rollout | trainer) with and without router replay",
        (("with", "replay/kl_with"), ("without", "replay/kl_without")),
        log_scale=True,
    ),
    Chart("Router replay: tokens without a record", (("share", "replay/unknown_share"),)),
    Chart("Entropy of the policy", (("nats per token", "actor/entropy"),)),
    Chart("Gradient norm before clipping", (("norm", "actor/grad_norm"),)),
    Chart("Answer length", (("tokens", "rollout/answer_tokens"),)),
)


def _validation_charts(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """Return charts of the figures a run has: they depend on the number of answers and on the datasets."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("validation/")))
    charts = []
    for figure, meaning in (("pass", "one of k answers is right"), ("maj", "the majority of k answers is right")):
        ks = sorted(int(name.rpartition("@")[2]) for name in names if re.fullmatch(rf"validation/{figure}@\d+", name))
        lines = tuple((f"{figure}@{k}", f"validation/{figure}@{k}") for k in ks)
        if ks and ks[-1] > 1:
            charts.append(Chart(f"{figure}@k on held-out prompts: {meaning}", lines))
    sources = [match for name in names if (match := re.fullmatch(r"validation/(.+)/accuracy", name))]
    charts.append(Chart("Accuracy (held out) by dataset", tuple((match[1], match[0]) for match in sources)))
    return charts


def write_report(run_dir: Path, summary: Summary, title: str) -> Path:
    """Draw the report of a run from its folder."""
    rows = read_metrics(run_dir)
    wanted = [CHARTS[0], *_validation_charts(rows), *CHARTS[1:]]
    charts = "".join(_figure(chart, rows) for chart in wanted) + _phases_figure(rows)
    answers = _routing(rows) + _answers(comparisons(run_dir, last_step=rows[-1]["step"])[:8])
    config = html.escape((run_dir / "config.yaml").read_text())
    page = _PAGE.format(
        title=html.escape(title),
        facts=_facts(summary, read_best(run_dir)),
        charts=charts,
        answers=answers,
        config=config,
        style=_STYLE,
    )
    path = run_dir / "report.html"
    write_durably(path, page)
    return path


def _facts(summary: Summary, best: Best | None) -> str:
    facts = [("steps", f"{summary.steps}"), ("minutes", f"{summary.seconds / 60:.1f}")]
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        facts.insert(0, ("held-out accuracy", f"{summary.accuracy_before:.2f} → {summary.accuracy_after:.2f}"))
    facts += [
        ("tokens written", f"{summary.tokens:,}"),
        ("tokens/s", f"{summary.tokens_per_s:,.0f}"),
        ("largest KL(rollout | trainer)", f"{summary.largest_kl:.1e}"),
    ]
    if best is not None:
        facts.append((f"best checkpoint, by {best.metric}", f"step {best.step}: {best.value:.3f}"))
    return "".join(f"<div><b>{value}</b><span>{html.escape(name)}</span></div>" for name, value in facts)


def _routing(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table, by layer, of what the live router would have chosen otherwise, and the size of the records."""
    prefix = "replay/disagreement/layer_"
    found: dict[int, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix):
                found.setdefault(int(name.removeprefix(prefix)), []).append(value)
    if not found:
        return ""
    sizes = [row["replay/bytes_per_token"] for row in rows if "replay/bytes_per_token" in row]
    takes = f" The records take {sizes[-1]:.1f} bytes a token." if sizes else ""
    lines = "".join(
        f"<tr><td>{layer}</td><td>{sum(own) / len(own):.3%}</td><td>{max(own):.3%}</td><td>{own[-1]:.3%}</td></tr>"
        for layer, own in sorted(found.items())
    )
    head = "<tr><th>layer</th><th>mean of the run</th><th>largest</th><th>last step</th></tr>"
    what = f"<p>Tokens that the live router would have sent elsewhere.{takes}</p>"
    return f"<h2>Router replay</h2>{what}<table>{head}{lines}</table>"


def _answers(found: Sequence[Comparison]) -> str:
    if not found:
        return ""
    mark = {True: "right", False: "wrong"}
    rows = "".join(
        f"<tr><td>{html.escape(c.question)}</td><td>{html.escape(c.expected)}</td>"
        f'<td class="{mark[c.correct_before]}">{html.escape(c.before)}</td>'
        f'<td class="{mark[c.correct_after]}">{html.escape(c.after)}</td></tr>'
        for c in found
    )
    head = "<tr><th>held-out question</th><th>expected</th><th>before</th><th>after</th></tr>"
    return f"<h2>Answers before and after</h2><table>{head}{rows}</table>"


def _figure(chart: Chart, rows: Sequence[dict[str, Any]]) -> str:
    lines = [(label, _points(rows, metric, chart.log_scale)) for label, metric in chart.lines]
    lines = [(label, points) for label, points in lines if points]
    if not lines:
        return ""
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    low, high = (min(ys), max(ys)) if chart.log_scale else (min(0.0, *ys), max(ys))
    high = high if high > low else low + 1
    scale = _Scale(min(xs), max(xs, default=1) if max(xs) > min(xs) else min(xs) + 1, low, high)
    colours = [colour for _, colour in zip(lines, itertools.cycle(_COLOURS), strict=False)]
    drawn = "".join(_line(points, scale, colour) for (_, points), colour in zip(lines, colours, strict=True))
    axes = _axes(scale, chart.log_scale)
    return _framed(chart.title, axes + drawn, [label for label, _ in lines], colours)


def _framed(title: str, drawn: str, labels: Sequence[str], colours: Sequence[str]) -> str:
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(label)}</span>'
        for label, colour in zip(labels, colours, strict=True)
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{drawn}</svg><p>{legend}</p></figure>'
    )


def _phases_figure(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds a step, its phases on top of each other: a column a step, or a column the mean of several."""
    steps = [row for row in rows if f"{PHASE_SHARE}idle" in row]
    if not steps:
        return ""
    names = dict.fromkeys(name for row in steps for name in row if name.startswith(PHASE_SHARE))
    phases = [*(name.removeprefix(PHASE_SHARE) for name in names if name != f"{PHASE_SHARE}idle"), "idle"]
    num_each = math.ceil(len(steps) / _MOST_COLUMNS)
    columns = [steps[i : i + num_each] for i in range(0, len(steps), num_each)]
    edges = [float(column[0]["step"]) for column in columns] + [float(steps[-1]["step"]) + 1]
    tops = [[0.0] * len(columns)]
    for phase in phases:
        means = [sum(row.get(f"time/{phase}_s", 0.0) for row in column) / len(column) for column in columns]
        tops.append([below + mean for below, mean in zip(tops[-1], means, strict=True)])
    scale = _Scale(edges[0], edges[-1], 0.0, max(max(tops[-1]), 1e-9))
    colours = [*itertools.islice(itertools.cycle(_COLOURS), len(phases) - 1), _IDLE_COLOUR]
    drawn = "".join(
        _stairs(edges, low, high, scale, colour) for low, high, colour in zip(tops[:-1], tops[1:], colours, strict=True)
    )
    shares = [sum(row.get(f"{PHASE_SHARE}{phase}", 0.0) for row in steps) / len(steps) for phase in phases]
    labels = [f"{phase} {share:.0%}" for phase, share in zip(phases, shares, strict=True)]
    return _framed("Seconds a step, by phase", _axes(scale, log_scale=False) + drawn, labels, colours)


def _stairs(edges: Sequence[float], low: Sequence[float], high: Sequence[float], scale: _Scale, colour: str) -> str:
    """The area between two lines of steps."""
    over = [scale.place(edge, y) for i, y in enumerate(high) for edge in edges[i : i + 2]]
    under = [scale.place(edge, y) for i, y in enumerate(low) for edge in edges[i : i + 2]]
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up in [*over, *reversed(under)])
    return f'<polygon points="{path}" fill="{colour}"/>'


def _points(rows: Sequence[dict[str, Any]], metric: str, log_scale: bool) -> Points:
    found = [(float(row["step"]), float(row[metric])) for row in rows if metric in row]
    if log_scale:
        return [(x, math.log10(y)) for x, y in found if y > 0]
    return found


@dataclass(frozen=True, slots=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / (self.x_high - self.x_low)
        up = (y - self.y_low) / (self.y_high - self.y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)


def _line(points: Points, scale: _Scale, colour: str) -> str:
    placed = [scale.place(x, y) for x, y in points]
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up in placed)
    dots = [f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}"/>' for across, up in placed]
    shown = "".join(dots) if len(dots) <= 40 else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{shown}'


def _axes(scale: _Scale, log_scale: bool) -> str:
    parts = []
    for y in _ticks(scale.y_low, scale.y_high):
        _, height = scale.place(scale.x_low, y)
        label = f"{10**y:.0e}" if log_scale else f"{y:g}"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{label}</text>')
    for x in _ticks(scale.x_low, scale.x_high):
        across, _ = scale.place(x, scale.y_low)
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between the two."""
    magnitude = 10.0 ** math.floor(math.log10(high - low))
    step = next(s * magnitude for s in (0.2, 0.5, 1.0, 2.0, 5.0) if (high - low) / (s * magnitude) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 980px; padding: 0 1rem; color: #1f2937 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.facts { display: flex; flex-wrap: wrap; gap: 1.6rem } .facts div { display: flex; flex-direction: column }
.facts b { font-size: 1.3rem } .facts span, figcaption, th { color: #6b7280 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 1rem; margin-top: 1.5rem }
figure { margin: 0 } figure p { margin: 0; font-size: 13px; padding-left: 56px }
figure p { display: flex; flex-wrap: wrap; gap: 0 1rem }
figure i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px }
svg line { stroke: #e5e7eb } svg text { font-size: 11px; fill: #6b7280 }
table { border-collapse: collapse } td, th { padding: .25rem .9rem .25rem 0; text-align: left }
td { font-family: ui-monospace, monospace } .right { color: #059669 } .wrong { color: #dc2626 }
pre { background: #f3f4f6; padding: 1rem; overflow: auto; font-size: 13px }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1><div class="facts">{facts}</div>
<div class="charts">{charts}</div>{answers}
<h2>Config</h2><pre>{config}</pre></body></html>
"""
