"""What is learned from completed requests: how fast a worker is, how much it does at once, and what a request costs.

A worker is modelled as a row of slots that each do a unit of cost in `seconds_per_cost`; further requests wait.

- *alone*: how long a unit of cost takes when nothing is in its way. It is known from requests that came when no more
  were here than have been seen to run at once: when one completes before earlier ones, those ran beside it.
- *slots*: as long as requests take about as long as alone, however many there are, no limit is in sight. Once they take
  longer, the cost that the worker completes in a second, times how long a unit takes alone, is what it does at once.
- *seconds_per_cost*: the time its slots were busy, divided by the cost completed meanwhile. Time counts while it
  passes, so a worker that hangs looks slower at every tick, though it completes nothing.
- *slowdown*: how much longer requests take than they usually do here, beyond what more of them explain.

Completions are added up as they come; what follows from them is worked out at each tick. Evidence fades with each
completion and with time. What is left of it is mixed with the average of all workers: a worker about which nothing is
known counts as average, and so one that was slow long ago is tried again.

An average request costs about 1. The first of these that a request has sets its cost: the header `x-practicum-cost`
(any unit), the tokens it asks for (`max_tokens` and its relatives, and a little for the prompt), the length of its
body. Each source is measured by its own mean, and the sources are compared by the time that their requests take.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from practicum.reward.router.http1 import RequestHead

# Completions after which evidence has faded to a third. Twice as many make no difference to the makespan.
WINDOW = 48
# Average requests' worth of belief in the average worker.
PRIOR = 2.0
# Requests must take this many times longer than alone before a limit is in sight.
QUEUEING = 1.5
_FADE = 1.0 - 1.0 / WINDOW
_MEMORY = 64  # completions for which the most that ran at once are remembered, at least
_ENOUGH = 20  # completions after which it is known what is usual
_RECENT = 1.0 / 8.0  # share of the latest completion in what is recent
_MAX_OUTLIER = 10.0  # a single request counts as at most this many times slower than usual


@dataclass(slots=True)
class PoolAverage:
    """The average of all workers of a router."""

    cost: float = 1.0
    seconds_per_cost: float = 1.0
    latency_s: float = 0.0
    most_tried: int = 1  # requests at a time, of any worker

    def record(self, cost: float, latency_s: float) -> None:
        self.cost += 0.02 * (cost - self.cost)
        self.latency_s += 0.02 * (latency_s - self.latency_s)


class ThroughputEstimate:
    """How fast one worker is."""

    seconds_per_cost: float
    slots: int

    def __init__(self, average: PoolAverage, now: float) -> None:
        self._average = average
        self._since = now
        self._num_done = 0
        self._most = self._most_before = 1  # seen to run at once
        self._tried = self._tried_before = 1  # in flight at once
        self._alone: float | None = None  # seconds a unit of cost
        self.usual: float | None = None  # seconds that a unit of cost takes, waiting included
        self._usual_load = 0.0  # requests in flight meanwhile
        self.reset()

    def reset(self) -> None:
        """Start anew, as after a restart. What was usual is kept."""
        self._spent_s = 0.0  # by all requests together, faded
        self._on_s = 0.0  # with any request here, faded
        self._done = 0.0  # cost, faded
        self._recent = self.usual or 0.0
        self._recent_load = self._usual_load
        self._update()

    def record_time(self, now: float, num_in_flight: int) -> None:
        """Count the time since the last call, in which this many requests were in flight."""
        if num_in_flight:
            seconds = now - self._since
            self._spent_s += seconds * num_in_flight
            self._on_s += seconds
            if num_in_flight > self._tried:
                self._tried = num_in_flight
        self._since = now

    def record_completion(
        self, now: float, num_before: int, cost: float, latency_s: float, came_as: int, older: int | None
    ) -> None:
        """Count a completed request, one of `num_before` in flight. It came as the `came_as`th of those in flight then;
        `older` of those in flight now came before it, if they were counted."""
        seconds = now - self._since
        self._since = now
        self._spent_s = (self._spent_s + seconds * num_before) * _FADE
        self._on_s = (self._on_s + seconds) * _FADE
        self._done = (self._done + cost) * _FADE
        self._num_done += 1
        took = latency_s / cost
        if older is not None and older >= self._most:
            self._most = older + 1
        if came_as <= self._most or came_as <= self._most_before:
            self._alone = took if self._alone is None else self._alone + 0.05 * (took - self._alone)
        if self._num_done % _MEMORY == 0:
            self._most, self._most_before = 1, self._most
            self._tried, self._tried_before = num_before, self._tried
        self._compare(took, came_as)

    def record_error(self) -> None:
        """Count an error response as an average request's time in which nothing was done: a worker that fails at once
        must not look like a fast one, and be sent everything."""
        self._spent_s += self._average.latency_s
        self._on_s += self._average.latency_s

    def tick(self, now: float, num_in_flight: int) -> None:
        """Let evidence fade with time, and work out what follows from it."""
        latency_s = self._average.latency_s  # what is not in use is forgotten sooner: it may have changed unseen
        if not num_in_flight and self._done < 1e-6:  # nothing left to fade
            self._since = now
            self._update()
            return
        fade = math.exp(
            (self._since - now) / (max(5.0, 10.0 * latency_s) if num_in_flight else max(1.0, 5.0 * latency_s))
        )
        self.record_time(now, num_in_flight)
        self._spent_s *= fade
        self._on_s *= fade
        self._done *= fade
        self._update()

    @property
    def most_tried(self) -> int:
        return max(self._tried, self._tried_before)

    def slowdown(self, num_in_flight: int, silent: float) -> float:
        """Return how many times longer than usual requests take, beyond what more of them explain; or, if that is more,
        how long it has completed none: `silent` seconds per cost of one in flight. Silence counts half, since a few
        long requests in a row are not rare, and a quarter where more requests than usual may explain it."""
        if self.usual is None:
            return 1.0
        load = max(1.0, self._recent_load / self._usual_load, num_in_flight / self._usual_load)
        return max(self._recent / load, silent / 2.0 / min(load, 2.0)) / self.usual

    @property
    def evidence(self) -> tuple[float, float]:
        """The seconds its slots were busy and the cost completed, both faded."""
        return min(self._spent_s, self.slots * self._on_s), self._done

    def _update(self) -> None:
        average, alone, on_s, done = self._average, self._alone, self._on_s, self._done
        slots = self._most if self._most > self._most_before else self._most_before
        if alone is not None and on_s > 0.0 and self._spent_s > QUEUEING * alone * done:
            at_once = int(done / on_s * alone + 0.5)
        else:  # no limit in sight: there is room for more than was ever tried
            at_once = 2 * average.most_tried
        self.slots = slots = at_once if at_once > slots else slots
        busy_s = slots * on_s
        if busy_s > self._spent_s:
            busy_s = self._spent_s
        prior = PRIOR * average.cost
        self.seconds_per_cost = (busy_s + prior * average.seconds_per_cost) / (done + prior)

    def _compare(self, took: float, came_as: int) -> None:
        """Follow how long requests take: the recent figure quickly, the usual one slowly."""
        usual = self.usual
        if usual is None:
            rate = 1.0 / min(self._num_done, 8)
        else:
            rate = _RECENT
            took = min(took, _MAX_OUTLIER * usual)
        self._recent += (took - self._recent) * rate
        self._recent_load += (came_as - self._recent_load) * rate
        if usual is None:
            if self._num_done >= _ENOUGH:
                self.usual, self._usual_load = self._recent, self._recent_load
        elif self._recent < 2.0 * usual:  # what is far out of line must not become usual
            self.usual = usual + (self._recent - usual) * 0.01
            self._usual_load += (self._recent_load - self._usual_load) * 0.01


_MAX_TOKENS = re.compile(rb'"max_(?:completion_|new_)?tokens"\s*:\s*([0-9]{1,9})')
# A byte of the prompt costs about this much of a generated token: some four bytes a token, read a dozen times faster.
_TOKENS_PER_BYTE = 0.02
# A mean is that of all values at first; then older ones fade at this rate.
_RATE = 0.02
_NUM_PLAIN = 50
# No request costs less or more than this, whatever its header says.
_LEAST, _MOST = 1e-3, 1e3


@dataclass(slots=True, eq=False)
class CostSource:
    """One way to tell costs, with the mean of the values it gave and of the seconds that such requests took."""

    value: float = 0.0
    num_values: int = 0
    seconds: float = 0.0
    scale: float = 1.0  # how long such requests take, where 1 is what all requests take


class CostModel:
    """Tells what a request costs before it is sent."""

    def __init__(self) -> None:
        self._header, self._tokens, self._length = self._sources = (CostSource(), CostSource(), CostSource())

    def of(self, head: RequestHead, body: bytes) -> tuple[float, CostSource]:
        """Return a new request's cost, and its source."""
        if head.cost is not None:
            source, value = self._header, head.cost
        elif b"_" in body and (found := _MAX_TOKENS.search(body)):
            source, value = self._tokens, int(found[1]) + 1.0 + _TOKENS_PER_BYTE * len(body)
        else:
            source, value = self._length, len(body) + 1.0
        num = source.num_values = source.num_values + 1
        source.value += (value - source.value) * (_RATE if num > _NUM_PLAIN else 1.0 / num)
        return min(max(value / source.value * source.scale, _LEAST), _MOST), source

    def record(self, source: CostSource, seconds: float) -> None:
        """Count how long a request of this source took."""
        source.seconds += (seconds - source.seconds) * (_RATE if source.seconds else 1.0)

    def tick(self) -> None:
        """Compare the sources with each other."""
        known = [source for source in self._sources if source.seconds]
        total = sum(source.num_values for source in known)
        mean = sum(source.seconds * source.num_values for source in known) / total if total else 0.0
        for source in known:
            source.scale = source.seconds / mean
