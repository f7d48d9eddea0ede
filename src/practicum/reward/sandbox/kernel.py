"""Calls to the kernel that Python 3.11 has no names for, and small files of /proc.

Runs inside a box's launcher, so it imports nothing but the standard library; so do `places` and `launcher`.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

SIGKILL, SIGCHLD = 9, 17
NOBODY = 65534

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2

libc = ctypes.CDLL(None, use_errno=True)


def check(what: str, result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    arguments = (*encoded[:3], ctypes.c_ulong(flags), encoded[3])
    check(f"mount {kind or source or ''} on {target}", libc.mount(*arguments))


def restrict(path: str, flags: int, how: int = 0) -> None:
    """Make a mount, with `AT_RECURSIVE` also those below it, read-only and so on."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # the low MOUNT_ATTR_* bits equal those of MS_*
    arguments = (AT_FDCWD, os.fsencode(path), how, ctypes.byref(attributes), ctypes.c_size_t(32))
    check(f"restrict {path}", libc.syscall(SYS_MOUNT_SETATTR, *arguments))


def prctl(what: str, option: int, value: int, pointer: Any = None) -> None:
    zero = ctypes.c_ulong(0)
    check(what, libc.prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero))


def write_file(path: str, text: str, folder: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_text(path: str, folder: int | None = None) -> bytes:
    """Empty when the process it is about is gone."""
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(fd, 8192)
    except ProcessLookupError:
        return b""
    finally:
        os.close(fd)


def parent_of(pid: str) -> int:
    fields = read_text(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def memory_of(path: str, folder: int) -> int:
    lines = read_text(path, folder).split(b"\n")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"VmRSS:", b"VmSwap:")))


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def install_filter(code: bytes) -> None:
    """Set the system-call filter of this process and all it will start. Cannot be undone."""
    instructions = ctypes.create_string_buffer(code)
    program = Filter(len(code) // 8, ctypes.addressof(instructions))
    prctl("system-call filter", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))
