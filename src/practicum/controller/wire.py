"""How arguments travel to a worker.

    driver: pack ── payload (pickle) + buffers (NumPy memory, not copied) ──▶ Ray's object store ──▶ worker: unpack

Everything is packed before anything is sent: an argument that cannot travel is an error at the call, when no rank has
started yet. Arrays arrive as read-only views of shared memory. A future among the arguments travels as a `Slot`; Ray
brings the replies it stands for from worker to worker, and the slot is filled on arrival.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import cloudpickle

from practicum.errors import CallError

Payload = bytes | list[Any]
"""The pickle alone, or the pickle followed by its buffers."""

# What Ray sends along with a call; larger arguments go through the object store, where one copy serves a whole node.
INLINE_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the replies `first` to `last` of those that come along with the call, put together by `gather`."""

    first: int
    last: int
    gather: Callable[[list[Any]], Any]

    def fill(self, replies: Sequence[Any]) -> Any:
        return self.gather(list(replies[self.first : self.last]))


def pack(value: Any) -> Payload:
    """Raises whatever pickling the value raises."""
    buffers: list[pickle.PickleBuffer] = []
    payload: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [payload, *(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)] if buffers else payload


def unpack(payload: Payload) -> Any:
    if isinstance(payload, bytes):
        return pickle.loads(payload)
    return pickle.loads(payload[0], buffers=payload[1:])


def num_bytes(payload: Payload) -> int:
    parts: Sequence[Any] = [payload] if isinstance(payload, bytes) else payload
    return sum(len(part) for part in parts)


def pack_arguments(arguments: Any, what: str, by_name: Callable[[], Mapping[str, Any]]) -> Payload:
    """Pack, or name the argument of `what` that cannot be. `by_name` returns the arguments under their names."""
    try:
        return pack(arguments)
    except Exception as error:  # an object's own pickling may raise anything
        culprit, reason = _culprit(by_name(), error)
        raise CallError(
            f"{culprit} of {what} cannot be sent to another process: {type(reason).__name__}: {reason}"
        ) from error


def _culprit(by_name: Mapping[str, Any], error: Exception) -> tuple[str, Exception]:
    for name, value in by_name.items():
        try:
            pack(value)
        except Exception as reason:  # as above
            return f"argument {name!r}", reason
    return "an argument", error


def unpack_arguments(
    shared: Payload = b"", own: Payload = b"", *replies: Any
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """`shared` are the arguments all ranks get, `own` is the first one where each rank has its own; `replies` of other
    workers fill the slots among them."""
    args: list[Any] = [unpack(own)] if own else []
    kwargs: Mapping[str, Any] = {}
    if shared:
        more, kwargs = unpack(shared)
        args.extend(more)
    if not replies:
        return args, kwargs

    def filled(value: Any) -> Any:
        return value.fill(replies) if isinstance(value, Slot) else value

    return [filled(value) for value in args], {name: filled(value) for name, value in kwargs.items()}
