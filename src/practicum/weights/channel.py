"""What every way for weights to travel has in common.

    trainer  invite(version) ─▶ ticket, before anything is sent: only where both sides must meet
             send(version, tensors) ─▶ ticket
    engine   read(ticket) ─▶ tensors, one after the other

A ticket is small and travels through whatever calls there are. So one order of calls suits every channel: invite, begin
to send, read with the invitation or else with the ticket that `send` returned.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from practicum.errors import RolloutError

Tensors = Iterable[tuple[str, Tensor]]
Complete = Callable[[Path], dict[str, Tensor]]
"""Puts into a folder what makes weights a model that can be loaded (its config, its tokenizer), and returns tensors
that are saved with it but never learnt."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where one version of the weights is to be had."""

    channel: ClassVar[str]
    version: int

    def call_off(self) -> None:
        """Somebody who was to come is gone: nobody is to wait for all any longer. Only where both sides meet."""


T = TypeVar("T", bound=Ticket)


def channel_timeout_s(call_timeout_s: float) -> float:
    """For one that is part of a call: it gives up well before the call does, and says who was late."""
    return min(300.0, call_timeout_s / 4)


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What senders need to know; each takes what is of use to it."""

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


class Sender(ABC, Generic[T]):
    """The trainer's end; with several ranks that of rank 0. Not for use from two threads at a time."""

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings
        self._newest = -1

    def invite(self, version: int, num_receivers: int | None = None) -> T | None:
        """What receivers need to know before `send`. None where they come after it, at any time.

        `num_receivers` is for one version; None: as the settings say.
        """
        return None

    def send(self, version: int, tensors: Tensors) -> T:
        """Returns when the trainer may change its weights again, `shared` ones apart."""
        if version < self._newest:
            raise RolloutError(
                f"weights of version {version} cannot be sent: version {self._newest} has been. Versions only grow."
            )
        ticket = self._send(version, tensors)
        self._newest = version
        return ticket

    @abstractmethod
    def _send(self, version: int, tensors: Tensors) -> T: ...

    @abstractmethod
    def close(self) -> None:
        """Give back what outlives the object. Receivers that read meanwhile may fail."""


class Reader(ABC, Generic[T]):
    """The engine's end."""

    @abstractmethod
    def read(self, ticket: T, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """All tensors of that version, or `RolloutError`. What it raises may come with any of them."""

    def close(self) -> None:
        """Let the sender go."""


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Not less than zero."""
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0


def lost(channel: str, version: int, what: str) -> RolloutError:
    """The error for a version that did not arrive; `what` says why and what to do."""
    return RolloutError(f"weights of version {version} by channel {channel!r}: {what}")


def describe(name: str, tensor: Tensor) -> list[Any]:
    """What a receiver must know to rebuild a tensor from its bytes; as JSON."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def from_bytes(memory: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """A view of that memory, which must begin at a multiple of the dtype's size."""
    return memory.view(getattr(torch, dtype)).view(shape)
