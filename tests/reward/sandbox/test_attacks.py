"""Programs that try to get out, to be seen or to take more than their share. All are contained, nothing is left."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from practicum.reward.sandbox import Limits, Outcome, Sandbox, isolation_problem

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")

LIMITS = Limits(wall_s=2, cpu_s=1, memory_mb=128, disk_mb=8, num_files=64, processes=16, open_files=32, output_kb=64)
MARK = f"practicum-attack-{os.getpid()}"
BEFORE: set[int] = set()
SECRET = "a secret of the machine"

# Attacks call attempt(f, ...): it prints "contained", or "ESCAPED" where f did not fail.
PRELUDE = """
import ctypes, mmap, os, resource, signal, socket, sys, threading, time
host = dict(zip(["port", "folder", "pid", "mark"], sys.argv[1:]))
libc = ctypes.CDLL(None, use_errno=True)
def attempt(f, *args):
    try:
        result = f(*args)
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        print("contained", repr(error), flush=True)
        return
    print("ESCAPED", f, args, result)
def call(name, *args):
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


class Attack(NamedTuple):
    name: str
    code: str
    kinds: tuple[str, ...] = ("exited",)


FORK_BOMB = """
while True:
    try: os.fork()
    except OSError: pass
"""
CHILDREN_WITH_MEMORY = """
for _ in range(8):
    if not os.fork():
        kept = b"x" * (60 << 20)
        time.sleep(99)
time.sleep(99)
"""
# Refused where process 1 belongs to root, ignored where it belongs to the same user.
SIGNALS_TO_1 = """
for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    try: os.kill(1, number)
    except PermissionError: pass
time.sleep(0.2)
print("contained")
"""
DOUBLE_FORK = """
if not os.fork():
    os.setsid()
    if not os.fork():
        while True: time.sleep(1)
    os._exit(0)
"""
IGNORE_SIGNALS = """
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
"""
OWN_PROGRAM = """
with open("x", "wb") as file:
    file.write(open(sys.executable, "rb").read(4096))
os.chmod("x", 0o755)
attempt(os.execv, "./x", ["x"])
"""
CLONE = 56 if os.uname().machine == "x86_64" else 220

