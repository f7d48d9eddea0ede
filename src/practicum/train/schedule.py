"""Learning-rate schedules: pure functions of how far the run is."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def lr_factor(schedule: str, update: int, num_updates: int, num_warmup: int) -> float:
    """Return the factor of the learning rate for update number `update` (from 0): a linear rise, then the schedule."""
    if update < num_warmup:
        return (update + 1) / (num_warmup + 1)
    done = (update - num_warmup) / max(1, num_updates - num_warmup)
    return SCHEDULES[schedule](min(1.0, done))
