"""The channel between processes of one machine: memory that the sender fills and the receivers map.

    sender     memory without a name ─ tensors end to end, a table of them, last of all the head ─▶ ticket
    receiver   /proc/<pid>/fd/<fd> ─ shared lock ─ head checked ─▶ tensors that are views of it

The memory has no name in any folder (memfd): the kernel frees it when the last process that has it is gone, however it
went, and the small /dev/shm of a container does not limit it. The lock lives as long as a mapping.
The sender fills the same memory again if no receiver has locked it, which spares new pages, and else takes
another: what is being read never changes. Only the newest version is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from practicum.errors import ResourceError
from practicum.weights.channel import (
    ChannelSettings,
    Deadline,
    Sender,
    Tensors,
    Ticket,
    as_bytes,
    describe,
    rebuilt,
)

_HEAD = struct.Struct("<16sqqq")  # sender, version, offset and length of the table
_ALIGNMENT = 64
_RETRY_S = 0.01


def is_available() -> bool:
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class ShmTicket(Ticket):
    channel: ClassVar[str] = "shm"
    pid: int
    fd: int
    sender: bytes

    def read(self, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        memory = self._mapped(Deadline(timeout_s))
        _, _, start, length = _HEAD.unpack_from(memory)
        table: list[Any] = json.loads(memory[start : start + length])
        # Torch keeps the mapping, and with it the lock, for as long as one of its tensors is there.
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        del memory
        yield from rebuilt(everything, table)

    def _mapped(self, deadline: Deadline) -> mmap.mmap:
        path = f"/proc/{self.pid}/fd/{self.fd}"
        again = "Have the trainer send its weights again."
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.failure(
                f"process {self.pid} that sent them is gone, has closed the channel, or is none of this machine's "
                f"({path}: {error.strerror}). {again}"
            ) from error
        try:
            self._lock(fd, deadline)
            head = os.pread(fd, _HEAD.size, 0)
            sender, version, start, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", -1, 0, 0)
            if sender != self.sender or version != self.version:
                there = f"version {version} is there" if sender == self.sender else "nothing whole is there"
                raise self.failure(f"they are no longer in memory ({there}). {again}")
            if os.fstat(fd).st_size < start + length:
                raise self.failure(f"the memory is shorter than it says. {again}")
            # Copy on write: no receiver can change what others read. It keeps a duplicate of `fd`.
            return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def _lock(self, fd: int, deadline: Deadline) -> None:
        """Wait for a shared lock: the sender holds its own only while it writes a later version."""
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if deadline.is_over:
                    raise self.failure(
                        f"the sender, process {self.pid}, was still writing a later one after {deadline.timeout_s:g} s."
                    ) from None
                time.sleep(_RETRY_S)


class ShmSender(Sender):
    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        if not is_available():
            raise ResourceError("channel 'shm' needs Linux (memfd_create and /proc): use channel 'collective'.")
        self._id = uuid.uuid4().bytes
        self._fd: int | None = None

    def _send(self, version: int, tensors: Tensors) -> ShmTicket:
        fd = self._locked_memory()
        try:
            os.pwrite(fd, bytes(_HEAD.size), 0)  # until all is there, no ticket fits
            table, end = [], _aligned(_HEAD.size)
            for name, tensor in tensors:
                data = as_bytes(tensor.to("cpu").contiguous())
                table.append([*describe(name, tensor), end])
                _write(fd, memoryview(cast(Any, data.numpy())), end)
                end = _aligned(end + len(data))
            written = json.dumps(table).encode()
            _write(fd, memoryview(written), end)
            os.ftruncate(fd, end + len(written))
            os.pwrite(fd, _HEAD.pack(self._id, version, end, len(written)), 0)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
        return ShmTicket(version, os.getpid(), fd, self._id)

    def _locked_memory(self) -> int:
        if self._fd is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._fd
            except BlockingIOError:
                self.close()  # it stays with those who read it
        self._fd = os.memfd_create("practicum-weights", os.MFD_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # where `__init__` failed, or the process ends
            self.close()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
