"""Programs beside the driver: started, waited for, weighed, ended; and contestants, which take turns on the machine.

    alternate ─ go ─▶ ours ─ steps ─▶ alternate ─ go ─▶ peer ─ steps ─▶ alternate ...

A contestant is a process that speaks JSON lines (see contestant.py). The order swaps every round, so that a noisy
machine is noisy for both. Whose turn it is not is frozen (SIGSTOP): the heartbeats of an idle cluster would cost the
other side some percent.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from bench.harness import ROOT, BenchError, ContestantError, UsageError

Env = Mapping[str, str] | None
PEERS = ROOT / "bench" / "peers"
TAIL_LINES = 30
PORTS = range(20000, 30000)
_unused_ports = iter(random.sample(PORTS, len(PORTS)))


class Program:
    """A process and all below it, gone at the end of its `with` block. `env` is added to ours; what it writes goes to
    a log in `log_dir`. It has `end_s` to end politely. If the driver itself is killed, a shell kills the process."""

    talks = False  # by lines on standard input and output: the shell then wakes it, and it finds its input closed
    end_s = 1.0

    def __init__(self, name: str, command: Sequence[str], log_dir: Path, env: Env = None, end_s: float = 0.0) -> None:
        self.name = name
        self.end_s = end_s or self.end_s
        self._command = list(command)
        self._log = log_dir / f"{name}.log"
        self._env = {**os.environ, **(env or {})}
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        last = "CONT" if self.talks else "KILL"
        watch = f'while read -r line; do pids=$line; done; [ -z "$pids" ] || kill -{last} $pids'
        self._watcher = subprocess.Popen(["sh", "-c", watch], stdin=subprocess.PIPE, text=True, start_new_session=True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(has_failed=kind is not None)
        survivors = [process for process in self._seen if process.is_running()]
        _send(signal.SIGKILL, survivors)
        psutil.wait_procs(survivors, timeout=5)
        self._process.wait(5)
        self._tell_watcher("")
        self._watcher.communicate(timeout=5)

    def start(self) -> None:
        # In a session of its own: a Ctrl-C reaches the driver alone, which then ends everyone in order.
        how: dict[str, Any] = {"cwd": ROOT, "env": self._env, "text": True, "start_new_session": True}
        with self._log.open("a") as log:
            stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if self.talks else (subprocess.DEVNULL, log)
            self._process = subprocess.Popen(self._command, stdin=stdin, stdout=stdout, stderr=log, **how)
        self._root = psutil.Process(self._process.pid)
        if not self.talks:
            self._tell_watcher(str(self._process.pid))

    def kill(self) -> None:
        """Kill without warning, as an out-of-memory killer would. For programs of one process."""
        self._process.kill()
        self._process.wait(5)

    def wait_until(self, ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until it is up. Raises a `ContestantError` with the end of its log when it is late or has ended."""
        deadline = time.monotonic() + deadline_s
        while not ready():
            if self._process.poll() is not None:
                raise self.failure("has ended")
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready after {deadline_s:.0f} s")
            time.sleep(0.05)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and all below it. Children that ended count with their parents."""
        return self._total(lambda process: sum(process.cpu_times()[:4]))  # user, system, both again for ended children

    def rss(self) -> int:
        """Return the bytes of memory that the process and all below it hold."""
        return int(self._total(lambda process: process.memory_info().rss))

    def failure(self, what: str) -> ContestantError:
        code = self._process.poll()
        if code is None and what == "has ended":
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.5)
        state = "" if code is None else f" (exit code {code})"
        tail = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        said = "\n".join(["; the end of its log:", *tail]) if tail else "; it wrote nothing."
        return ContestantError(f"contestant {self.name!r} {what}{state}{said}")

    def _end(self, has_failed: bool) -> None:
        self._tree()
        with suppress(psutil.NoSuchProcess):
            self._root.terminate()
        psutil.wait_procs(self._seen, timeout=self.end_s)

    def _total(self, read: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                total += read(process)
        return total

    def _tree(self) -> list[psutil.Process]:
        """Return the living; remember all ever seen, since orphans can no longer be found through their parents."""
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        self._seen.update(tree)
        return tree

    def _tell_watcher(self, pids: str) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(pids + "\n")
        self._watcher.stdin.flush()


def _send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def unpacked(name: str, path: str) -> tuple[str, dict[str, str]]:
    """Return the program `path` that debian.sh has unpacked to bench/peers/venv-NAME, and the environment it needs."""
    folder = PEERS / f"venv-{name}"
    if not (folder / path).exists():
        raise UsageError(f"{name!r} is not installed: run `bash bench/peers/{name}.sh` first.")
    libraries = folder / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    return str(folder / path), {"LD_LIBRARY_PATH": str(libraries)}


def is_listened_to(port: int) -> bool:
    """Return whether a server waits at that port, without connecting to it."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in lines)  # listening


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface at which no server listens, each only once. None is from the range of
    outgoing connections: a server that is killed and started again might find its port in use by one."""
    ports: list[int] = []
    for port in _unused_ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise BenchError(f"no free ports are left between {PORTS.start} and {PORTS.stop}.")


# Contestants


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    amount: float  # of whatever the benchmark counts: tokens, requests, ...
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the step
    ended_cpu_s: float = 0.0  # of processes that ended in it, which no parent accounts for


@dataclass(slots=True)
class Tally:
    """The timed steps of one contestant: of one turn, or of all."""

    steps: list[Step] = field(default_factory=list)
    cpu_s: float = 0.0
    others_share: float = 0.0  # of the machine's cores, used by others in the worst round counted
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Amount per second, the median over the steps."""
        return statistics.median(step.amount / step.seconds for step in self.steps)

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / sum(step.amount for step in self.steps)

    def parts(self) -> dict[str, float]:
        """Return the median seconds of a step and of its parts."""
        names = {name: None for step in self.steps for name in step.parts}
        medians = {name: statistics.median(step.parts.get(name, 0.0) for step in self.steps) for name in names}
        return {"step": statistics.median(step.seconds for step in self.steps), **medians}


