"""A pool of processes as the event loop sees it.

    run(job) ─▶ waiting ─▶ a process with room ─▶ its reply
                  ▲              │ hangs, crashes, leaks: the job that did it fails; the process is replaced
                  └──────────────┘ others that were in the same process wait again

Processes are forked when there is work for them and stay. The deadline of a job begins when it is sent to a process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from practicum.processes.child import NOBODY, SharedNumber
from practicum.processes.link import Channel, ForkServerClient
from practicum.processes.work import Limits, Work, packed

_MOST_REQUEUES = 3
_MOST_SERVER_STARTS = 5
_CANCEL_GRACE_S = 1.0
_START_S = 30.0


class JobFailed(Exception):
    """A job without a result. `kind` says whose fault it is.

    raised, crashed: the job's. timeout: it took too long. lost: not the job's; its process was ended from outside.
    """

    def __init__(self, kind: Literal["raised", "crashed", "timeout", "lost"], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.waited_s = self.ran_s = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    message: bytes
    timeout_s: float
    done: asyncio.Future[Any]
    begun_at: float | None = None
    times_lost: int = 0
    timer: asyncio.TimerHandle | None = None

    def stop_clock(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(frozen=True, slots=True)
class JobResult:
    value: Any
    waited_s: float
    ran_s: float


class _Process:
    """The pool's view of one process."""

    def __init__(self, current: SharedNumber) -> None:
        self.current = current
        self.channel: Channel
        self.pid: int | None = None  # not known yet
        self.jobs: dict[int, _Job] = {}
        self.is_up = False  # it has said so
        self.is_leaving = False  # gets no more jobs
        self.must_die = False  # as soon as its pid is known
        self.is_cut_off = False  # it lives, but has closed its connection
        self.verdicts: dict[int, JobFailed] = {}  # of its jobs, when it is killed for them

    def close(self) -> None:
        self.channel.close()
        self.current.close()


