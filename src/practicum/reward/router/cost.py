"""What a request costs, as far as can be told before it is done; an average request costs about 1.

The first of these that a request has is believed: the header `x-practicum-cost` (any unit), the tokens it asks for
(`max_tokens` and its relatives, and a little for the prompt), the length of its body. Each kind is measured by its own
mean, and the kinds are held against each other by the time that their requests take.
"""

from __future__ import annotations

import re

from practicum.reward.router.heads import RequestHead

_MAX_TOKENS = re.compile(rb'"max_(?:completion_|new_)?tokens"\s*:\s*([0-9]{1,9})')
# A prompt's byte costs about this much of a token that is written: some four bytes a token, read a dozen times faster.
_TOKENS_PER_BYTE = 0.02
# A mean is that of all values at first; then older ones fade at this rate.
_RATE = 0.02
_NUM_PLAIN = 50
# Whatever a header says, no request costs less or more than this.
_LEAST, _MOST = 1e-3, 1e3


class Kind:
    """One way to tell costs: the mean of the values it has told, and of the seconds that such requests took."""

    __slots__ = ("num_values", "scale", "seconds", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_values = 0
        self.seconds = 0.0
        self.scale = 1.0  # how long such requests take, where 1 is what all requests take


class Costs:
    def __init__(self) -> None:
        self._header, self._tokens, self._length = self._kinds = (Kind(), Kind(), Kind())

    def of(self, head: RequestHead, body: bytes) -> tuple[float, Kind]:
        """A new request's cost, and what told it."""
        if head.cost is not None:
            kind, value = self._header, head.cost
        elif b"_" in body and (found := _MAX_TOKENS.search(body)):
            kind, value = self._tokens, int(found[1]) + 1.0 + _TOKENS_PER_BYTE * len(body)
        else:
            kind, value = self._length, len(body) + 1.0
        num = kind.num_values = kind.num_values + 1
        kind.value += (value - kind.value) * (_RATE if num > _NUM_PLAIN else 1.0 / num)
        return min(max(value / kind.value * kind.scale, _LEAST), _MOST), kind

    def learn(self, kind: Kind, seconds: float) -> None:
        """A request of this kind took so long."""
        kind.seconds += (seconds - kind.seconds) * (_RATE if kind.seconds else 1.0)

    def tick(self) -> None:
        """Hold the kinds against each other."""
        known = [kind for kind in self._kinds if kind.seconds]
        total = sum(kind.num_values for kind in known)
        mean = sum(kind.seconds * kind.num_values for kind in known) / total if total else 0.0
        for kind in known:
            kind.scale = kind.seconds / mean
