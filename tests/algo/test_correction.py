from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algo import CORRECTIONS, LEVELS, CorrectionFigures
from tests.algo.ragged import Answers, answers, assert_close, flat

LOG_PROBS = st.one_of(st.floats(-3, 0), st.sampled_from([-50.0, -1.0, 0.0]))


def slow_log_weights(level: str, batch: Answers) -> list[list[float]]:
    rows = []
    for row in batch.tokens:
        gaps = [p - q for p, q in row]
        if level == "token":
            rows.append(gaps)
        else:
            whole = sum(gaps) / (len(gaps) if gaps and level == "geometric" else 1)
            rows.append([whole] * len(gaps))
    return rows


def slow_weight(kind: str, weight: float, low: float, high: float) -> float:
    if kind == "truncated":
        return min(max(weight, low), high)
    return weight if low <= weight <= high else 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CORRECTIONS)
@given(batch=answers(LOG_PROBS, LOG_PROBS))
def test_weights_and_figures_follow_their_formulas(level: str, kind: str, batch: Answers) -> None:
    low, high = 0.3456, 3.456  # on which no weight falls but by intent
    sequences = torch.tensor(batch.sequences, dtype=torch.int64)
    log_weights = LEVELS[level](flat(batch.column(0)), flat(batch.column(1)), sequences)
    slow = [x for row in slow_log_weights(level, batch) for x in row]
    assert_close(log_weights, slow)
    raw = [math.exp(min(max(x, -80.0), 80.0)) for x in slow]
    weights, cut = CORRECTIONS[kind](log_weights, low=low, high=high)
    assert_close(weights, [slow_weight(kind, w, low, high) for w in raw])
    assert cut.tolist() == [not low <= w <= high for w in raw]

    figures = CorrectionFigures.of(log_weights, cut)
    if raw:
        assert figures.cut_share == pytest.approx(sum(not low <= w <= high for w in raw) / len(raw))
        assert figures.max_weight == pytest.approx(max(raw), rel=1e-6)
        assert figures.mean_weight == pytest.approx(sum(raw) / len(raw), rel=1e-6)
        effective = sum(raw) ** 2 / sum(w * w for w in raw)
        assert figures.effective_share == pytest.approx(effective / len(raw), rel=1e-6)
    else:
        assert (figures.cut_share, figures.mean_weight, figures.effective_share) == (0.0, 1.0, 1.0)


def test_figures_of_parts_combine_to_those_of_the_whole() -> None:
    torch.manual_seed(0)
    log_weights = torch.randn(20, dtype=torch.float64)
    _, cut = CORRECTIONS["masked"](log_weights)
    whole = CorrectionFigures.of(log_weights, cut)
    parts = [CorrectionFigures.of(log_weights[s], cut[s]) for s in (slice(0, 3), slice(3, 3), slice(3, 20))]
    together = CorrectionFigures.combined(parts)
    assert together.effective_share == pytest.approx(whole.effective_share)
    assert (together.cut_share, together.max_weight) == (whole.cut_share, whole.max_weight)
    assert CorrectionFigures.combined([]).effective_share == 1.0


def test_the_same_policy_is_left_alone_and_figures_tell_when_it_is_not() -> None:
    log_probs, sequences = -torch.rand(50), torch.zeros(50, dtype=torch.int64)
    other = log_probs.clone()
    other[7] -= 6  # the rollout thought one token e^6 times less likely
    for rollout, share, cut_share in ((log_probs, 1.0, 0.0), (other, 0.024, 0.02)):
        log_weights = LEVELS["token"](log_probs, rollout, sequences)
        weights, cut = CORRECTIONS["masked"](log_weights)
        figures = CorrectionFigures.of(log_weights, cut)
        assert figures.effective_share == pytest.approx(share, abs=0.002)
        assert figures.cut_share == pytest.approx(cut_share)
        assert (weights == 1).sum() == 50 - cut.sum()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("gap", [-50.0, 50.0, 1e5, -1e5])
def test_extreme_gaps_are_finite(level: str, kind: str, gap: float) -> None:
    log_probs = torch.full((40,), -1.0, requires_grad=True)
    log_weights = LEVELS[level](log_probs, log_probs.detach() - gap, torch.zeros(40, dtype=torch.int64))
    weights, cut = CORRECTIONS[kind](log_weights)
    assert not weights.requires_grad
    assert weights.isfinite().all()
    figures = CorrectionFigures.of(log_weights, cut)
    assert math.isfinite(figures.max_weight) and figures.effective_share == pytest.approx(1.0)
