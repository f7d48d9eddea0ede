"""A cost measured on groups of several sizes: is it a straight line, and how steep?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds by size, for two sizes or more."""

    seconds: Mapping[int, float]

    @property
    def slope(self) -> float:
        """Seconds that one more costs: the slope of the straight line nearest to all points."""
        return statistics.linear_regression(*self._points()).slope

    @property
    def r_squared(self) -> float:
        """The share of the variation that the straight line explains: 1 when all points lie on it."""
        return statistics.correlation(*self._points()) ** 2

    @property
    def worst_growth(self) -> float:
        """The largest factor by which the cost of each one grows from a size to the next: above 1 is worse than linear.

        R² alone would not do, since on sizes that differ this much a mild curve hides behind the largest.
        """
        each = [seconds / size for size, seconds in sorted(self.seconds.items())]
        return max(larger / smaller for smaller, larger in pairwise(each))

    def as_dict(self) -> dict[str, Any]:
        """For the environment block of a result file."""
        return {
            "ms_by_size": {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(self.seconds.items())},
            "r_squared": round(self.r_squared, 4),
            "worst_growth_of_cost_per_worker": round(self.worst_growth, 3),
        }

    def _points(self) -> tuple[list[int], list[float]]:
        sizes = sorted(self.seconds)
        return sizes, [self.seconds[size] for size in sizes]
