"""What a rank is given to learn from, and what a forward pass needs of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.algo import Totals
from practicum.data import MicroBatch
from practicum.types import Sample


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The part of one rank in one optimizer update."""

    micro_batches: list[list[Sample]]
    totals: Totals  # over all ranks
    step_size: int = 0  # samples of the step, over all ranks and mini-batches


def totals_of(samples: Iterable[Sample], max_tokens: int) -> Totals:
    """Return the totals of a mini-batch, all ranks together."""
    lengths = [sample.num_learnt for sample in samples]
    return Totals(sum(lengths), sum(length > 0 for length in lengths), max_tokens)


def on_device(array: NDArray[Any] | None, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device)


def model_inputs(micro: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs of a forward pass, the last two of which say where tokens are predicted, and which."""
    arrays = (micro.input_ids, micro.position_ids, micro.predict_at, micro.targets)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def spans_of(position_ids: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return where sequences, which begin with position 0 each, end in the flattened rows: for layers that ask."""
    ends = np.append(np.flatnonzero(position_ids.ravel() == 0), position_ids.size)
    return {"ends": torch.from_numpy(ends.astype(np.int32)).to(device), "longest": int(np.diff(ends).max())}


def by_id(samples: Sequence[Sample], micro: MicroBatch, found: Tensor) -> dict[str, NDArray[np.float32]]:
    """Return what was found for each learnt token by the ids of the samples: [answer], NaN where nothing is learnt."""
    parts = np.split(found.float().cpu().numpy(), np.cumsum(micro.lengths)[:-1]) if samples else []
    arrays = {}
    for sample, part in zip(samples, parts, strict=True):
        array = np.full(len(sample.token_ids), np.nan, np.float32)
        array[sample.loss_mask] = part
        arrays[sample.id] = array
    return arrays
