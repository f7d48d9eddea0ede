"""The fork server by itself, spoken to over its socket."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from practicum.processes.child import NOBODY
from practicum.processes.work import Limits, Unpacker, Work, packed, receive
from tests.processes.works import CannotPrepare, Tricks


class Server:
    def __init__(self, work: Work, least_fd: int = 0) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(20)
        with theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, least_fd)) as theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "practicum.processes.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._unpacker = Unpacker()
        self._heard: list[Any] = []
        pickled = pickle.dumps((work, Limits(128 << 20)))
        self.connection.sendall(packed((sys.path, os.getcwd(), pickled)))

    def hear(self) -> Any:
        if not self._heard:
            messages = receive(self.connection, self._unpacker)
            assert messages is not None
            self._heard = messages
        return self._heard.pop(0)

    def fork(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        current = os.memfd_create("current")
        os.ftruncate(current, os.sysconf("SC_PAGESIZE"))
        socket.send_fds(self.connection, [packed(("fork",))], [theirs.fileno(), current])
        theirs.close()
        os.close(current)
        what, pid = self.hear()
        assert what == "forked"
        assert receive(ours, Unpacker()) == [(NOBODY, True, None, False)]  # it is up
        return ours, pid


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Tricks())
    try:
        assert server.hear() == ("ready", "")
        yield server
    finally:
        server.connection.close()
        assert server.process.wait(10) == 0


def test_processes_are_forked_with_the_work_made_ready(server: Server) -> None:
    lines = [server.fork() for _ in range(3)]
    assert len({pid for _, pid in lines}) == 3
    for line, pid in lines:
        line.sendall(packed((1, ("pid", None))))
        assert receive(line, Unpacker()) == [(1, True, pid, False)]
        line.close()
    ended = [server.hear() for _ in lines]
    assert {message[:2] for message in ended} == {("ended", pid) for _, pid in lines}
    assert {message[2] for message in ended} == {0}


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("processes may not have so many open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_many_open_files_has_one_too(many_files: None) -> None:
    server = Server(Tricks(), least_fd=1024)
    try:
        assert server.hear() == ("ready", "")
        line, pid = server.fork()
        line.sendall(packed((1, ("pid", None))))
        assert receive(line, Unpacker()) == [(1, True, pid, False)]
        line.close()
    finally:
        server.connection.close()
        server.process.wait(10)


def test_a_process_is_killed_when_asked_and_its_end_is_told(server: Server) -> None:
    line, pid = server.fork()
    line.sendall(packed((1, ("hang", None))))
    server.connection.sendall(packed(("kill", 1)))  # somebody else's: it is left alone
    server.connection.sendall(packed(("kill", pid)))
    what, told, status = server.hear()
    assert (what, told, os.WTERMSIG(status)) == ("ended", pid, signal.SIGKILL)
    line.close()


def test_all_ends_when_the_connection_does(server: Server) -> None:
    lines = [server.fork() for _ in range(2)]
    for line, _ in lines:
        line.sendall(packed((1, ("hang", None))))
    children = psutil.Process(server.process.pid).children()
    server.connection.close()
    assert not psutil.wait_procs(children, timeout=10)[1]
    for line, _ in lines:
        line.close()


def test_children_do_not_outlive_a_killed_server() -> None:
    server = Server(Tricks())
    assert server.hear() == ("ready", "")
    line, pid = server.fork()
    line.sendall(packed((1, ("hang", None))))
    child = psutil.Process(pid)
    server.process.kill()
    server.process.wait(10)
    assert not psutil.wait_procs([child], timeout=10)[1]
    line.close()
    server.connection.close()


def test_a_failure_to_get_ready_is_told() -> None:
    server = Server(CannotPrepare())
    assert server.hear() == ("failed", "FileNotFoundError: no such schema (works.py, line 258)")
    assert server.process.wait(10) == 0
    server.connection.close()
