"""What grading a sample is expected to take, learnt from the samples of the same data source before it."""

from __future__ import annotations

from practicum.types import Sample

_NEWEST_COUNTS = 0.05
_UNKNOWN_S_PER_TOKEN = 1e-3  # it may be dear, so all workers get some of it
_LEAST_S = 1e-7  # nothing is free: what were would all go to one worker


class ExpectedCosts:
    def __init__(self) -> None:
        self._s_per_token: dict[str, float] = {}

    def expected(self, sample: Sample) -> float:
        """Seconds, in proportion to the length of the answer."""
        return self._s_per_token.get(sample.prompt.data_source, _UNKNOWN_S_PER_TOKEN) * _size(sample)

    def learn(self, sample: Sample, seconds: float) -> None:
        source = sample.prompt.data_source
        now = max(seconds, _LEAST_S) / _size(sample)
        before = self._s_per_token.get(source)
        self._s_per_token[source] = now if before is None else before + _NEWEST_COUNTS * (now - before)


def _size(sample: Sample) -> int:
    """A little of the cost is there for the shortest answer too."""
    return 16 + len(sample.token_ids)
