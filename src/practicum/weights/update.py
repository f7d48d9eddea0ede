"""How weights reach the engines that write with them: what a trainer hands out, and what an engine takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """`shared` tensors are the trainer's own memory and change with its next update.

    Others are good until the next one is asked for: copy what you keep.
    """

    version: int
    tensors: Iterable[tuple[str, Tensor]]  # names and shapes as in the unsharded model
    shared: bool
    is_whole: bool = True
    """All weights. Else those that are not as in the model's files; or adapters alone, named as in a folder, for who is
    made to take them."""


class WeightSource(Protocol):
    """A worker that can publish its weights. With several ranks this is a collective: all of them call it."""

    def publish(self, version: int) -> WeightUpdate: ...
