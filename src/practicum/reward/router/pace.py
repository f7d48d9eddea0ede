"""How fast a worker is and how much it does at once, learned from what it finishes.

A worker is taken for a row of slots that each do a unit of cost in `pace` seconds; what exceeds the slots waits there.

- *alone*: how long a unit of cost takes when nothing is in its way. Known from requests that came when no more were
  here than have been seen to run at once: when one is done before others that came earlier, those ran beside it.
- *slots*: as long as requests take about as long as alone, however many there are, no limit is in sight. Once they take
  longer, what the worker gets done in a second, times how long a unit takes alone, is what it does at once.
- *pace*: the time its slots were busy, divided by the cost that was done meanwhile. Time counts while it passes, so
  a worker that hangs looks slower at every tick, though it finishes nothing.

- *slowdown*: how much longer requests take than they usually do here, beyond what more of them explain.

Completions are added up as they come; what follows from them is worked out at each tick.

Evidence fades with each completion and with time. What is left of it is mixed with what all workers do on average:
a worker that nothing is known of counts as average, and so one that was slow long ago is tried again.
"""

from __future__ import annotations

import math

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


class Average:
    """What all workers of a router do on average."""

    __slots__ = ("cost", "latency_s", "most_tried", "pace")

    def __init__(self) -> None:
        self.cost = 1.0
        self.pace = 1.0
        self.latency_s = 0.0
        self.most_tried = 1  # requests at a time, of any worker

    def learn(self, cost: float, latency_s: float) -> None:
        self.cost += 0.02 * (cost - self.cost)
        self.latency_s += 0.02 * (latency_s - self.latency_s)


class Pace:
    __slots__ = (
        "_alone",
        "_average",
        "_done",
        "_most",
        "_most_before",
        "_num_done",
        "_on_s",
        "_recent",
        "_recent_load",
        "_since",
        "_spent_s",
        "_tried",
        "_tried_before",
        "_usual_load",
        "pace",
        "slots",
        "usual",
    )

    def __init__(self, average: Average, now: float) -> None:
        self._average = average
        self._since = now
        self._num_done = 0
        self._most = self._most_before = 1  # seen to run at once
        self._tried = self._tried_before = 1  # in flight at once
        self._alone: float | None = None  # seconds a unit of cost
        self.usual: float | None = None  # seconds that a unit of cost takes, waiting included
        self._usual_load = 0.0  # requests in flight meanwhile
        self.forget()

    def forget(self) -> None:
        """Start anew, as after a restart. What was usual is kept."""
        self._spent_s = 0.0  # by all requests together, faded
        self._on_s = 0.0  # with any request here, faded
        self._done = 0.0  # cost, faded
        self._recent = self.usual or 0.0
        self._recent_load = self._usual_load
        self._set()

    def passed(self, now: float, num_in_flight: int) -> None:
        """Since the last call this many were in flight."""
        if num_in_flight:
            seconds = now - self._since
            self._spent_s += seconds * num_in_flight
            self._on_s += seconds
            if num_in_flight > self._tried:
                self._tried = num_in_flight
        self._since = now

    def ended(
        self, now: float, num_before: int, cost: float, latency_s: float, came_as: int, older: int | None
    ) -> None:
        """A request is done, of `num_before` in flight. It had come as the `came_as`th of those in flight then; `older`
        of those in flight now came before it, if anyone has counted them."""
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

    def wasted(self) -> None:
        """An answer was a refusal. It counts as an average request's time in which nothing was done: a worker that
        refuses at once must not look like a fast one, and be sent everything."""
        self._spent_s += self._average.latency_s
        self._on_s += self._average.latency_s

    def tick(self, now: float, num_in_flight: int) -> None:
        latency_s = self._average.latency_s  # what is not in use is forgotten sooner: it may have changed unseen
        if not num_in_flight and self._done < 1e-6:  # nothing left to fade
            self._since = now
            self._set()
            return
        fade = math.exp(
            (self._since - now) / (max(5.0, 10.0 * latency_s) if num_in_flight else max(1.0, 5.0 * latency_s))
        )
        self.passed(now, num_in_flight)
        self._spent_s *= fade
        self._on_s *= fade
        self._done *= fade
        self._set()

    @property
    def most_tried(self) -> int:
        return max(self._tried, self._tried_before)

    def slowdown(self, num_in_flight: int, silent: float) -> float:
        """How many times longer than usual requests take, beyond what more of them explain; or, if that is more, for
        how long it has finished none: `silent` seconds per cost of one in flight. Silence counts half, since a few
        long requests in a row are nothing rare, and a quarter where it may be due to more requests than usual."""
        if self.usual is None:
            return 1.0
        load = max(1.0, self._recent_load / self._usual_load, num_in_flight / self._usual_load)
        return max(self._recent / load, silent / 2.0 / min(load, 2.0)) / self.usual

    @property
    def evidence(self) -> tuple[float, float]:
        """Seconds its slots were busy and cost done, faded."""
        return min(self._spent_s, self.slots * self._on_s), self._done

    def _set(self) -> None:
        average, alone, on_s, done = self._average, self._alone, self._on_s, self._done
        slots = self._most if self._most > self._most_before else self._most_before
        if alone is not None and on_s > 0.0 and self._spent_s > QUEUEING * alone * done:
            at_once = int(done / on_s * alone + 0.5)
        else:  # no limit in sight: there is room for more than anyone has tried
            at_once = 2 * average.most_tried
        self.slots = slots = at_once if at_once > slots else slots
        busy_s = slots * on_s
        if busy_s > self._spent_s:
            busy_s = self._spent_s
        prior = PRIOR * average.cost
        self.pace = (busy_s + prior * average.pace) / (done + prior)

    def _compare(self, took: float, came_as: int) -> None:
        """Follow what requests take: what is recent quickly, what is usual slowly."""
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
