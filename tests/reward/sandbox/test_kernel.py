from __future__ import annotations

import os

import pytest

from practicum.reward.sandbox import kernel


def test_a_failed_call_says_what_and_why() -> None:
    with pytest.raises(OSError, match="mount tmpfs on /no/such/folder: No such file"):
        kernel.mount("tmpfs", "/no/such/folder", "tmpfs", 0)


def test_reads_about_processes() -> None:
    proc = os.open("/proc", os.O_RDONLY)
    try:
        assert 1 << 20 < kernel.memory_of(f"{os.getpid()}/status", proc) < 1 << 40
        assert kernel.memory_of("999999999/status", proc) == 0
    finally:
        os.close(proc)
    assert kernel.parent_of(str(os.getpid())) == os.getppid()
    assert kernel.parent_of("999999999") == 0
