"""Where cases run: a box of namespaces with a root of its own, or, for trusted code, a folder of the machine.

With it the calls to the kernel that Python 3.11 has no names for, and small files of /proc.

Runs inside a box's launcher, so it imports nothing but the standard library; so does `launcher`.
"""

from __future__ import annotations

import ctypes
import os
import resource
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
    """Read a small file; nothing when the process it is about is gone."""
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


WORK, TEMPORARY = "/box/work", "/box/tmp"

Spec = dict[str, Any]


def map_identity(uid: int, gid: int, proc: int) -> None:
    """Map the identity. In a new user namespace everybody is nobody, and the caller is called nobody too."""
    write_file("self/setgroups", "deny", proc)
    write_file("self/uid_map", f"{NOBODY} {uid} 1", proc)
    write_file("self/gid_map", f"{NOBODY} {gid} 1", proc)


def enter_namespaces() -> bool:
    """Return whether B keeps root over its mounts: root needs no user namespace for them. C gets one in any case."""
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and libc.unshare(flags) == 0:
        return True
    check("new namespaces", libc.unshare(flags | CLONE_NEWUSER))
    proc = os.open("/proc", os.O_RDONLY)
    map_identity(uid, gid, proc)
    os.close(proc)
    return False


def build_root(spec: Spec) -> int:
    """Move into a root of our own that holds only what the layout names. Returns a folder of the box's processes."""
    check("new mounts", libc.unshare(CLONE_NEWNS))
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", spec["stage"], "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.chdir(spec["stage"])
    os.mkdir("old")
    check("pivot_root", libc.pivot_root(b".", b"old"))
    os.chdir("/")
    for folder in ("/box", "/proc", "/dev", "/empty"):
        os.mkdir(folder)
    for source, target in spec["binds"]:
        bind(source, target, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for folder in spec["hidden"]:
        mount("/empty", folder, None, MS_BIND)
        restrict(folder, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for device in ("/dev/null", "/dev/random", "/dev/urandom"):
        bind(device, device, MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    for target, link in spec["links"]:
        if not os.path.lexists(link):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link)
    # Mounted while the old one is still in sight: the kernel wants that. Only this process keeps a way to it.
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    proc = os.open("/proc", os.O_RDONLY)
    check("unmount /proc", libc.umount2(b"/proc", MNT_DETACH))
    check("unmount the old root", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")
    restrict("/", MS_RDONLY | MS_NOSUID | MS_NODEV)
    check("host name", libc.sethostname(b"box", ctypes.c_size_t(3)))
    return proc


def bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir("/old" + source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount("/old" + source, target, None, MS_BIND | MS_REC)
    restrict(target, flags, AT_RECURSIVE)


class Box:
    """Runs cases inside the namespaces, as their process 1."""

    def __init__(self, spec: Spec, proc: int, root: bool) -> None:
        self.spec, self.limits, self.proc, self.root = spec, spec["limits"], proc, root
        self.mounted = False

    def fresh_folder(self) -> str:
        if self.mounted:
            check("unmount /box", libc.umount2(b"/box", MNT_DETACH))
        options = (
            f"size={self.limits['disk_mb']}m,nr_inodes={self.limits['num_files']},mode=755,uid={NOBODY},gid={NOBODY}"
        )
        mount("tmpfs", "/box", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        self.mounted = True
        for folder in (WORK, TEMPORARY):
            os.mkdir(folder, 0o700)
            os.chown(folder, NOBODY, NOBODY)
        return WORK

    def drop(self) -> None:
        """Drop all rights in C, before exec, by which a process that is not root loses all capabilities."""
        write_file("self/oom_score_adj", "1000", self.proc)
        if self.root:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            prctl("dumpable", PR_SET_DUMPABLE, 1)  # else its own uid_map belongs to root
            # Processes are counted per user and namespace: without one of its own, boxes would share the limit.
            check("new user namespace", libc.unshare(CLONE_NEWUSER))
            map_identity(NOBODY, NOBODY, self.proc)
        resource.setrlimit(resource.RLIMIT_NPROC, (self.limits["processes"],) * 2)
        prctl("no new privileges", PR_SET_NO_NEW_PRIVS, 1)
        install_filter(self.spec["filter"])

    def memory(self) -> int:
        """Return the bytes of all processes of the box but this one. Shared pages count for each that has them."""
        return sum(memory_of(f"{name}/status", self.proc) for name in os.listdir(self.proc) if name.isdigit())

    def kill_all(self) -> None:
        os.kill(-1, SIGKILL)  # one call reaches every process of the box but this one, those being forked too


class TrustedFolder:
    """Runs cases of trusted code without namespaces: this process collects its orphans, and kills what it can find."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.count = spec, 0
        prctl("subreaper", PR_SET_CHILD_SUBREAPER, 1)

    def fresh_folder(self) -> str:
        self.count += 1
        folder = f"{self.spec['folder']}/{self.count}"
        os.mkdir(folder, 0o700)
        return folder

    def drop(self) -> None:
        prctl("no new privileges", PR_SET_NO_NEW_PRIVS, 1)

    def memory(self) -> int:
        return 0

    def kill_all(self) -> None:
        parents = {int(name): parent_of(name) for name in os.listdir("/proc") if name.isdigit()}
        family = {os.getpid()}
        while found := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= found
        for pid in family - {os.getpid()}:
            try_kill(pid)


def try_kill(pid: int) -> None:
    try:
        os.kill(pid, SIGKILL)
    except ProcessLookupError:
        return
