"""The built-in graders, by name."""

from __future__ import annotations

from collections.abc import Callable

from practicum.reward.graders.exact import exact
from practicum.types import Sample, Score

Grader = Callable[[Sample], Score]

GRADERS: dict[str, Grader] = {"exact": exact}
