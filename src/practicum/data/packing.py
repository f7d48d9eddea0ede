"""Packing of samples of many lengths into micro-batches of few, full rows.

    plan_micro_batches   which samples go into which micro-batch of which rank: balanced, the same number for each rank
    pack                 one micro-batch: samples laid end to end in rows, with positions that restart at each sample

Attention keeps the samples of a row apart by the restarting positions. Padding exists only here, at the end of rows.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.types import Sample


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, packing: bool = True
) -> list[list[list[int]]]:
    """Return indices by rank and micro-batch: about the fewest that, packed, stay within `max_tokens`, evenly filled.

    Every rank gets the same number of micro-batches, since collectives inside them must pair up; when the samples
    do not go round, the last ones are empty.
    """
    if max(lengths) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit in a micro-batch of {max_tokens}")

    def fits(per_rank: int) -> bool:
        bins = _spread(lengths, per_rank * num_ranks)
        return all(_packed_tokens([lengths[i] for i in members], packing) <= max_tokens for members in bins)

    # The fewest that fit, between as many as the bare tokens need and one for each sample.
    fewest, most = max(1, -(-sum(lengths) // (max_tokens * num_ranks))), -(-len(lengths) // num_ranks)
    per_rank = fewest + bisect_left(range(fewest, most), True, key=fits)
    bins = _spread(lengths, per_rank * num_ranks)
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _spread(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Put each, longest first, into the bin with the fewest tokens: the sums come out nearly equal."""
    heap = [(0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, index = heapq.heappop(heap)
        bins[index].append(sample)
        heapq.heappush(heap, (tokens + lengths[sample], index))
    return [sorted(members) for members in bins]


def _packed_tokens(lengths: Sequence[int], packing: bool) -> int:
    return len(fill_rows(lengths, packing)) * max(lengths, default=0)


def fill_rows(lengths: Sequence[int], packing: bool = True) -> list[list[int]]:
    """Return the indices of the sequences in each row: best fit, longest first. No row is longer than the longest."""
    if not packing:
        return [[index] for index in range(len(lengths))]
    width = max(lengths, default=0)
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # space left in a row, and the row; sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        tightest = bisect_left(spaces, (length, 0))
        if tightest < len(spaces):
            space, row = spaces.pop(tightest)
        else:
            space, row = width, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(spaces, (space - length, row))
    return rows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of a micro-batch, and where each learnt token is predicted: one position before its own."""

    input_ids: NDArray[np.int64]  # [rows, width]
    starts: NDArray[np.int64]  # [samples] index into the flattened rows of each sample's first token
    position_ids: NDArray[np.int64]  # [rows, width], restarting at each sample
    predict_at: NDArray[np.int64]  # [learnt] index into the flattened rows of the position that predicts the token
    targets: NDArray[np.int64]  # [learnt] the token there
    sequences: NDArray[np.int64]  # [learnt] the index of its sample
    rollout_log_probs: NDArray[np.float32]  # [learnt]
    staleness: NDArray[np.int32] | None = None  # [learnt], where the step is known
    reference_log_probs: NDArray[np.float32] | None = None  # [learnt]; where samples have them, as the next three
    advantages: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of learnt tokens of each of [samples]."""
        return np.bincount(self.sequences, minlength=len(self.starts))


def pack(samples: Sequence[Sample], packing: bool = True, *, step: int | None = None, pad_id: int = 0) -> MicroBatch:
    """Lay samples out for one forward pass. Learnt tokens are in the order of the samples given.

    Several samples share a row unless `packing` is off, for models that do not support it. With `step`, the step that
    learns from the samples, their staleness is given too.

    Without samples there is one row of one pad token and nothing learnt: it costs next to nothing and keeps a rank in
    step with the others.
    """
    rows = fill_rows([sample.num_tokens for sample in samples], packing) or [[]]
    width = max((sample.num_tokens for sample in samples), default=1)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    starts = [0] * len(samples)
    for row, members in enumerate(rows):
        column = 0
        for index in members:
            sample = samples[index]
            split, end = column + len(sample.prompt_ids), column + sample.num_tokens
            input_ids[row, column:split] = sample.prompt_ids
            input_ids[row, split:end] = sample.token_ids
            position_ids[row, column:end] = np.arange(end - column)
            starts[index] = row * width + column
            column = end
        # Padding is one more sample in a shared row, and the rest of the only one in a row of its own.
        position_ids[row, column:] = np.arange(width - column) + (0 if packing else column)
    learnt = [np.flatnonzero(sample.loss_mask) for sample in samples]

    def per_token(parts: Iterable[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        chosen = [part[at] for part, at in zip(parts, learnt, strict=True)]
        return np.concatenate([np.empty(0, dtype), *chosen]).astype(dtype)

    def filled_in(name: str) -> NDArray[np.float32] | None:
        there = [part for sample in samples if (part := getattr(sample, name)) is not None]
        assert len(there) in (0, len(samples)), f"all samples of a micro-batch have {name}, or none"
        return per_token(there, np.float32) if len(there) == len(samples) else None

    before = (
        start + len(sample.prompt_ids) - 1 + np.arange(len(sample.token_ids))
        for start, sample in zip(starts, samples, strict=True)
    )
    return MicroBatch(
        input_ids=input_ids,
        starts=np.array(starts, np.int64),
        position_ids=position_ids,
        predict_at=per_token(before, np.int64),
        targets=per_token((sample.token_ids for sample in samples), np.int64),
        sequences=np.repeat(np.arange(len(samples)), [len(at) for at in learnt]),
        rollout_log_probs=per_token((sample.log_probs for sample in samples), np.float32),
        staleness=None if step is None else per_token((sample.staleness(step) for sample in samples), np.int32),
        reference_log_probs=filled_in("reference_log_probs"),
        advantages=filled_in("advantages"),
        values=filled_in("values"),
        returns=filled_in("returns"),
    )
