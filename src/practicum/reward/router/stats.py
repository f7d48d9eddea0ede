"""What is counted while requests pass. Plain numbers here; metrics.py lays them out for Prometheus when asked."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class Stats:
    __slots__ = ("abandoned", "cut", "hedges", "latencies", "refusals", "retries", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}  # answers of workers that were passed on
        self.latencies = [0] * (len(BOUNDS_S) + 1)  # of these, up to each bound and beyond
        self.seconds = 0.0
        self.refusals: Counter[str] = Counter()  # answers of the router's own, by reason
        self.retries = 0
        self.hedges = 0
        self.abandoned = 0  # the client hung up
        self.cut = 0  # a worker failed in the middle of its answer

    def answered(self, status: int, latency_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies[bisect_left(BOUNDS_S, latency_s)] += 1
        self.seconds += latency_s

    def refused(self, code: str) -> None:
        self.refusals[code] += 1

    @property
    def num_answered(self) -> int:
        return sum(self.statuses.values())


class Quantile:
    """A quantile of recent values, right to about a tenth: counts in steps of a fifth of an octave, halved now and
    then."""

    _STEPS_PER_OCTAVE = 5
    _WINDOW = 1000
    _ENOUGH = 50

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, value: float) -> None:
        step = math.ceil(math.log2(max(value, 1e-9)) * self._STEPS_PER_OCTAVE)
        self._counts[step] = self._counts.get(step, 0.0) + 1.0
        self._total += 1.0
        if self._total >= self._WINDOW:
            self._counts = {key: count / 2.0 for key, count in self._counts.items() if count > 0.1}
            self._total = sum(self._counts.values())

    def value(self, quantile: float) -> float | None:
        """None while too few values are known."""
        if self._total < self._ENOUGH:
            return None
        left = quantile * self._total
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0.0:
                break
        return float(2.0 ** (step / self._STEPS_PER_OCTAVE))
