"""Within one process: the engine takes the trainer's own tensors, and nothing is copied."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from practicum.weights.channel import ChannelSettings, Reader, Sender, Tensors, Ticket, lost


@dataclass(frozen=True, slots=True)
class SharedTicket(Ticket):
    channel: ClassVar[str] = "shared"
    pid: int
    sender: str


_OFFERED: dict[str, tuple[int, list[tuple[str, Tensor]]]] = {}  # sender -> version and tensors, in this process


class SharedSender(Sender[SharedTicket]):
    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._name = uuid.uuid4().hex

    def _send(self, version: int, tensors: Tensors) -> SharedTicket:
        _OFFERED[self._name] = version, list(tensors)
        return SharedTicket(version, os.getpid(), self._name)

    def close(self) -> None:
        _OFFERED.pop(self._name, None)


class SharedReader(Reader[SharedTicket]):
    def read(self, ticket: SharedTicket, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        if ticket.pid != os.getpid():
            raise lost(
                "shared",
                ticket.version,
                f"they are in process {ticket.pid} and this is {os.getpid()}. Use channel 'shm' on one machine, "
                "'collective' between machines.",
            )
        version, tensors = _OFFERED.get(ticket.sender, (None, []))
        if version != ticket.version:
            newest = "closed" if version is None else f"at version {version}"
            raise lost("shared", ticket.version, f"the sender is {newest} by now. Ask it for a new ticket.")
        yield from tensors
