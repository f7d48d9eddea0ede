"""What a request costs, as far as can be told before it is done; an average request costs about 1.

The first of these that a request has is believed: the header `x-practicum-cost` (any unit), the tokens it asks for
(`max_tokens` and its relatives, and a little for the prompt), the length of its body. Each kind is measured by its own
mean, and the kinds are held against each other by the time that their requests take.
"""

from __future__ import annotations

import re

from practicum.reward.router.heads import RequestHead

_MARK = b'"max_'
_MAX_TOKENS = re.compile(rb'"max_(?:completion_|new_)?tokens"\s*:\s*([0-9]{1,9})')
# A prompt's byte costs about this much of a token that is written: some four bytes a token, read a dozen times faster.
_TOKENS_PER_BYTE = 0.02
# A mean is that of all values at first, and then fades at this rate.
_RATE = 0.02


class _Mean:
    __slots__ = ("_num", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        self.value += (value - self.value) * max(1.0 / self._num, _RATE)


class Kind:
    """One way to tell costs."""

    __slots__ = ("scale", "seconds", "values")

    def __init__(self) -> None:
        self.values = _Mean()
        self.seconds = _Mean()
        self.scale = 1.0  # how long such requests take, where 1 is what all requests take


class Costs:
    def __init__(self) -> None:
        self._header, self._tokens, self._length = Kind(), Kind(), Kind()
        self._seconds = _Mean()

    def of(self, head: RequestHead, body: bytes) -> tuple[float, Kind]:
        """A new request's cost, and what told it."""
        if head.cost is not None:
            kind, value = self._header, head.cost
        elif _MARK in body and (found := _MAX_TOKENS.search(body)):
            kind, value = self._tokens, int(found[1]) + 1.0 + _TOKENS_PER_BYTE * len(body)
        else:
            kind, value = self._length, len(body) + 1.0
        kind.values.add(value)
        return value / kind.values.value * kind.scale, kind

    def learn(self, kind: Kind, seconds: float) -> None:
        """A request of this kind took so long."""
        self._seconds.add(seconds)
        kind.seconds.add(seconds)
        if self._seconds.value:
            kind.scale = kind.seconds.value / self._seconds.value