ATTACKS = [
    Attack("tcp", "attempt(lambda: socket.create_connection(('127.0.0.1', int(host['port'])), 2))"),
    Attack("tcp outside", "attempt(lambda: socket.create_connection(('1.1.1.1', 53), 2))"),
    Attack("udp", "attempt(lambda: socket.socket(type=2).sendto(b'x', ('127.0.0.1', int(host['port']))))"),
    Attack("dns", "attempt(socket.getaddrinfo, 'example.org', 80)"),
    Attack("unix socket", "attempt(socket.socket(socket.AF_UNIX).connect, host['folder'] + '/socket')"),
    Attack("abstract socket", "attempt(socket.socket(socket.AF_UNIX).connect, '\\0' + host['mark'])"),
    Attack("vsock", "attempt(socket.socket, 40, socket.SOCK_STREAM)"),
    Attack("netlink", "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)"),
    Attack("fork bomb", FORK_BOMB, ("timeout", "memory")),
    Attack("counted forks", "attempt(lambda: [os.fork() or time.sleep(99) for _ in range(16)])"),
    Attack(
        "threads",
        "attempt(lambda: [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(16)])",
    ),
    Attack("zombies", "attempt(lambda: [os.fork() or os._exit(0) for _ in range(10_000)])"),
    Attack("memory", "attempt(lambda: bytearray(1 << 30))"),
    Attack("memory bit by bit", "kept = []\nwhile True: kept.append(bytearray(1 << 20))", ("exited", "memory")),
    Attack("memory over children", CHILDREN_WITH_MEMORY, ("memory",)),
    Attack("shared memory nobody shows", "attempt(mmap.mmap, -1, 1 << 20)"),
    Attack("memory file", "attempt(os.memfd_create, 'x')"),
    Attack("system v memory", "attempt(call, 'shmget', 0, 1 << 20, 0o1600)"),
    Attack("disk", "attempt(lambda: [open(str(n), 'wb').write(bytes(4 << 20)) for n in range(9)])"),
    Attack("disk in /tmp", "attempt(lambda: [open(f'/tmp/{n}', 'wb').write(bytes(4 << 20)) for n in range(9)])"),
    Attack("sparse file", "attempt(lambda: open('x', 'wb').truncate(1 << 40))"),
    Attack("inodes", "attempt(lambda: [os.mkdir(str(n)) for n in range(1000)])"),
    Attack("open files", "attempt(lambda: [os.dup(0) for _ in range(1000)])"),
    Attack("secret file", "attempt(lambda: open(host['folder'] + '/secret').read())"),
    Attack("password file", "attempt(lambda: open('/etc/passwd').read())"),
    Attack(
        "folders", "[attempt(os.listdir, folder) for folder in ('/home', '/root/.ssh', '/sys', '/var', '/dev/pts')]"
    ),
    Attack("parent in /proc", "attempt(open, f'/proc/{host[\"pid\"]}/environ'); attempt(os.listdir, '/proc/self')"),
    Attack("environment", "print('ESCAPED' if 'PRACTICUM_SECRET' in os.environ else 'contained', os.environ)"),
    Attack("inherited files", "[attempt(os.fstat, n) for n in range(3, 1000)]"),
    Attack("signal to the parent", "attempt(os.kill, int(host['pid']), 9)"),
    Attack("signal to process 1", SIGNALS_TO_1),
    Attack("trace", "attempt(call, 'ptrace', 16, 1, 0, 0); attempt(call, 'ptrace', 0, 0, 0, 0)"),
    Attack("read process 1", "attempt(call, 'process_vm_readv', 1, 0, 0, 0, 0, 0)"),
    Attack("double fork outlives its parent", DOUBLE_FORK + "print('contained')"),
    Attack("double fork outlives its time", DOUBLE_FORK + "time.sleep(99)", ("timeout",)),
    Attack("ignores signals", IGNORE_SIGNALS + "while True: pass", ("timeout",)),
    Attack("busy loop", "while True: pass", ("timeout",)),
    Attack("sleep", "time.sleep(99)", ("timeout",)),
    Attack("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    Attack("output", "while True: print('x' * 1000)", ("output",)),
    Attack("error output", "while True: os.write(2, b'x' * 1000)", ("output",)),
    Attack(
        "deep recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        ("exited", "signalled", "memory", "timeout"),
    ),
    Attack("segfault", "ctypes.string_at(0)", ("signalled",)),
    Attack("smashed memory", "ctypes.memset(ctypes.create_string_buffer(8), 65, 1 << 24)", ("signalled",)),
    Attack("mount", "attempt(call, 'mount', b'tmpfs', b'/box', b'tmpfs', 0, None)"),
    Attack("unmount", "attempt(call, 'umount2', b'/', 2); attempt(call, 'umount2', b'/box', 2)"),
    Attack("chroot", "attempt(os.chroot, '/box'); os.chdir('/'); os.chdir('../../..'); attempt(os.stat, 'home')"),
    Attack("new namespaces", "attempt(call, 'unshare', 0x10000000); attempt(call, 'setns', 0, 0)"),
    Attack("clone into a namespace", f"attempt(call, 'syscall', {CLONE}, 0x10000011, 0, 0, 0, 0)"),
    Attack("become root", "attempt(os.setuid, 0); attempt(os.setgroups, [0]); attempt(os.setgid, 0)"),
    Attack("device node", "attempt(os.mknod, 'sda', 0o60600, os.makedev(8, 0))"),
    Attack("interpreter's folder", "attempt(open, os.__file__, 'a'); attempt(os.mkdir, os.__file__[:-5] + 'x')"),
    Attack("root folder", "attempt(os.mkdir, '/x'); attempt(os.chmod, '/usr', 0o777); attempt(os.remove, '/tmp')"),
    Attack("program of its own", OWN_PROGRAM),
    Attack("io_uring", "attempt(call, 'syscall', 425, 8, ctypes.create_string_buffer(120))"),
    Attack("raise its limits", "attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))"),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Things of the machine worth stealing: a secret, services, a variable, an open file. Checked at the end."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text(SECRET)
    folder.chmod(0o755)
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        datagrams.bind(tcp.getsockname())
        unix, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        unix.bind(str(folder / "socket"))
        abstract.bind("\0" + MARK)
        inheritable = os.open(folder / "secret", os.O_RDONLY)
        os.set_inheritable(inheritable, True)
        stack.callback(os.close, inheritable)
        for server in (unix, abstract):
            server.listen()
        os.environ["PRACTICUM_SECRET"] = SECRET
        stack.callback(os.environ.pop, "PRACTICUM_SECRET")
        yield [str(tcp.getsockname()[1]), str(folder), str(os.getpid()), MARK]
        for server in (tcp, datagrams, unix, abstract):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(1) if server is datagrams else server.accept()


def attack(code: str, host: list[str]) -> Outcome:
    return Sandbox(LIMITS).run({"main.py": PRELUDE + code}, ["main.py", *host])


@pytest.fixture(scope="module", autouse=True)
def before() -> None:
    """Other tests of this session may have a Ray running."""
    BEFORE.update(process.pid for process in psutil.Process().children(recursive=True))


def left_over() -> list[psutil.Process]:
    mine = [process for process in psutil.process_iter(["cmdline"]) if MARK in (process.info["cmdline"] or [])]
    unseen = [process for process in psutil.Process().children() if process.pid not in BEFORE]
    while unseen:  # what others have started meanwhile, such as the workers of a Ray, is theirs
        process = unseen.pop()
        mine.append(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            unseen += process.children()
    return [process for process in mine if process.pid != os.getpid()]


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_contained(case: Attack, host: list[str]) -> None:
    began = time.monotonic()
    outcome = attack(case.code, host)
    assert outcome.kind in case.kinds, outcome
    assert b"ESCAPED" not in outcome.stdout, outcome
    assert SECRET.encode() not in outcome.stdout + outcome.stderr
    if case.kinds == ("exited",):
        assert outcome.code == 0 and b"contained" in outcome.stdout, outcome
    assert len(outcome.stdout) <= LIMITS.output_kb << 10 >= len(outcome.stderr)
    assert time.monotonic() - began < 30
    assert left_over() == []


def test_what_one_case_leaves_is_gone_in_the_next(host: list[str]) -> None:
    code = PRELUDE + (
        "print(os.listdir('.'), os.listdir('/tmp'))\n"
        "os.remove('main.py'); os.symlink(host['folder'] + '/secret', 'main.py')\n"
        "os.symlink('/etc', '/tmp/etc')\n"
        "os.fork() or time.sleep(99)\n"
    )
    outcomes = list(Sandbox(LIMITS).run_each({"main.py": code}, ["main.py", *host], [b""] * 3))
    assert [outcome.stdout for outcome in outcomes] == [b"['main.py'] []\n"] * 3


def test_no_capability_and_nobodys_identity(host: list[str]) -> None:
    code = (
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); data = (ctypes.c_uint32 * 6)()\n"
        "call('capget', header, data)\n"
        "print(list(data), os.getresuid(), os.getresgid(), libc.prctl(39, 0, 0, 0, 0))\n"
    )
    outcome = attack(code, host)
    assert outcome.stdout.decode().strip() == f"{[0] * 6} {(65534,) * 3} {(65534,) * 3} 1", outcome


def test_afterwards_the_machine_is_as_before(host: list[str]) -> None:
    assert left_over() == []
    folder = Path(host[1])
    assert sorted(path.name for path in folder.iterdir()) == ["secret", "socket"]
    assert (folder / "secret").read_text() == SECRET
    assert not (Path(os.__file__).parent / "x").exists()
    assert Sandbox(LIMITS).run({}, ["-c", "print(2 ** 10)"]).stdout == b"1024\n"
