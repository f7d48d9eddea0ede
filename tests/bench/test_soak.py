"""The `soak` benchmark on few steps in one process: growth is counted, and figures that are wrong are found out."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import soak
from bench.harness import Options, UsageError
from bench.soak import DRIVER, HELD, HELPERS, LOG_PROBS, RAY, VALIDATION, WORKERS, Plan

PLAN = Plan(num_steps=4, settled=2, look_every=2, checkpoint_every=2)
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("soak")
    soak.prepare(made)
    usages = soak.soak(made, PLAN, backend="local")
    assert list(usages) == [2, 4] and all(usage[DRIVER, "rss"] > MIB for usage in usages.values())
    return made


def usage(**kinds: tuple[int, int, int]) -> soak.Usage:
    return Counter({(kind, what): held for kind, own in kinds.items() for what, held in zip(HELD, own, strict=True)})


def test_growth_is_that_since_the_run_has_settled() -> None:
    usages = {
        2: usage(driver=(100 * MIB, 10, 5), Ray=(50 * MIB, 7, 7)),
        4: usage(driver=(103 * MIB, 10, 7), Ray=(51 * MIB, 90, 7), workers=(MIB, 1, 1)),
    }
    assert [(row.metric, row.ours) for row in soak.memory_rows(usages, PLAN)] == [
        ("driver: RSS growth, MiB", 3.0),
        ("driver: more descriptors or threads", 2),
        ("Ray: RSS growth, MiB", 1.0),
    ]


def test_processes_are_told_apart_by_what_they_run() -> None:
    assert soak.kind_of(["ray::RayHost.call"]) == WORKERS
    assert soak.kind_of(["ray::IDLE"]) == soak.kind_of(["python", "/lib/ray/agent.py"]) == RAY
    assert soak.kind_of(["python", "watchdog.py"]) == soak.kind_of([]) == HELPERS


def test_what_a_run_has_logged_is_what_comes_out_anew(folder: Path) -> None:
    steps, drifts = soak.drifts_of(folder / "run", PLAN)
    assert steps == [1, 3]
    assert max(drifts.values()) < 1e-5
    metrics = {"reward/mean", "reward/std", "rollout/answer_tokens", "actor/entropy"}
    assert set(drifts) == metrics | {LOG_PROBS, VALIDATION}


def test_a_figure_that_is_off_and_weights_of_another_step_are_found_out(folder: Path) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    before = metrics.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    for row in rows:
        if row["step"] == 3:
            row["reward/mean"] += 0.25
        if row["step"] == 4:
            row["validation/accuracy"] += 0.5
    try:
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _, drifts = soak.drifts_of(folder / "run", PLAN)
        assert drifts["reward/mean"] == pytest.approx(0.25) and drifts[VALIDATION] == pytest.approx(0.5)
        assert drifts[LOG_PROBS] < 1e-5
    finally:
        metrics.write_text(before)
    from practicum.replay import Recording

    with Recording(folder / "samples.rec") as recording:
        samples = recording.samples(3)
    assert soak.computed_anew(samples, folder / "model")[1] > 1e-4  # those of the beginning, two updates earlier


def test_there_is_nobody_to_compare_with() -> None:
    with pytest.raises(UsageError, match="known"):
        soak.run(Options(peer="verl"))