class Contestant(Program):
    """A process that takes steps when asked to, frozen after each turn."""

    talks = True
    end_s = 20.0
    _versions: dict[str, str] | None = None

    def ready(self, deadline_s: float) -> dict[str, str]:
        """Wait until it is set up, the first time; return its versions."""
        if self._versions is None:
            self._versions = dict(self._answer("ready", time.monotonic() + deadline_s))
        return self._versions

    def go(self, num_steps: int, deadline_s: float, case: str | None = None) -> list[Step]:
        """Have it take steps, of one case where it has several."""
        self._wake()
        deadline = time.monotonic() + deadline_s
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"go": num_steps} | ({} if case is None else {"case": case})) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("has ended") from None
        steps = [Step(**step) for step in self._answer("steps", deadline)]
        if len(steps) != num_steps:
            raise self.failure(f"took {len(steps)} steps instead of {num_steps}")
        tree = self._tree()
        self._tell_watcher(" ".join(str(process.pid) for process in tree))
        _send(signal.SIGSTOP, tree)
        return steps

    def dismiss(self) -> None:
        """Let it end; the end of the `with` block waits for that."""
        self._wake()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died with a message of ours unread
            self._process.stdin.close()

    def _end(self, has_failed: bool) -> None:
        self.dismiss()
        try:
            self._process.wait(0.3 if has_failed else self.end_s)  # after a failure there is nothing to wait for
        except subprocess.TimeoutExpired:
            self._tree()

    def _wake(self) -> None:
        _send(signal.SIGCONT, self._tree())
        self._tell_watcher("")

    def _answer(self, key: str, deadline: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise self.failure(f"passed its deadline and has not sent {key!r}")
        line = stdout.readline()
        if not line:
            raise self.failure("has ended")
        try:
            return json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            raise self.failure(f"sent {line.strip()[:200]!r} where {key!r} was due") from None


Commands = Mapping[str, Sequence[str]]  # by the names of contestants


@contextmanager
def opened(commands: Commands, folder: Path, env: Env = None, end_s: float = 0.0) -> Iterator[list[Contestant]]:
    """Start contestants. They are dismissed together at the end of the `with` block."""
    with ExitStack() as stack:
        everyone = [stack.enter_context(Contestant(name, it, folder, env, end_s)) for name, it in commands.items()]
        yield everyone
        for contestant in everyone:
            contestant.dismiss()


def cpu_environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# Turns


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps are taken, and how long they may take. A round is disturbed when others on the machine use more
    than `quiet_share` of its cores meanwhile: up to `extra_rounds` replace such ones, and up to `patience_s` in all is
    spent waiting for a quiet moment to start one."""

    warmup_steps: int
    num_rounds: int
    steps_per_turn: int
    extra_rounds: int = 0
    quiet_share: float = 0.1
    patience_s: float = 0.0
    start_s: float = 300.0
    turn_s: float = 300.0


One = TypeVar("One", bound=Any)  # of several contestants with a `name`
Round = dict[str, Tally]  # a turn of each contestant


def alternate(contestants: Sequence[Contestant], plan: Plan, case: str | None = None) -> dict[str, Tally]:
    """Let contestants take turns, at one case where they have several; return their tallies by name. The steps of the
    warm-up are not in them."""
    print(f"{case or 'turns'}:", file=sys.stderr, flush=True)
    versions = {contestant.name: contestant.ready(plan.start_s) for contestant in contestants}
    for contestant in contestants if plan.warmup_steps else ():
        contestant.go(plan.warmup_steps, plan.start_s, case)

    def turn(contestant: Contestant) -> Tally:
        cpu_before, watch = contestant.cpu_s(), Watch()
        steps = contestant.go(plan.steps_per_turn, plan.turn_s, case)
        watch.stop()
        cpu_s = contestant.cpu_s() - cpu_before + sum(step.ended_cpu_s for step in steps)
        return Tally(steps, cpu_s, watch.others_share(cpu_s))

    kept = take_rounds(contestants, plan, turn)
    tallies = {}
    for name, own in versions.items():
        turns = [one[name] for one in kept]
        steps = [step for turn in turns for step in turn.steps]
        tallies[name] = Tally(steps, sum(turn.cpu_s for turn in turns), others_share(kept), own)
    return tallies


def take_rounds(contestants: Sequence[One], plan: Plan, turn: Callable[[One], Tally]) -> list[Round]:
    """Let each take a turn in every round. Which rounds count depends on the rest of the machine alone, never on how
    anyone did in them."""
    rounds: list[Round] = []
    order = list(contestants)
    patience_s = plan.patience_s
    while len(rounds) < plan.num_rounds + plan.extra_rounds:
        patience_s -= wait_for_quiet(plan.quiet_share, patience_s)
        rounds.append({one.name: turn(one) for one in order})
        rates = ", ".join(f"{name} {own.rate:.4g}/s" for name, own in rounds[-1].items())
        share = f"others used {others_share(rounds[-1:]):.0%} of the machine"
        print(f"round {len(rounds)}: {rates}; {share}", file=sys.stderr, flush=True)
        order.reverse()
        if sum(others_share([one]) <= plan.quiet_share for one in rounds) == plan.num_rounds:
            break
    return sorted(rounds, key=lambda one: others_share([one]))[: plan.num_rounds]


def others_share(rounds: Sequence[Round]) -> float:
    """Return the share of the machine's cores that others used during the turn that was disturbed most."""
    return max(turn.others_share for turns in rounds for turn in turns.values())


class Watch:
    """How busy the whole machine is from now on, to `stop`."""

    def __init__(self) -> None:
        self._busy_s, self._seconds = _busy_s(), -time.monotonic()

    def stop(self) -> None:
        self._seconds += time.monotonic()
        self._busy_s = _busy_s() - self._busy_s

    def others_share(self, own_cpu_s: float) -> float:
        return max(0.0, self._busy_s - own_cpu_s) / (self._seconds * (os.cpu_count() or 1))


def _busy_s() -> float:
    """Return the CPU seconds used by everything on this machine so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def wait_for_quiet(share: float, patience_s: float) -> float:
    """Wait, with all contestants idle, until the machine was quiet for a second; return how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < patience_s:
        watch = Watch()
        time.sleep(1.0)
        watch.stop()
        if watch.others_share(own_cpu_s=0.0) <= share:
            break
    return time.monotonic() - start
