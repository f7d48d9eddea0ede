"""The sandbox as its callers see it: programs and their input go in, outcomes come out.

    sandbox = Sandbox(Limits(wall_s=5))
    outcome = sandbox.run({"main.py": "print(input())"}, ["main.py"], b"hello")

Each run is a fresh `python -I -S -B` in Linux namespaces of its own. Inside there is no network (not even loopback), no
file of the machine but the interpreter, its standard library and shared libraries (read-only), no environment, no
process and no open file of the caller, no capability, and nobody's identity. CPU, memory, processes, files, disk,
output and time are limited, and the box ends as a whole: with its program, at the first limit, and with whoever
started it, also by kill -9.

Memory is bounded twice: each process by RLIMIT_AS, all of them together by a watcher inside the box that adds up what
they hold every 50 ms; the disk is memory too, and comes on top. No control groups are needed: a grading machine seldom
hands them out.

What it does not contain: bugs of the kernel, and side channels such as the time other boxes take.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import platform
import select
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from practicum.config import Section
from practicum.errors import RewardError
from practicum.reward.sandbox import layout, syscalls

Kind = Literal["exited", "signalled", "timeout", "memory", "output"]

MODULES = ("isolation", "launcher")
# Code objects come first, then the request. Registered under their full names, the modules find each other.
BOOT = """
import marshal, sys
with open(0, "rb", closefd=False) as request:
    for name, code in marshal.load(request):
        module = sys.modules[name] = type(sys)(name)
        exec(code, module.__dict__)
    spec = marshal.load(request)
module.main(spec)
"""
START_S = 30.0  # on a machine with many boxes per core starting one may take seconds
END_S = 10.0
HOW_TO_ISOLATE = (
    "It needs Linux 5.14 or later with user namespaces. Ordinary users need kernel.unprivileged_userns_clone=1"
    " (Debian), user.max_user_namespaces > 0 and kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a"
    " container, start it with --privileged, or with --security-opt seccomp=unconfined, --security-opt"
    " systempaths=unconfined and --cap-add SYS_ADMIN. Only for code you would run yourself, set trusted: true."
)


class Limits(Section):
    wall_s: float = Field(default=4.0, gt=0)
    """Seconds by the clock that one run may take."""
    cpu_s: int = Field(default=4, ge=1)
    """CPU seconds that each process of a run may take."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory of one process, and of all processes of a run together."""
    disk_mb: int = Field(default=32, ge=1)
    """Room in the working folder, which is memory too; also the largest file."""
    num_files: int = Field(default=1024, ge=16)
    """Files and folders the working folder may hold."""
    processes: int = Field(default=32, ge=4)
    """Processes and threads alive at once; the box itself takes up to two of them."""
    open_files: int = Field(default=64, ge=16)
    """Files one process may have open."""
    output_kb: int = Field(default=1024, ge=1)
    """Output and error output, each; a program that writes more is stopped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `code` is its exit code, or the signal that ended it; None where a limit stopped it."""

    kind: Kind
    code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.kind == "exited" and self.code == 0

    @property
    def summary(self) -> str:
        """Describe the end in a few words, with the last line the program wrote to its error output."""
        words = {"exited": f"exit code {self.code}", "signalled": f"ended by signal {self.code}"}
        last = self.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        how = words.get(self.kind, f"stopped by the {'time' if self.kind == 'timeout' else self.kind} limit")
        return f"{how}: {last[:200]}" if last else how


class Sandbox:
    """Runs Python programs within limits; may be used by many threads and processes at once.

    `packages` lets programs import what is installed in this environment, read-only.

    `trusted` runs them WITHOUT a box: with limits on CPU, memory per process, file size, output and time, in a session
    of their own whose processes are killed at the end, and with an empty environment. It contains accidents, no more:
    the program has the network, all files and all rights of this user, may start as many processes as the user may,
    fill the disk, and signal or read any process of the user, this one too.
    """

    def __init__(self, limits: Limits | None = None, *, packages: bool = False, trusted: bool = False) -> None:
        self.limits = limits or Limits()
        self.packages = packages
        self.trusted = trusted
        if not trusted and (problem := isolation_problem()) is not None:
            raise RewardError(f"untrusted code cannot be isolated on this machine: {problem}. {HOW_TO_ISOLATE}")

    def run(self, files: Mapping[str, str | bytes], argv: Sequence[str], stdin: bytes = b"") -> Outcome:
        """Run `python *argv` in a folder with these files. RewardError when it could not be started."""
        with contextlib.closing(self.run_each(files, argv, [stdin])) as outcomes:
            return next(outcomes)

    def run_each(
        self, files: Mapping[str, str | bytes], argv: Sequence[str], stdins: Sequence[bytes]
    ) -> Generator[Outcome]:
        """The same once for each input, one after the other in one box, which costs less than a box for each.

        Each run has fresh processes and a fresh folder. Closing the generator ends the box.
        """
        contents = {checked(name): text.encode() if isinstance(text, str) else text for name, text in files.items()}
        with contextlib.ExitStack() as stack:
            folder = None
            if self.trusted:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="practicum-"))
            spec = request(self.limits, self.packages, folder)
            spec |= {"argv": spec["argv"] + list(argv), "files": contents, "stdins": list(stdins)}
            launcher = stack.enter_context(launch(spec))
            for _ in stdins:
                yield read_outcome(launcher, self.limits.wall_s + START_S)


def checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        raise ValueError(f"{name!r} is no file name inside the sandbox's working folder")
    return str(path)


def request(limits: Limits, packages: bool, folder: str | None) -> dict[str, Any]:
    """Return what the launcher needs to know, but for the program. Without a folder of the machine it makes a box."""
    plan = layout.plan(packages)
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads count as processes
    flags = ["-I", "-S", "-B", "-X", "utf8"]
    if packages:
        flags[0:1] = ["-s", "-P"]  # as -I, but with the one variable that is set here
        environment["PYTHONPATH"] = plan.packages if folder else layout.PACKAGES
    return {
        "folder": folder,
        "caller": os.getpid(),
        "stage": tempfile.gettempdir(),
        "binds": plan.binds,
        "links": plan.links,
        "hidden": plan.hidden,
        "filter": b"" if folder else syscalls.build_filter(platform.machine()),
        "limits": limits.model_dump(),
        "environment": environment,
        "argv": [plan.interpreter, *flags],
        "files": {},
        "stdins": [],
    }


@contextlib.contextmanager
def launch(spec: dict[str, Any]) -> Generator[subprocess.Popen[bytes]]:
    """Open a running launcher. When left, it and all that it started are gone."""
    lifeline_r, lifeline_w = os.pipe()
    try:
        # A file in memory: nothing can block on it, and it needs no name.
        with open(os.memfd_create("request"), "w+b") as file:
            file.write(launcher_code() + marshal.dumps(spec | {"lifeline": lifeline_r}))
            file.seek(0)
            process = subprocess.Popen(
                [layout.interpreter(), "-I", "-S", "-B", "-c", BOOT],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[lifeline_r],
                env={},
                cwd="/",
                start_new_session=True,
            )
        try:
            yield process
        finally:
            assert process.stdout is not None and process.stderr is not None
            os.close(lifeline_w)
            lifeline_w = -1
            process.stdout.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
            process.stderr.close()
    finally:
        os.close(lifeline_r)
        if lifeline_w >= 0:
            os.close(lifeline_w)


@cache
def launcher_code() -> bytes:
    folder = Path(__file__).parent
    names = [(f"{__package__}.{name}", folder / f"{name}.py") for name in MODULES]
    return marshal.dumps([(name, compile(path.read_text(), path.name, "exec")) for name, path in names])


def read_outcome(launcher: subprocess.Popen[bytes], timeout_s: float) -> Outcome:
    deadline = time.monotonic() + timeout_s
    size = int.from_bytes(read_exactly(launcher, 8, deadline), "little")
    status, *fields = marshal.loads(read_exactly(launcher, size, deadline))
    if status == "refused":
        raise RewardError(f"the sandbox could not be started: {fields[0]}")
    return Outcome(*fields)


def read_exactly(launcher: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert launcher.stdout is not None and launcher.stderr is not None
    fd, data = launcher.stdout.fileno(), bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise RewardError(
                "the sandbox gave no answer in time: the machine is overloaded, or its launcher is stopped"
            )
        chunk = os.read(fd, size - len(data))
        if not chunk:
            words = launcher.stderr.read().decode(errors="replace").strip()
            raise RewardError(f"the sandbox's launcher ended before its program: {words[-2000:] or 'it was killed'}")
        data += chunk
    return bytes(data)


@cache
def isolation_problem() -> str | None:
    """Return why programs cannot be isolated on this machine, found out by running one; None where they can."""
    if platform.system() != "Linux":
        return f"{platform.system()} has no namespaces"
    if platform.machine() not in syscalls.AUDIT_ARCH:
        return f"there is no system-call filter for {platform.machine()}"
    limits = Limits(wall_s=START_S)
    spec = request(limits, False, None)
    try:
        with launch(spec | {"argv": [*spec["argv"], "-c", "pass"], "stdins": [b""]}) as launcher:
            outcome = read_outcome(launcher, limits.wall_s + START_S)
    except RewardError as error:
        return str(error)
    return None if outcome.succeeded else f"an empty program failed ({outcome.summary})"