class ProcessPool:
    """Runs jobs in up to `size` processes, each within its deadline. Belongs to the event loop it was started in."""

    def __init__(self, work: Work, *, size: int, limits: Limits, start_timeout_s: float = 120.0) -> None:
        self._size = size
        self._limits = limits
        self._server = ForkServerClient(work, limits, start_timeout_s, self._server_said, self._server_lost)
        self._numbers = itertools.count(NOBODY + 1)
        self._waiting: deque[_Job] = deque()
        self._processes: set[_Process] = set()
        self._without_pid: deque[_Process] = deque()  # asked for, their pids not known yet
        self._num_server_starts = 0
        self._is_closed = False
        self._broken: str | None = None  # why no process can be had any more
        self._restarting: asyncio.Task[None] | None = None
        self._is_async = limits.capacity > 1

    async def start(self) -> None:
        """Start the fork server. Raises ProcessError if the work cannot be made ready."""
        await self._server.start()

    @property
    def num_at_once(self) -> int:
        """The number of jobs that can be under way."""
        return self._size * self._limits.capacity

    async def run(self, payload: Any, timeout_s: float) -> JobResult:
        """Return the job's result, or raise `JobFailed`."""
        number = next(self._numbers)
        message = packed((number, payload))
        asked_at = time.monotonic()
        if self._is_closed:
            raise JobFailed("lost", "the pool of processes is closed")
        if self._broken is not None:
            raise JobFailed("lost", self._broken)
        loop = asyncio.get_running_loop()
        job = _Job(number, message, timeout_s, loop.create_future())
        self._waiting.append(job)
        self._assign()
        try:
            value = await job.done
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        except JobFailed as failure:
            begun_at = job.begun_at or time.monotonic()
            failure.waited_s, failure.ran_s = begun_at - asked_at, time.monotonic() - begun_at
            raise
        assert job.begun_at is not None
        return JobResult(value, job.begun_at - asked_at, time.monotonic() - job.begun_at)

    async def close(self) -> None:
        """End all processes and fail the jobs they have."""
        if self._is_closed:
            return
        self._is_closed = True
        jobs = [*self._waiting, *(job for process in self._processes for job in process.jobs.values())]
        for job in jobs:
            self._fail(job, JobFailed("lost", "the pool of processes was closed"))
        for process in self._processes:
            process.close()
        self._processes.clear()
        if self._restarting is not None:
            self._restarting.cancel()
        await self._server.close()

    # What processes do

    def _replied(self, process: _Process, number: int, is_result: bool | None, value: Any, is_spent: bool) -> None:
        """Take a reply. `is_result` is None for a job that was cancelled as asked."""
        if number == NOBODY:  # it has started
            process.is_up = True
            for waiting in process.jobs.values():
                self._start_clock(waiting, process)
            return
        job = process.jobs.pop(number, None)
        if is_spent:
            process.is_leaving = True
        if job is not None:
            job.stop_clock()
            if number in process.verdicts:
                self._fail(job, process.verdicts.pop(number))
            elif is_result is None:
                self._requeue(job, "it was cancelled together with another", is_suspect=False)
            elif is_result:
                if not job.done.done():
                    job.done.set_result(value)
            else:
                self._fail(job, JobFailed("raised", f"raised {value}"))
        if process.is_leaving and not process.jobs:
            self._kill(process)
        self._assign()

    def _hung_up(self, process: _Process) -> None:
        """Note that it has closed its connection: it has ended, as the server will say, or has cut itself off."""
        process.is_leaving = True
        if process in self._processes:
            asyncio.get_running_loop().call_later(_CANCEL_GRACE_S, self._cut_off, process)

    def _cut_off(self, process: _Process) -> None:
        if process in self._processes:
            process.is_cut_off = True
            self._kill(process)

    def _server_said(self, message: tuple[Any, ...]) -> None:
        if message[0] == "forked":
            process = self._without_pid.popleft()
            process.pid = message[1]
            if process.must_die:
                self._server.kill(process.pid)
            return
        _, pid, status = message
        ended = next((one for one in self._processes if one.pid == pid), None)
        if ended is not None:
            self._ended(ended, status)

    def _ended(self, process: _Process, status: int, how: str = "") -> None:
        how = how or _end_in_words(status)
        culprit = process.current.read()
        process.is_leaving = True
        process.channel.drain()  # what it has answered counts
        self._processes.discard(process)
        verdicts, jobs = process.verdicts, list(process.jobs.values())
        if process.is_cut_off and len(jobs) == 1:
            culprit = jobs[0].number  # whatever it has written over the number
        is_known = bool(verdicts) or culprit in process.jobs
        process.close()
        for job in reversed(jobs):
            job.stop_clock()
            if job.number in verdicts:
                self._fail(job, verdicts[job.number])
            elif job.number == culprit and process.is_cut_off and _was_killed(status):
                self._fail(job, JobFailed("crashed", "closed the connection of the process it ran in"))
            elif job.number == culprit and not verdicts and not _was_killed(status):
                self._fail(job, JobFailed("crashed", how))
            else:
                self._requeue(job, how, is_suspect=job.number == culprit or not is_known)
        self._assign()

    def _server_lost(self, code: int) -> None:
        """Take note that the fork server is gone, and its processes with it."""
        if self._is_closed:
            return
        self._without_pid.clear()
        for process in list(self._processes):
            process.must_die = False
            self._ended(process, signal.SIGKILL, f"the process that starts them ended with exit code {code}")
        if self._num_server_starts == _MOST_SERVER_STARTS:
            self._fail_all("the process that starts the others died again and again")
            return
        self._num_server_starts += 1
        self._restarting = asyncio.ensure_future(self._restart_server())

    async def _restart_server(self) -> None:
        try:
            await self._server.start()
        except Exception as error:
            self._fail_all(f"the process that starts the others died and does not come back: {error}")
        else:
            self._assign()

    # What the pool does

    def _assign(self) -> None:
        while self._waiting and not self._is_closed and self._server.is_up:
            if self._waiting[0].done.done():  # given up meanwhile
                self._waiting.popleft()
                continue
            process = self._with_room() or self._grown()
            if process is None:
                return
            self._send(self._waiting.popleft(), process)

    def _with_room(self) -> _Process | None:
        room = [p for p in self._processes if not p.is_leaving and len(p.jobs) < self._limits.capacity]
        return min(room, key=lambda process: len(process.jobs), default=None)

    def _grown(self) -> _Process | None:
        if len(self._processes) >= self._size:
            return None
        ours, theirs = socket.socketpair()
        current_fd = os.memfd_create("practicum-current-job")
        os.ftruncate(current_fd, os.sysconf("SC_PAGESIZE"))
        process = _Process(SharedNumber(current_fd))
        process.channel = Channel(ours, lambda reply: self._replied(process, *reply), lambda: self._hung_up(process))
        self._server.fork(theirs, current_fd)
        os.close(current_fd)
        theirs.close()
        self._without_pid.append(process)
        self._processes.add(process)
        return process

    def _send(self, job: _Job, process: _Process) -> None:
        process.jobs[job.number] = job
        process.channel.send_packed(job.message)
        self._start_clock(job, process)

    def _start_clock(self, job: _Job, process: _Process) -> None:
        """Start a job's deadline. The time that a process takes to start, on a busy machine, does not count."""
        job.stop_clock()
        job.begun_at = time.monotonic()
        time_s = job.timeout_s if process.is_up else job.timeout_s + _START_S
        job.timer = asyncio.get_running_loop().call_later(time_s, self._out_of_time, job, process)

    def _out_of_time(self, job: _Job, process: _Process) -> None:
        process.channel.drain()  # this loop may have been held up itself
        if job.number not in process.jobs:
            return
        verdict = JobFailed("timeout", f"took longer than {job.timeout_s:g} s")
        if not self._is_async:
            self._kill(process, {job.number: verdict})
            return
        process.verdicts[job.number] = verdict
        process.channel.send((job.number, None))
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(_CANCEL_GRACE_S, self._is_blocked, job, process)

    def _is_blocked(self, job: _Job, process: _Process) -> None:
        """Kill a process in which a job was not even cancelled in time: something holds up the process's event loop."""
        process.channel.drain()
        if job.number not in process.jobs:
            return
        culprit = process.current.read()
        process.verdicts.clear()
        if culprit != NOBODY and culprit not in process.jobs:  # it was asked to stop before, and goes on
            self._kill(process)
            return
        guilty = job.number if culprit == NOBODY else culprit
        reason = f"took longer than {job.timeout_s:g} s without giving way to others: an async function must not block"
        self._kill(process, {guilty: JobFailed("timeout", reason)})

    def _give_up(self, job: _Job) -> None:
        """Stop a job for which nobody waits any more."""
        process = next((one for one in self._processes if job.number in one.jobs), None)
        if process is None:
            return  # in the queue, where it is passed over
        job.stop_clock()
        if self._is_async:
            process.channel.send((job.number, None))
        else:
            self._kill(process)

    def _kill(self, process: _Process, verdicts: dict[int, JobFailed] | None = None) -> None:
        process.is_leaving = True
        process.verdicts.update(verdicts or {})
        if process.pid is None:
            process.must_die = True
        else:
            self._server.kill(process.pid)

    def _requeue(self, job: _Job, how: str, *, is_suspect: bool) -> None:
        """Let a job wait again, in front of the others. It counts where the job may have ended the process."""
        job.times_lost += is_suspect
        if job.times_lost > _MOST_REQUEUES:
            self._fail(job, JobFailed("lost", f"the process it was in ended {job.times_lost} times: {how}"))
        elif not job.done.done():
            self._waiting.appendleft(job)

    def _fail(self, job: _Job, failure: JobFailed) -> None:
        job.stop_clock()
        if not job.done.done():
            job.done.set_exception(failure)

    def _fail_all(self, reason: str) -> None:
        self._broken = reason
        while self._waiting:
            self._fail(self._waiting.popleft(), JobFailed("lost", reason))


def _was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _end_in_words(status: int) -> str:
    if os.WIFEXITED(status):
        return f"its process ended with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return "its process was killed from outside, perhaps because the machine ran out of memory"
    return f"its process crashed with {signal.Signals(number).name}"
