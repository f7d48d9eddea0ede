"""How `scatter` cuts a batch along its first axis and joins the replies again. Nothing is padded, nothing reordered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from practicum.errors import CallError, ReplyError

B = TypeVar("B")


def split_batch(batch: B, parts: int) -> list[B]:
    """Contiguous shards whose sizes differ by at most one; some are empty when there are fewer items than parts.

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


def join_batches(replies: Sequence[B]) -> B:
    """Replies end to end, in order, in the form they have: lists, arrays, mappings of these; None if all are None."""
    first: Any = replies[0]
    joined: Any
    if any(type(reply) is not type(first) for reply in replies):
        kinds = ", ".join(sorted({type(reply).__name__ for reply in replies}))
        raise ReplyError(f"replies of different types cannot be joined: {kinds}")
    if first is None:
        joined = None
    elif type(first) is np.ndarray:  # its subclasses would lose what they add
        try:
            joined = np.concatenate(replies)  # type: ignore[arg-type]
        except ValueError as error:
            raise ReplyError(f"replies cannot be joined: {error}") from None
    elif isinstance(first, list):
        joined = list(itertools.chain.from_iterable(replies))  # type: ignore[arg-type]
    elif isinstance(first, Mapping):
        if any(reply.keys() != first.keys() for reply in replies):  # type: ignore[attr-defined]
            raise ReplyError("replies with different keys cannot be joined")
        joined = {key: join_batches([reply[key] for reply in replies]) for key in first}  # type: ignore[index]
    else:
        raise ReplyError(
            f"replies of type {type(first).__name__} cannot be joined: return a list or an array, "
            "or call scatter_with and give it a gather of your own"
        )
    return joined  # type: ignore[no-any-return]


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
