"""The parts that all weight channels share: how a version of the weights is sent, located and read.

    trainer  invite(version) ─▶ ticket, before anything is sent: only where both sides must meet
             send(version, tensors) ─▶ ticket
    engine   ticket.read() ─▶ tensors, one after the other

A ticket is small and travels through whatever calls there are. So one order of calls suits every channel: invite, begin
to send, read with the invitation or else with the ticket that `send` returned.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from practicum.errors import RolloutError

Tensors = Iterable[tuple[str, Tensor]]
Complete = Callable[[Path], dict[str, Tensor]]
"""Write into a folder what makes weights a model that can be loaded (its config, its tokenizer), and returns tensors
that are saved with it but never learnt."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the weights, as an engine takes it.

    `shared` tensors are the trainer's own memory and change with its next update. Others are good until the next one is
    asked for: copy what you keep.
    """

    version: int
    tensors: Tensors  # names and shapes as in the unsharded model
    shared: bool
    is_whole: bool = True
    """All weights. Else those that are not as in the model's files; or adapters alone, named as in a folder."""


class WeightSource(Protocol):
    """A worker that can publish its weights. With several ranks this is a collective: all of them call it."""

    def publish(self, version: int) -> WeightUpdate: ...


@dataclass(frozen=True, slots=True)
class Ticket(ABC):
    """The location of one version of the weights, and the way to read it."""

    channel: ClassVar[str]
    is_shared: ClassVar[bool] = False
    version: int

    @abstractmethod
    def read(self, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of that version. A `RolloutError` may come with any of them.

        Each is good until the next one is asked for, whose memory may be the same: copy what you keep.
        """

    def call_off(self) -> None:  # noqa: B027
        """End the wait for the invited receivers, since one of them is gone."""

    def failure(self, reason: str) -> RolloutError:
        """Return the error for a version that did not arrive; `reason` says why and what to do."""
        return not_arrived(self.channel, self.version, reason)


def channel_timeout_s(call_timeout_s: float) -> float:
    """Return the deadline of a channel within a call: before the call's own, since its error names the late rank."""
    return min(300.0, call_timeout_s / 4)


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """The settings of all senders; each reads those it needs."""

    timeout_s: float = 300.0
    """For one version, from the first byte to the last."""
    num_receivers: int = 1
    """collective: so many come for each version."""
    host: str = "127.0.0.1"
    """collective: the sender's machine, as the receivers know it."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """collective: nccl passes weights from GPU to GPU, each process on its own."""
    bucket_bytes: int = 32 << 20
    """collective: small tensors travel together, in buckets of this size."""
    folder: str | None = None
    """disk: where versions are put; its own for each run."""
    file_bytes: int = 1 << 30
    """disk: about how large one file becomes."""
    num_kept: int = 2
    """disk: versions that are kept, so that one may still be read while the next is written."""


class Sender(ABC):
    """The trainer's end of a channel; with several ranks that of rank 0. One thread at a time may use it."""

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings
        self._newest = -1

    def invite(self, version: int, num_receivers: int | None = None) -> Ticket | None:
        """Return what receivers need before `send`; None where they come after it, at any time.

        `num_receivers` is for one version; None: as the settings say.
        """
        return None

    def send(self, version: int, tensors: Tensors) -> Ticket:
        """Send the weights. The trainer may change them again when it returns, `shared` ones apart."""
        if version < self._newest:
            raise RolloutError(
                f"weights of version {version} cannot be sent: version {self._newest} has been. Versions only grow."
            )
        ticket = self._send(version, tensors)
        self._newest = version
        return ticket

    @abstractmethod
    def _send(self, version: int, tensors: Tensors) -> Ticket: ...

    @abstractmethod
    def close(self) -> None:
        """Give back what outlives the object. Receivers that read meanwhile may fail."""


class Deadline:
    """The end of the time for one version."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left, not less than zero."""
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0


def not_arrived(channel: str, version: int, reason: str) -> RolloutError:
    return RolloutError(f"weights of version {version} by channel {channel!r}: {reason}")


def describe(name: str, tensor: Tensor) -> list[Any]:
    """Return what a receiver must know to rebuild a tensor from its bytes, as JSON."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def rebuilt(memory: Tensor, table: Iterable[list[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the described tensors as views of the memory, where the last number of each description says they begin.

    Each must begin at a multiple of its dtype's size.
    """
    for name, dtype, shape, offset in table:
        num_bytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        yield name, memory[offset : offset + num_bytes].view(getattr(torch, dtype)).view(shape)
