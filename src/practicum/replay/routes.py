"""Routes as they travel: coded for many samples at once, each sample's code readable on its own.

64 combinations of `bits` bits fill whole words, so every sample begins a new 64: what is cut out of the long code of
all is the code of that sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from practicum.replay.combinations import Combinations, Ids, combinations_of
from practicum.types import CodedRoutes, RoutedExperts

_GROUP = 64


def coded(routes: Sequence[RoutedExperts]) -> list[CodedRoutes]:
    """Return the coded routes of samples, all of one model."""
    if not routes:
        return []
    first = routes[0]
    k = first.experts.shape[2]
    codec = combinations_of(first.num_experts, k)
    parts: list[Ids] = []
    num_groups: list[int] = []
    for one in routes:
        rows = one.experts.reshape(-1, k)
        if not one.known.all():
            rows = np.where(np.repeat(one.known, len(one.layers))[:, None], rows, _blank(k, rows.dtype))
        num_groups.append(-(-len(rows) // _GROUP))
        parts += [rows, np.broadcast_to(_blank(k, rows.dtype), (num_groups[-1] * _GROUP - len(rows), k))]
    code = np.frombuffer(codec.encode(np.concatenate(parts)), np.uint8)
    codes = _split(code, codec, num_groups)
    return [CodedRoutes(own, one.layers, one.known, one.num_experts, k) for own, one in zip(codes, routes, strict=True)]


def decoded(routes: Sequence[CodedRoutes | RoutedExperts]) -> list[RoutedExperts]:
    """Return the routes again. What needs no decoding is left as it is."""
    codes = [one for one in routes if isinstance(one, CodedRoutes)]
    if not codes:
        return [one for one in routes if isinstance(one, RoutedExperts)]
    first = codes[0]
    codec = combinations_of(first.num_experts, first.k)
    num_rows = [len(one) * len(one.layers) for one in codes]
    num_groups = [-(-num // _GROUP) for num in num_rows]
    experts = codec.decode(_joined([one.code for one in codes], codec, num_groups), sum(num_groups) * _GROUP)
    starts = np.cumsum([0, *num_groups]) * _GROUP
    made = iter(
        RoutedExperts(
            experts[start : start + num].reshape(len(one), len(one.layers), one.k),
            one.layers,
            one.known,
            one.num_experts,
        )
        for one, start, num in zip(codes, starts.tolist(), num_rows, strict=False)
    )
    return [next(made) if isinstance(one, CodedRoutes) else one for one in routes]


def _blank(k: int, dtype: np.dtype[np.unsignedinteger]) -> Ids:
    """Return the combination that stands where nothing is known."""
    return np.arange(k).astype(dtype)


def _split(code: NDArray[np.uint8], codec: Combinations, num_groups: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Cut a code into those of samples. All first words of numbers come before all second ones."""
    pieces: list[list[NDArray[np.uint8]]] = [[] for _ in num_groups]
    for width in codec.widths:
        ends = np.cumsum(num_groups) * width * (_GROUP // 8)
        for own, piece in zip(pieces, np.split(code[: ends[-1]], ends[:-1]), strict=True):
            own.append(piece)
        code = code[ends[-1] :]
    return [np.concatenate(own) for own in pieces]


def _joined(codes: Sequence[NDArray[np.uint8]], codec: Combinations, num_groups: Sequence[int]) -> bytes:
    """Join the codes of samples to the one of all, as `_split` found it."""
    words: list[NDArray[np.uint8]] = []
    before = 0
    for width in codec.widths:
        for code, groups in zip(codes, num_groups, strict=True):
            words.append(np.split(code, [before * groups * _GROUP // 8, (before + width) * groups * _GROUP // 8])[1])
        before += width
    return np.concatenate(words).tobytes()
