"""How fast a worker is and how much it does at once, learned from what it finishes.

A worker is taken for a row of slots that each do a unit of cost in `pace` seconds; what exceeds the slots waits there.

- *slots*: when a request is done while older ones are still running, those ran beside it. The most that were seen
  running beside one, lately, is how much the worker does at once.
- *pace*: the time its slots were busy, divided by the cost that it finished meanwhile. Time counts while it passes, so
  a worker that hangs looks slower at every tick, though it finishes nothing.

Evidence fades with each completion and with time. What is left of it is mixed with what all workers do on average:
a worker that nothing is known of counts as average, and so one that was slow long ago is tried again.
"""

from __future__ import annotations

import math

# Completions after which evidence has faded to a third. Half and twice as many make no difference to the makespan.
WINDOW = 48
# Average requests' worth of belief in the average worker.
PRIOR = 2.0
# How much slower a request is taken to run on a full worker than on an empty one: between equals the emptier one wins.
CROWDING = 0.5
_FADE = 1.0 - 1.0 / WINDOW
_SLOTS_WINDOW = 64  # completions for which a number of slots is remembered, at least
_ENOUGH = 20  # completions after which a worker's usual pace is known


class Average:
    """What all workers of a router do on average."""

    __slots__ = ("cost", "latency_s", "pace")

    def __init__(self) -> None:
        self.cost = 1.0
        self.pace = 1.0
        self.latency_s = 0.0

    def learn(self, cost: float, latency_s: float) -> None:
        self.cost += 0.02 * (cost - self.cost)
        self.latency_s += 0.02 * (latency_s - self.latency_s)


class Pace:
    __slots__ = (
        "_average",
        "_busy_s",
        "_done",
        "_most",
        "_most_before",
        "_num_done",
        "_since",
        "pace",
        "slots",
        "usual",
    )

    def __init__(self, average: Average, now: float) -> None:
        self._average = average
        self._busy_s = 0.0  # of all slots, faded
        self._done = 0.0  # cost, faded alike
        self._since = now
        self._num_done = 0
        self._most = self._most_before = 1
        self.slots = 1
        self.pace = average.pace
        self.usual: float | None = None

    def began(self, now: float, num_before: int) -> None:
        self._pass(now, num_before)

    def ended(self, now: float, num_before: int, cost: float, num_older: int | None) -> None:
        """A request of this cost is done, of `num_before` in flight. `num_older` of the others had begun before it, if
        anyone has counted them."""
        self._pass(now, num_before)
        self._done = (self._done + cost) * _FADE
        self._busy_s *= _FADE
        self._num_done += 1
        if num_older is not None and num_older >= self._most:
            self._most = num_older + 1
        if self._num_done % _SLOTS_WINDOW == 0:
            self._most, self._most_before = 1, self._most
        self.slots = max(self._most, self._most_before)
        self._set_pace()
        self._set_usual()

    def tick(self, now: float, num_in_flight: int) -> None:
        seconds = now - self._since
        self._pass(now, num_in_flight)
        fade = math.exp(-seconds / max(5.0, 10.0 * self._average.latency_s))
        self._done *= fade
        self._busy_s *= fade
        self._set_pace()

    def forget(self) -> None:
        """Start anew, as after a restart. What was usual is kept."""
        self._busy_s = self._done = 0.0
        self._set_pace()

    def finish_s(self, cost: float, num_in_flight: int, backlog: float) -> float:
        """When a new request of this cost should be done, if `num_in_flight` of `backlog` cost in all are there."""
        slots = self.slots
        if num_in_flight < slots:
            return self.pace * cost * (1.0 + CROWDING * num_in_flight / slots)
        wait = backlog / num_in_flight * (num_in_flight - slots + 1) / slots
        return self.pace * (wait + cost * (1.0 + CROWDING))

    @property
    def slowdown(self) -> float:
        """How many times slower than usual it is."""
        return 1.0 if self.usual is None else self.pace / self.usual

    @property
    def evidence(self) -> tuple[float, float]:
        """Busy seconds and cost done, faded."""
        return self._busy_s, self._done

    def _pass(self, now: float, num_in_flight: int) -> None:
        slots = self.slots
        self._busy_s += (now - self._since) * (num_in_flight if num_in_flight < slots else slots)
        self._since = now

    def _set_pace(self) -> None:
        prior = PRIOR * self._average.cost
        self.pace = (self._busy_s + prior * self._average.pace) / (self._done + prior)

    def _set_usual(self) -> None:
        if self.usual is None:
            self.usual = self.pace if self._num_done >= _ENOUGH else None
        elif self.pace < 2.0 * self.usual:  # what is far out of line must not become usual
            self.usual += (self.pace - self.usual) * (0.05 if self.pace < self.usual else 0.005)
