"""The system-call filter of a box: a small BPF program, built by hand, for x86_64 and aarch64.

It is a second wall behind the namespaces, and the only one for three things they leave open: sockets of families that
know no network namespace (vsock reaches the host of a virtual machine), memory that no process shows as its own (memfd,
System V, anonymous shared mappings), and looking into another process of the same box.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name -> number on x86_64, number on aarch64; None where the machine has no such call.
DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
CLONE: Final = (56, 220)
CLONE3: Final = (435, 435)
SOCKET: Final = (41, 198)
MMAP: Final = (9, 222)

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
NEW_NAMESPACES: Final = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
SHARED_ANONYMOUS: Final = 0x01 | 0x20
AF_UNIX: Final = 1
X32: Final = 0x40000000  # the calls of the x32 ABI have numbers of their own

LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT = 0x15, 0x35, 0x45
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def build_filter(machine: str) -> bytes:
    """Return the instructions, ready for `prctl(PR_SET_SECCOMP)`, on a machine as `platform.machine()` names it."""
    which = list(AUDIT_ARCH).index(machine)
    code = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        code += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in DENIED.values():
        number = numbers[which]
        if number is not None:
            code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | errno.EPERM)]
    # Its flags lie behind a pointer; without it the C library uses clone.
    code += [(JUMP_EQUAL, 0, 1, CLONE3[which]), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    code += on_argument(CLONE[which], 0, [(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES)], errno.EPERM)
    code += on_argument(SOCKET[which], 0, [(JUMP_EQUAL, 1, 0, AF_UNIX)], errno.EACCES)
    shared = [(AND, 0, 0, SHARED_ANONYMOUS), (JUMP_EQUAL, 0, 1, SHARED_ANONYMOUS)]
    code += on_argument(MMAP[which], 3, shared, errno.EPERM)
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def on_argument(
    number: int, argument: int, test: list[tuple[int, int, int, int]], error: int
) -> list[tuple[int, int, int, int]]:
    """Check one call: refuse with `error` where `test` falls through, allow where it jumps one ahead."""
    load = (LOAD, 0, 0, ARGUMENTS + 8 * argument)
    body = [load, *test, (RETURN, 0, 0, ERROR | error), (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), number), *body]
