"""The `async` benchmark: what could be had at best, and runs in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import overlap
from bench.harness import Options, UsageError
from bench.overlap import best_ratio, figures, speed_rows, take


@pytest.mark.parametrize(
    ("placement", "times", "ratio"),
    [
        ("standalone", (1.0, 1.0, 0.0), 2.0),
        ("standalone", (1.0, 1.0, 1.0), 2.0),  # two batches are under way
        ("standalone", (1.0, 1.0, 4.0), 1.5),  # learning alone takes 4 of 6
        ("standalone", (1.0, 0.0, 1.0), 2.0),
        ("hybrid", (1.0, 1.0, 0.0), 2.0),
        ("hybrid", (1.0, 1.0, 1.0), 1.5),  # writing and learning take turns
        ("hybrid", (1.0, 0.0, 1.0), 1.0),
    ],
)
def test_how_much_there_is_to_gain(placement: str, times: tuple[float, float, float], ratio: float) -> None:
    assert best_ratio(placement, *times) == pytest.approx(ratio)


def test_both_sides_are_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "NEW_TOKENS", 8)
    overlap.write_work(tmp_path)
    overlap.set_delay(tmp_path, 0.05)
    plan = overlap.Plan(num_rounds=1, num_steps=3, num_warm=1, learning_steps=1, held_out=8)
    sides = {}
    for staleness in (0, 1):
        config = overlap.speed_config(tmp_path, "standalone", staleness, f"run-{staleness}", backend="local")
        reports = overlap.steps_of(config)
        sides[staleness] = [take(reports, plan)]
        reports.close()
    (row,) = speed_rows("standalone", sides, has_peer=True)
    assert row.peer_name == "staleness=0" and row.ours > 0 and row.ratio is not None
    assert speed_rows("standalone", sides, has_peer=False)[0].peer is None
    told = figures("standalone", sides, 0.05)
    json.dumps(told)
    assert told["reward_takes_s"] == 0.05 and told["best_possible_ratio"] >= 1
    assert told["oldest_token_age"] == 1
    assert told["step_s"]["staleness=0"] > 0.05  # it waits for the reward


def test_it_knows_no_other_peer() -> None:
    with pytest.raises(UsageError, match="known: staleness=0, none"):
        overlap.run(Options(peer="trl"))
