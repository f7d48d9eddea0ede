"""The program that makes a box and runs the cases in it. Standard library only: it never sees the caller's memory.

    caller (box.py)
      └─ A  this program, fresh `python -I -S -B`: new pid, net, ipc, uts (and, for ordinary users, user) namespaces
           └─ B  process 1 of the box: private mounts, starts the cases, reads their output, watches memory and time
                └─ C  execs the untrusted program: nobody, no capabilities, limits, system-call filter

B cannot be reached from C: signals from inside a pid namespace do not hit its process 1, C may not trace, and there is
no /proc. A dies with the caller, B with A, and the kernel kills all that is left in the box when B ends; so A's end
means that nothing of the box is alive. Each case has a fresh working folder, and whatever the last case left running
is killed before the next begins.

The request comes on standard input (see box.py); the replies are marshalled tuples on standard output, each after
its length in eight bytes: ("done", kind, code, stdout, stderr, seconds) or ("refused", why).
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import time
from typing import Any

from practicum.reward.sandbox.isolation import (
    PR_SET_PDEATHSIG,
    SIGCHLD,
    SIGKILL,
    Box,
    Spec,
    TrustedFolder,
    build_root,
    enter_namespaces,
    libc,
    prctl,
)

TICK_S = 0.05


def reply(*message: Any) -> None:
    data = marshal.dumps(message)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(1, data) :]


def become_program(place: Box | TrustedFolder, folder: str, stdio: tuple[int, int, int]) -> None:
    limits = place.spec["limits"]
    for target, fd in enumerate(stdio):
        os.dup2(fd, target)
    os.setsid()
    os.chdir(folder)
    for name, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        ceiling = resource.getrlimit(name)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(name, (value, value))
    place.drop()
    environment = place.spec["environment"]
    os.execve(place.spec["argv"][0], place.spec["argv"], environment | {"HOME": folder})


def start(place: Box | TrustedFolder, folder: str) -> tuple[int, int, int, int]:
    """Start C. Returns its pid and the ends of its standard input, output and error."""
    (in_r, in_w), (out_r, out_w), (err_r, err_w), (failed_r, failed_w) = (os.pipe() for _ in range(4))
    pid = os.fork()
    if pid == 0:
        try:
            become_program(place, folder, (in_r, out_w, err_w))
        except BaseException as error:
            os.write(failed_w, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    for fd in (in_r, out_w, err_w, failed_w):
        os.close(fd)
    failure = os.read(failed_r, 4096)  # ends when exec closes the other side
    os.close(failed_r)
    if failure:
        raise RuntimeError(failure.decode())
    for fd in (in_w, out_r, err_r):
        os.set_blocking(fd, False)
    return pid, in_w, out_r, err_r


class Case:
    """One run of the program: feeds its input, keeps its output, and stops it at the first limit it meets."""

    def __init__(self, place: Box | TrustedFolder, lifeline: int, stdin: bytes) -> None:
        self.place, self.limits, self.lifeline, self.stdin = place, place.spec["limits"], lifeline, memoryview(stdin)
        self.most_output = self.limits["output_kb"] << 10
        self.stopped: str | None = None
        self.status: tuple[int, float] | None = None  # wait status, CPU seconds

    def run(self) -> tuple[str, int | None, bytes, bytes, float]:
        folder = self.place.fresh_folder()
        for name, content in self.place.spec["files"].items():
            path = f"{folder}/{name}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        began = time.monotonic()
        self.pid, self.in_w, out_r, err_r = start(self.place, folder)
        self.kept = {out_r: bytearray(), err_r: bytearray()}
        try:
            self.watch(began + self.limits["wall_s"])
        finally:
            self.end()
        seconds = time.monotonic() - began
        for fd in self.kept:
            while self.keep(fd):
                pass
            os.close(fd)
        out, err = (bytes(self.kept[fd][: self.most_output]) for fd in (out_r, err_r))
        return *self.verdict(), out, err, seconds

    def watch(self, deadline: float) -> None:
        poll = select.poll()
        ended = os.pidfd_open(self.pid)
        for fd in (self.lifeline, ended, *self.kept):
            poll.register(fd, select.POLLIN)
        poll.register(self.in_w, select.POLLOUT)
        looked = time.monotonic()
        try:
            while self.stopped is None and self.status is None:
                for fd, _ in poll.poll(TICK_S * 1000):
                    if fd == self.lifeline:
                        self.stopped = "abandoned"
                    elif (fd == self.in_w and not self.feed()) or (fd in self.kept and not self.keep(fd)):
                        poll.unregister(fd)
                now = time.monotonic()
                if now >= deadline:
                    self.stopped = "timeout"
                elif now - looked >= TICK_S:
                    looked = now
                    if self.place.memory() > self.limits["memory_mb"] << 20:
                        self.stopped = "memory"
                self.reap()
        finally:
            os.close(ended)

    def feed(self) -> bool:
        """Write input. Return whether there is more to come."""
        try:
            self.stdin = self.stdin[os.write(self.in_w, self.stdin) :] if self.stdin else self.stdin
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.stdin = self.stdin[:0]
        if not self.stdin:
            os.close(self.in_w)
            self.in_w = -1
        return bool(self.stdin)

    def keep(self, fd: int) -> bool:
        """Read output. Return whether there may be more now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self.kept[fd] += data
        if len(self.kept[fd]) > self.most_output:
            self.stopped = self.stopped or "output"
            return False
        return bool(data)

    def reap(self) -> bool:
        """Collect what has ended, orphans too, lest they fill the box. Return whether anything is left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if ended is None:
                return True
            # The clock that the kernel compares with the limit, there until the process is collected. It counts whole
            # ticks, and on a busy machine it may be far ahead of the exact one in the process's resource usage.
            cpu_s = time.clock_gettime(~ended.si_pid << 3) if ended.si_pid == self.pid else 0.0
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self.pid:
                self.status = status, cpu_s

    def end(self) -> None:
        if self.in_w >= 0:
            os.close(self.in_w)
        while self.reap():
            self.place.kill_all()
            time.sleep(0.001)

    def verdict(self) -> tuple[str, int | None]:
        if self.stopped is not None:
            return self.stopped, None
        assert self.status is not None
        code, cpu_s = os.waitstatus_to_exitcode(self.status[0]), self.status[1]
        if code == -SIGKILL and cpu_s >= self.limits["cpu_s"]:
            return "timeout", None
        return ("signalled", -code) if code < 0 else ("exited", code)


def run_cases(place: Box | TrustedFolder, lifeline: int) -> None:
    for stdin in place.spec["stdins"]:
        case = Case(place, lifeline, stdin)
        outcome = case.run()
        if case.stopped == "abandoned":
            return
        reply("done", *outcome)


def main(spec: Spec) -> None:
    lifeline = spec["lifeline"]
    os.set_inheritable(lifeline, False)
    libc.signal(SIGCHLD, None)  # a caller that ignores it has handed that down, and there would be nothing to wait for
    try:
        if spec["folder"] is not None:
            run_cases(TrustedFolder(spec), lifeline)
        else:
            run_in_box(spec, lifeline)
    except Exception as error:
        reply("refused", f"{type(error).__name__}: {error}")
    os._exit(0)  # the interpreter's own farewell takes longer than all of the above


def run_in_box(spec: Spec, lifeline: int) -> None:
    prctl("die with the caller", PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != spec["caller"]:
        return
    root = enter_namespaces()
    prctl("die with the caller", PR_SET_PDEATHSIG, SIGKILL)  # forgotten where the identity has changed
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    prctl("die with the launcher", PR_SET_PDEATHSIG, SIGKILL)
    run_cases(Box(spec, build_root(spec), root), lifeline)
