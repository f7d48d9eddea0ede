"""Contestants who take turns on the same machine.

    alternate ─ go ─▶ ours ─ steps ─▶ alternate ─ go ─▶ peer ─ steps ─▶ alternate ...

A contestant is a process that speaks JSON lines (see contestant.py). All are started and warmed up first; then they
take turns of a few steps, one at a time, in swapped order each round, so that a noisy machine is noisy for both. Who
is not on is frozen (SIGSTOP): the heartbeats of an idle cluster would cost the other side some percent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bench.harness import ROOT, ContestantError

TAIL_LINES = 30
# Wakes whoever is named on its last line when its input closes: if the driver is killed outright, frozen contestants
# would otherwise never notice. Awake, they find their own input closed and go home.
_WAKER = 'while read -r line; do pids=$line; done; [ -z "$pids" ] || kill -CONT $pids'


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    amount: float  # of whatever the benchmark counts: tokens, requests, ...
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the step
    ended_cpu_s: float = 0.0  # of processes that ended in it and are in nobody's account


@dataclass(slots=True)
class Tally:
    """All timed steps of one contestant."""

    versions: Mapping[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    cpu_s: float = 0.0
    others_share: float = 0.0  # of the machine's cores, used by others in the worst round counted

    @property
    def rate(self) -> float:
        """Amount per second, the median over the steps."""
        return statistics.median(step.amount / step.seconds for step in self.steps)

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / sum(step.amount for step in self.steps)

    def parts(self) -> dict[str, float]:
        """Median seconds of a step and of its parts."""
        names = {name: None for step in self.steps for name in step.parts}
        medians = {name: statistics.median(step.parts.get(name, 0.0) for step in self.steps) for name in names}
        return {"step": statistics.median(step.seconds for step in self.steps), **medians}


class Contestant:
    """A process that takes steps when told to, frozen after each turn.

    Used in a `with` block: at its end the process and all its children are gone.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        end_s: float = 20.0,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._log = log_dir / f"{name}.log"
        self._env = {**os.environ, **(env or {})}
        self._end_s = end_s
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C reaches the harness alone, which then ends everyone in order
            )
        self._waker = subprocess.Popen(["sh", "-c", _WAKER], stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._root = psutil.Process(self._process.pid)
        threading.Thread(target=self._read, daemon=True, name=f"read-{self.name}").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.dismiss()
        try:
            # After a failure nobody waits for good manners.
            self._process.wait(self._end_s if kind is None else 0.3)
        except subprocess.TimeoutExpired:
            self._tree()
        survivors = [process for process in self._seen if process.is_running()]
        _send(signal.SIGKILL, survivors)
        psutil.wait_procs(survivors, timeout=5)
        self._process.wait(5)
        self._waker.communicate(timeout=5)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, deadline_s: float) -> dict[str, str]:
        """Wait until it is set up; its versions."""
        return dict(self._answer("ready", time.monotonic() + deadline_s))

    def go(self, num_steps: int, deadline_s: float, case: str | None = None) -> list[Step]:
        """Have it take steps, of one case where it has several."""
        self._wake()
        deadline = time.monotonic() + deadline_s
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"go": num_steps} | ({} if case is None else {"case": case})) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None
        steps = [Step(**step) for step in self._answer("steps", deadline)]
        if len(steps) != num_steps:
            raise self._failure(f"took {len(steps)} steps instead of {num_steps}")
        self._freeze()
        return steps

    def dismiss(self) -> None:
        """Let it go home; the end of the `with` block waits for that."""
        self._wake()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died with a message of ours unread
            self._process.stdin.close()

    def cpu_s(self) -> float:
        """CPU seconds of the process and all below it so far. Children that ended count with their parents."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])  # user, system, and both again for ended children
        return total

    def _freeze(self) -> None:
        tree = self._tree()
        self._tell_waker(" ".join(str(process.pid) for process in tree))
        _send(signal.SIGSTOP, tree)

    def _wake(self) -> None:
        _send(signal.SIGCONT, self._tree())
        self._tell_waker("")

    def _tell_waker(self, pids: str) -> None:
        assert self._waker.stdin is not None
        self._waker.stdin.write(pids + "\n")
        self._waker.stdin.flush()

    def _tree(self) -> list[psutil.Process]:
        """The living; remembers everyone ever seen, since orphans can no longer be found through their parents."""
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        self._seen.update(tree)
        return tree

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, key: str, deadline: float) -> Any:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise self._failure(f"passed its deadline and has not sent {key!r}") from None
        if line is None:
            raise self._failure("has ended")
        try:
            return json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            raise self._failure(f"sent {line.strip()[:200]!r} where {key!r} was due") from None

    def _failure(self, what: str) -> ContestantError:
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        state = "" if code is None else f" (exit code {code})"
        tail = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        said = (
            "\n".join(["; the end of its standard error:", *tail]) if tail else "; it wrote nothing to standard error."
        )
        return ContestantError(f"contestant {self.name!r} {what}{state}{said}")


def _send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps are taken, and how long anyone may take for them.

    A round is disturbed when others on the machine use more than `quiet_share` of its cores meanwhile. Up to
    `extra_rounds` are taken to replace disturbed ones, and up to `patience_s` in all is spent waiting for a quiet
    moment to start one.
    """

    warmup_steps: int
    num_rounds: int
    steps_per_turn: int
    extra_rounds: int = 0
    quiet_share: float = 0.1
    patience_s: float = 0.0
    start_s: float = 300.0
    turn_s: float = 300.0


