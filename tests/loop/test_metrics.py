from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from practicum.data import pack
from practicum.loop.metrics import StepReport, Stopwatch, conversation_metrics, rollout_metrics, update_metrics
from practicum.loop.pipeline import trajectories_of
from practicum.train import UpdateStats
from practicum.types import Score, Trajectory
from tests.samples import graded_group, make_group, make_sample


def test_means_are_over_graded_samples_only() -> None:
    answers = [make_group(reward, answer=n) for n, reward in ((1, 1.0), (2, None), (3, 0.0))]
    metrics = rollout_metrics(trajectories_of(answers))
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/failed_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/answer_tokens"] == 2.0


def test_what_tools_said_counts_for_nothing() -> None:
    sample = make_sample(answer=4)
    said = np.array([True, False, False, True])
    log_probs = np.where(said, sample.log_probs, np.nan).astype(np.float32)
    talk = replace(sample, loss_mask=said, log_probs=log_probs, versions=np.where(said, 1, -1).astype(np.int32))
    metrics = rollout_metrics([Trajectory("1/0/0", 0, [talk], Score(1.0))])
    assert metrics["rollout/answer_tokens"] == 2.0
    assert all(np.isfinite(value) for value in metrics.values())
    learnt = pack([replace(talk, advantages=np.ones(4, np.float32))])
    assert learnt.rollout_log_probs.tolist() == sample.log_probs[said].tolist()


def test_conversations_tell_how_long_they_are_and_how_often_their_tools_fail() -> None:
    counts = [
        {"turns": 4, "calls_ok": 3, "control_tokens": 6},
        {"turns": 3, "calls_ok": 3, "calls_raised": 1},
        {"turns": 2},
    ]
    counts += [{"turns": 1, "calls_timeout": 1}]
    trajectories = [Trajectory(f"1/0/{n}", n, counts=own) for n, own in enumerate(counts)]
    trajectories[3].add(replace(make_sample(), finish_reason="error"))
    metrics = conversation_metrics(trajectories)
    assert metrics == {
        "agent/turns": 2.5,
        "agent/calls": 2.0,
        "agent/failed_calls_share": 0.25,
        "agent/failed_share": 0.25,
        "agent/control_tokens": 1.5,
    }
    assert all(value == 0.0 for value in conversation_metrics([]).values())


def test_control_tokens_that_answers_spell_are_counted() -> None:
    samples = [replace(make_sample(answer=2), text=text) for text in ("4<|im_end|><|im_start|>user", "4")]
    metrics = rollout_metrics([Trajectory(f"1/0/{n}", n, [own], Score(1.0)) for n, own in enumerate(samples)])
    assert metrics["rollout/control_tokens"] == 1.0


def test_parts_of_a_score_have_metrics_of_their_own() -> None:
    scores = [Score(1.0, parts={"style": 0.5}), Score(1.0, parts={"style": 1.0, "length": 3})]
    metrics = rollout_metrics(graded_group(*(("", score) for score in scores)).trajectories)
    assert metrics["reward/part/style"] == 0.75
    assert metrics["reward/part/length"] == 3.0


def test_sums_over_ranks_become_means_over_tokens() -> None:
    ranks = [
        UpdateStats(num_tokens=1, loss=4.0, rollout_kl=1.0, rollout_gap=0.1, grad_norm=2.0, lr=0.5),
        UpdateStats(num_tokens=3, loss=0.0, rollout_kl=3.0, rollout_gap=0.4, grad_norm=2.0, lr=0.5),
    ]
    metrics = update_metrics(UpdateStats.combined(ranks))
    assert metrics["actor/loss"] == 1.0
    assert metrics["rollout/kl"] == 1.0
    assert metrics["rollout/max_log_prob_diff"] == 0.4
    assert metrics["actor/grad_norm"] == 2.0


def test_the_stopwatch_adds_up_phases() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.phase("rollout"):
            time.sleep(0.01)
    metrics = watch.metrics(num_tokens=100)
    assert 0.02 <= metrics["time/rollout_s"] <= metrics["time/step_s"]
    assert metrics["time/tokens_per_s"] == pytest.approx(100 / metrics["time/step_s"], rel=0.01)


def test_phases_and_what_is_idle_make_up_the_step() -> None:
    watch = Stopwatch()
    for phase in ("rollout", "update"):
        with watch.phase(phase):
            time.sleep(0.01)
    time.sleep(0.01)
    metrics = watch.metrics(num_tokens=1)
    assert metrics["time/idle_s"] >= 0.01
    phases = ("rollout", "update", "idle")
    assert sum(metrics[f"time/{name}_s"] for name in phases) == pytest.approx(metrics["time/step_s"])
    assert sum(metrics[f"time/share/{name}"] for name in phases) == pytest.approx(1.0)


def test_phases_that_overlap_leave_nothing_idle() -> None:
    watch = Stopwatch()
    with watch.phase("rollout"), watch.phase("reward"):
        time.sleep(0.01)
    assert watch.metrics(num_tokens=1)["time/idle_s"] == 0.0


def test_a_report_names_what_people_ask_for() -> None:
    report = StepReport(1, 2, {"reward/mean": 0.5, "rollout/kl": 0.1, "time/tokens_per_s": 3.0})
    assert (report.reward, report.kl, report.tokens_per_s, report.accuracy) == (0.5, 0.1, 3.0, None)
