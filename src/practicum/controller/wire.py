"""How a batch is cut and joined, and how arguments travel to a worker.

    driver: pack ── payload (pickle) + buffers (NumPy memory, not copied) ──▶ Ray's object store ──▶ worker: unpack

A batch is cut along its first axis. Nothing is padded, nothing reordered. Everything is packed before anything is sent:
an argument that cannot travel is an error at the call, when no rank has started yet. Arrays arrive as read-only views
of shared memory. A future among the arguments travels as a `Slot`; Ray brings the replies it stands for from worker to
worker, and the slot is filled on arrival.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from ray import cloudpickle

from practicum.errors import CallError, ReplyError

B = TypeVar("B")

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
    """Pickle a value, with its arrays beside it uncopied. Raises whatever its pickling raises."""
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
    """Pack the arguments of `what`, or name the one that cannot be pickled; `by_name` returns them by name."""
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
    """Return positional and keyword arguments. `shared` are those all ranks get, `own` is the first one where each rank
    has its own; `replies` of other workers fill the slots among them."""
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


def split_batch(batch: B, parts: int) -> list[B]:
    """Return contiguous shards whose sizes differ by at most one; some are empty if items are fewer than parts.

    A batch is a list or another sequence, an array, or a mapping of such things of the same length.
    """
    split: Any
    if isinstance(batch, Mapping):
        lengths = {key: _length(value, f"entry {key!r} of the batch") for key, value in batch.items()}
        if len(set(lengths.values())) > 1:
            raise CallError(f"the entries of the batch differ in length and cannot be split together: {lengths}")
        columns = {key: split_batch(value, parts) for key, value in batch.items()}
        split = [{key: column[part] for key, column in columns.items()} for part in range(parts)]
        return list(split)
    size, extra = divmod(_length(batch, "the batch"), parts)
    ends = list(itertools.accumulate(size + (part < extra) for part in range(parts)))
    sliceable: Any = batch
    return [sliceable[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def join_batches(replies: Sequence[Any]) -> Any:
    """Join replies in order: lists, arrays, or mappings of these. Return None if all are None."""
    first = replies[0]
    if any(type(reply) is not type(first) for reply in replies):
        kinds = ", ".join(sorted({type(reply).__name__ for reply in replies}))
        raise ReplyError(f"replies of different types cannot be joined: {kinds}")
    if first is None:
        return None
    if type(first) is np.ndarray:  # its subclasses would lose what they add
        try:
            return np.concatenate(replies)
        except ValueError as error:
            raise ReplyError(f"replies cannot be joined: {error}") from None
    if isinstance(first, list):
        return list(itertools.chain.from_iterable(replies))
    if isinstance(first, Mapping):
        if any(reply.keys() != first.keys() for reply in replies):
            raise ReplyError("replies with different keys cannot be joined")
        return {key: join_batches([reply[key] for reply in replies]) for key in first}
    raise ReplyError(
        f"replies of type {type(first).__name__} cannot be joined: return a list or an array, "
        "or call scatter_with and give it a gather of your own"
    )


def _length(batch: Any, what: str) -> int:
    try:
        if isinstance(batch, str | bytes) or hasattr(batch, "_fields"):
            raise TypeError("it is one item")
        length = len(batch)
        batch[:0]
    except (TypeError, KeyError, IndexError) as error:
        raise CallError(
            f"{what}, of type {type(batch).__name__}, cannot be split: {error}. Pass a list, an array or a mapping of "
            "these, or call scatter_with and give it a split of your own"
        ) from None
    return length
