"""What to expect of work that is shared out: the average of what was seen, the newest counting most."""

from __future__ import annotations

_NEWEST_COUNTS = 0.05


class MovingAverages:
    """Moving averages by key, such as the source of a prompt."""

    def __init__(self) -> None:
        self._averages: dict[str, float] = {}

    def get(self, key: str, default: float) -> float:
        """Return the average; `default` where nothing has been seen."""
        return self._averages.get(key, default)

    def add(self, key: str, value: float) -> None:
        before = self._averages.get(key, value)
        self._averages[key] = before + _NEWEST_COUNTS * (value - before)
