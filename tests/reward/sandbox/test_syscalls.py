"""A small interpreter of its instructions reads the filter back, so both machines can be checked on one."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from practicum.reward.sandbox import syscalls

ERROR = 0x00050000


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    data = struct.pack(
        "=IIQ6Q", number, arch or syscalls.AUDIT_ARCH[machine], 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = list(struct.iter_unpack("=HBBI", syscalls.build_filter(machine)))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x06:
                return int(value)
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
                at += if_true if holds else if_false
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("machine", syscalls.AUDIT_ARCH)
def test_denied_calls_fail_and_others_pass(machine: str) -> None:
    which = list(syscalls.AUDIT_ARCH).index(machine)
    denied = {numbers[which] for numbers in syscalls.DENIED.values()} - {None}
    special = {numbers[which] for numbers in (syscalls.CLONE, syscalls.CLONE3, syscalls.SOCKET, syscalls.MMAP)}
    assert not denied & special
    for number in range(470):
        expected = ERROR | errno.EPERM if number in denied else syscalls.ALLOW
        if number not in special:
            assert decide(machine, number) == expected, number


@pytest.mark.parametrize("machine", syscalls.AUDIT_ARCH)
def test_some_calls_depend_on_their_arguments(machine: str) -> None:
    which = list(syscalls.AUDIT_ARCH).index(machine)
    assert decide(machine, syscalls.CLONE3[which]) == ERROR | errno.ENOSYS
    assert decide(machine, syscalls.CLONE[which], 17) == syscalls.ALLOW
    for flag in (0x20000, 0x10000000, 0x40000000):
        assert decide(machine, syscalls.CLONE[which], 17 | flag) == ERROR | errno.EPERM
    assert decide(machine, syscalls.SOCKET[which], socket.AF_UNIX) == syscalls.ALLOW
    for family in (socket.AF_INET, socket.AF_INET6, 16, 40):
        assert decide(machine, syscalls.SOCKET[which], family) == ERROR | errno.EACCES
    shared, private, anonymous = 1, 2, 0x20
    assert decide(machine, syscalls.MMAP[which], 0, 4096, 3, private | anonymous) == syscalls.ALLOW
    assert decide(machine, syscalls.MMAP[which], 0, 4096, 3, shared) == syscalls.ALLOW
    assert decide(machine, syscalls.MMAP[which], 0, 4096, 3, shared | anonymous) == ERROR | errno.EPERM


def test_another_machines_calls_kill() -> None:
    i386 = 0x40000003
    assert decide("x86_64", 1, arch=i386) == syscalls.KILL
    assert decide("x86_64", syscalls.X32 | 1) == syscalls.KILL
    assert decide("aarch64", 1, arch=syscalls.AUDIT_ARCH["x86_64"]) == syscalls.KILL
