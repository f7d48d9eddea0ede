"""Where cases run: a box of namespaces with a root of its own, or, for trusted code, a folder of the machine."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

from practicum.reward.sandbox.kernel import (
    AT_RECURSIVE,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    NOBODY,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    SIGKILL,
    check,
    install_filter,
    libc,
    memory_of,
    mount,
    parent_of,
    prctl,
    restrict,
    write_file,
)

WORK, TEMPORARY = "/box/work", "/box/tmp"

Spec = dict[str, Any]


def map_identity(uid: int, gid: int, proc: int) -> None:
    """In a new user namespace everybody is nobody, and the caller is called nobody too."""
    write_file("self/setgroups", "deny", proc)
    write_file("self/uid_map", f"{NOBODY} {uid} 1", proc)
    write_file("self/gid_map", f"{NOBODY} {gid} 1", proc)


def enter_namespaces() -> bool:
    """Whether B keeps root over its mounts. Root needs no user namespace for them; C gets one with its identity."""
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
        options = f"size={self.limits['disk']},nr_inodes={self.limits['inodes']},mode=755,uid={NOBODY},gid={NOBODY}"
        mount("tmpfs", "/box", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        self.mounted = True
        for folder in (WORK, TEMPORARY):
            os.mkdir(folder, 0o700)
            os.chown(folder, NOBODY, NOBODY)
        return WORK

    def drop(self) -> None:
        """In C, before exec. A process that is not root in its namespace loses all capabilities by exec."""
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
        """Bytes of all processes of the box but this one. Shared pages count for each that has them."""
        return sum(memory_of(f"{name}/status", self.proc) for name in os.listdir(self.proc) if name.isdigit())

    def kill_all(self) -> None:
        os.kill(-1, SIGKILL)  # one call reaches every process of the box but this one, those being forked too


class Yard:
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
