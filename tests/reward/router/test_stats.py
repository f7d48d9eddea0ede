from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.router.stats import BOUNDS_S, Quantile, Stats


def lognormal(num: int, median: float = 1.0, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [median * math.exp(rng.gauss(0.0, 1.0)) for _ in range(num)]


def quantile_of(values: list[float]) -> Quantile:
    quantile = Quantile()
    for value in values:
        quantile.add(value)
    return quantile


@given(st.lists(st.floats(1e-6, 1e6), min_size=50, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_is_never_too_small_and_at_most_15_percent_too_large(values: list[float], share: float) -> None:
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile_of(values).value(share)
    assert found is not None and exact * 0.999 <= found <= exact * 1.15


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("median", [1e-3, 1.0, 500.0])
def test_a_quantile_of_many_values(median: float, share: float) -> None:
    values = lognormal(20_000, median)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile_of(values).value(share)
    assert found == pytest.approx(exact, rel=0.25)  # a step of 15 %, and chance: only the latest thousand count


def test_a_quantile_follows_when_everything_becomes_slower_or_faster() -> None:
    quantile = quantile_of(lognormal(3000))
    for median in (20.0, 0.05):
        for value in lognormal(3000, median, seed=1):
            quantile.add(value)
        assert quantile.value(0.5) == pytest.approx(median, rel=0.25)


def test_a_quantile_of_few_values_is_not_known() -> None:
    assert Quantile().value(0.5) is None
    assert quantile_of([1.0] * 49).value(0.5) is None
    assert quantile_of([1.0] * 50).value(0.5) == pytest.approx(1.0)


def test_no_time_at_all_is_a_value_too() -> None:
    found = quantile_of([0.0] * 60).value(0.5)
    assert found is not None and 0.0 < found < 1e-6


def test_each_latency_is_counted_in_its_bucket() -> None:
    stats = Stats()
    for latency_s in (0.0005, 0.001, 0.0011, 0.9, 1.0, 599.0, 601.0):
        stats.answered(200, latency_s)
    counts = dict(zip([*BOUNDS_S, math.inf], stats.latencies, strict=True))
    assert {bound: num for bound, num in counts.items() if num} == {0.001: 2, 0.0025: 1, 1.0: 2, 600.0: 1, math.inf: 1}
    assert stats.seconds == pytest.approx(1201.9026)


@given(st.lists(st.tuples(st.sampled_from([200, 404, 500]), st.floats(0.0, 1000.0)), max_size=50))
def test_nothing_is_lost_in_counting(answers: list[tuple[int, float]]) -> None:
    stats = Stats()
    for status, latency_s in answers:
        stats.answered(status, latency_s)
    assert sum(stats.latencies) == sum(stats.statuses.values()) == stats.num_answered == len(answers)
    for index, bound in enumerate(BOUNDS_S):
        assert sum(stats.latencies[: index + 1]) == sum(latency_s <= bound for _, latency_s in answers)


def test_refusals_are_counted_by_reason() -> None:
    stats = Stats()
    for code in ("queue_full", "bad_request", "queue_full"):
        stats.refused(code)
    assert stats.refusals == {"queue_full": 2, "bad_request": 1}
    assert stats.num_answered == 0
