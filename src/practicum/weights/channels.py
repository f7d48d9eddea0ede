"""The ways there are, which of them suits whom, and the engine's end of all of them.

shared       one process              nothing is copied
shm          one machine              one copy in, one out
collective   several machines         a broadcast
disk         only where asked for     files that are a model
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from practicum.errors import ConfigError
from practicum.weights import shm
from practicum.weights.channel import ChannelSettings, Complete, Reader, Sender, Ticket, lost
from practicum.weights.collective import CollectiveReader, CollectiveSender
from practicum.weights.disk import DiskReader, DiskSender
from practicum.weights.shared import SharedReader, SharedSender
from practicum.weights.update import WeightUpdate


@dataclass(frozen=True, slots=True)
class Channel:
    sender: Callable[[ChannelSettings, Complete | None], Sender[Any]]
    reader: Callable[[], Reader[Any]]
    is_shared: bool = False


CHANNELS: dict[str, Channel] = {
    "shared": Channel(lambda settings, _: SharedSender(settings), SharedReader, is_shared=True),
    "shm": Channel(lambda settings, _: shm.ShmSender(settings), shm.ShmReader),
    "collective": Channel(lambda settings, _: CollectiveSender(settings), CollectiveReader),
    "disk": Channel(DiskSender, DiskReader),
}


def open_sender(channel: str, settings: ChannelSettings, complete: Complete | None = None) -> Sender[Any]:
    """`complete` is for the disk, where weights alone are no model."""
    if channel not in CHANNELS:
        raise ConfigError(f"there is no weight channel {channel!r}; there are {', '.join(CHANNELS)}.")
    return CHANNELS[channel].sender(settings, complete)


@dataclass(frozen=True, slots=True)
class Place:
    """A process, as far as it matters who else can reach its memory."""

    machine: str
    pid: int

    @classmethod
    def here(cls) -> Place:
        try:
            # Processes see each other's memory if they are numbered alike: containers on one machine are apart.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            machine = f"{socket.gethostname()}/{platform.system()}"
        return cls(machine, os.getpid())


def choose(trainer: Place, engines: Sequence[Place]) -> str:
    """The shortest way that reaches all engines from the trainer's rank 0."""
    if all(engine == trainer for engine in engines):
        return "shared"
    if all(engine.machine == trainer.machine for engine in engines) and shm.is_available():
        return "shm"
    return "collective"


class WeightReceiver:
    """The engine's end: knows which version it has, and takes none that is older."""

    def __init__(self, timeout_s: float = 300.0, *, is_whole: bool = True) -> None:
        """`is_whole`: whether all weights are sent, or adapters alone."""
        self.version = -1
        """The last one that arrived whole."""
        self._timeout_s = timeout_s
        self._is_whole = is_whole
        self._readers: dict[str, Reader[Any]] = {}

    def receive(self, ticket: Ticket) -> WeightUpdate:
        """Tensors come as they are asked for. `RolloutError` at once or in their midst: an engine that has taken a
        part must not write until it has taken all of one version."""
        if ticket.version < self.version:
            raise lost(ticket.channel, ticket.version, f"this engine has version {self.version} already. Send a later.")
        if ticket.channel not in self._readers:
            self._readers[ticket.channel] = CHANNELS[ticket.channel].reader()
        tensors = self._readers[ticket.channel].read(ticket, self._timeout_s)
        return WeightUpdate(
            ticket.version, self._counted(ticket, tensors), CHANNELS[ticket.channel].is_shared, self._is_whole
        )

    def _counted(self, ticket: Ticket, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        num = 0
        for name, tensor in tensors:
            num += 1
            yield name, tensor
        if not num:
            raise lost(ticket.channel, ticket.version, "there is not one tensor in it. Send them again.")
        self.version = ticket.version

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
