"""The channels by name, which of them suits whom, and the engine's end of all of them.

shared       one process              nothing is copied
shm          one machine              one copy in, one out
collective   several machines         a broadcast
disk         only where asked for     files that are a model
"""

from __future__ import annotations

import os
import platform
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from practicum.errors import ConfigError
from practicum.weights import shm
from practicum.weights.channel import ChannelSettings, Complete, Sender, Tensors, Ticket, WeightUpdate
from practicum.weights.collective import CollectiveSender
from practicum.weights.disk import DiskSender

_SHARED: dict[str, tuple[int, list[tuple[str, Tensor]]]] = {}  # sender -> version and tensors, in this process


@dataclass(frozen=True, slots=True)
class SharedTicket(Ticket):
    """The trainer's own tensors, within one process: nothing is copied."""

    channel: ClassVar[str] = "shared"
    is_shared: ClassVar[bool] = True
    pid: int
    sender: str

    def read(self, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        if self.pid != os.getpid():
            raise self.failure(
                f"they are in process {self.pid} and this is {os.getpid()}. Use channel 'shm' on one machine, "
                "'collective' between machines."
            )
        version, tensors = _SHARED.get(self.sender, (None, []))
        if version != self.version:
            newest = "closed" if version is None else f"at version {version}"
            raise self.failure(f"the sender is {newest} by now. Ask it for a new ticket.")
        yield from tensors


class SharedSender(Sender):
    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._name = uuid.uuid4().hex

    def _send(self, version: int, tensors: Tensors) -> SharedTicket:
        _SHARED[self._name] = version, list(tensors)
        return SharedTicket(version, os.getpid(), self._name)

    def close(self) -> None:
        _SHARED.pop(self._name, None)


CHANNELS: dict[str, Callable[[ChannelSettings, Complete | None], Sender]] = {
    "shared": lambda settings, _: SharedSender(settings),
    "shm": lambda settings, _: shm.ShmSender(settings),
    "collective": lambda settings, _: CollectiveSender(settings),
    "disk": DiskSender,
}


def open_sender(channel: str, settings: ChannelSettings, complete: Complete | None = None) -> Sender:
    """Open the trainer's end of a channel; `complete` is for the disk, where weights alone are no model."""
    if channel not in CHANNELS:
        raise ConfigError(f"there is no weight channel {channel!r}; there are {', '.join(CHANNELS)}.")
    return CHANNELS[channel](settings, complete)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a process, by which others can tell whether they reach its memory."""

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
    """Return the shortest way that reaches all engines from the trainer's rank 0."""
    if all(engine == trainer for engine in engines):
        return "shared"
    if all(engine.machine == trainer.machine for engine in engines) and shm.is_available():
        return "shm"
    return "collective"


class WeightReceiver:
    """The engine's end: it knows which version it has, and takes none that is older."""

    def __init__(self, timeout_s: float = 300.0, *, is_whole: bool = True) -> None:
        """`is_whole`: whether all weights are sent, or adapters alone."""
        self.version = -1
        """The last one that arrived whole."""
        self._timeout_s = timeout_s
        self._is_whole = is_whole

    def receive(self, ticket: Ticket) -> WeightUpdate:
        """Return the update, whose tensors come as they are asked for.

        Raises `RolloutError` at once or in their midst: an engine that has taken a part must not write until it has
        taken all of one version.
        """
        if ticket.version < self.version:
            raise ticket.failure(f"this engine has version {self.version} already. Send a later.")
        return WeightUpdate(ticket.version, self._tensors(ticket), ticket.is_shared, self._is_whole)

    def _tensors(self, ticket: Ticket) -> Iterator[tuple[str, Tensor]]:
        is_empty = True
        for name, tensor in ticket.read(self._timeout_s):
            is_empty = False
            yield name, tensor
        if is_empty:
            raise ticket.failure("there is not one tensor in it. Send them again.")
        self.version = ticket.version