@dataclass(slots=True)
class Round:
    """One turn of each contestant, by name."""

    turns: dict[str, Tally] = field(default_factory=dict)
    others_share: float = 0.0  # of the machine's cores, used by others during the turn that was disturbed most

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {turn.rate:.4g}/s" for name, turn in self.turns.items())
        return f"{rates}; others used {self.others_share:.0%} of the machine"


def alternate(contestants: Sequence[Contestant], plan: Plan) -> dict[str, Tally]:
    """Let started contestants take turns; their tallies by name. The steps of the warm-up are not in them."""
    versions = {contestant.name: contestant.ready(plan.start_s) for contestant in contestants}
    tallies = take_turns(contestants, plan)
    for contestant in contestants:
        contestant.dismiss()  # all now, so that they take their time to end together
    for name, tally in tallies.items():
        tally.versions = versions[name]
    return tallies


def take_turns(contestants: Sequence[Contestant], plan: Plan, case: str | None = None) -> dict[str, Tally]:
    """The same of contestants who are ready and stay so, at one case where they have several."""
    for contestant in contestants if plan.warmup_steps else ():
        contestant.go(plan.warmup_steps, plan.start_s, case)
    rounds: list[Round] = []
    order = list(contestants)
    patience_s = plan.patience_s
    while len(rounds) < plan.num_rounds + plan.extra_rounds:
        patience_s -= wait_for_quiet(plan.quiet_share, patience_s)
        rounds.append(_round(order, plan, case))
        print(f"round {len(rounds)}: {rounds[-1]}", file=sys.stderr, flush=True)
        order.reverse()
        if sum(one.others_share <= plan.quiet_share for one in rounds) == plan.num_rounds:
            break
    # Which rounds count depends on the rest of the machine alone, never on how anyone did in them.
    kept = sorted(rounds, key=lambda one: one.others_share)[: plan.num_rounds]
    return {
        name: Tally(
            steps=[step for one in kept for step in one.turns[name].steps],
            cpu_s=sum(one.turns[name].cpu_s for one in kept),
            others_share=max(one.others_share for one in kept),
        )
        for name in (contestant.name for contestant in contestants)
    }


def _round(order: Sequence[Contestant], plan: Plan, case: str | None) -> Round:
    result = Round()
    for contestant in order:
        cpu_before, busy_before, start = contestant.cpu_s(), busy_s(), time.monotonic()
        steps = contestant.go(plan.steps_per_turn, plan.turn_s, case)
        seconds, busy = time.monotonic() - start, busy_s() - busy_before
        cpu_s = contestant.cpu_s() - cpu_before + sum(step.ended_cpu_s for step in steps)
        share = max(0.0, busy - cpu_s) / (seconds * (os.cpu_count() or 1))
        result.turns[contestant.name] = Tally(steps=steps, cpu_s=cpu_s)
        result.others_share = max(result.others_share, share)
    return result


def wait_for_quiet(share: float, patience_s: float) -> float:
    """Wait, with all contestants idle, until the machine was quiet for a second; how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < patience_s:
        before = busy_s()
        time.sleep(1.0)
        if busy_s() - before <= share * (os.cpu_count() or 1):
            break
    return time.monotonic() - start


def busy_s() -> float:
    """CPU seconds used by everyone on this machine so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
