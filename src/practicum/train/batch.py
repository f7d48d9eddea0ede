"""What a rank is given to learn from."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.algo import Totals
from practicum.data import MicroBatch
from practicum.types import TrainingSample


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one optimizer update."""

    micro_batches: list[list[TrainingSample]]
    totals: Totals  # over all ranks

    def __reduce__(self) -> Any:
        # As one piece: Ray has its own work with every array.
        return _whole_mini_batch, (pickle.dumps(self.micro_batches, protocol=5), self.totals)


def _whole_mini_batch(packed: bytes, totals: Totals) -> MiniBatch:
    return MiniBatch(pickle.loads(packed), totals)


def totals_of(samples: Iterable[TrainingSample], max_tokens: int) -> Totals:
    """Of a mini-batch, all ranks together."""
    lengths = [int(item.sample.loss_mask.sum()) for item in samples]
    return Totals(sum(lengths), sum(length > 0 for length in lengths), max_tokens)


def on_device(array: NDArray[Any] | None, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device)


def model_inputs(micro: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """What a forward pass is asked with, its last two parts being where and for which tokens."""
    arrays = (micro.input_ids, micro.position_ids, micro.predict_at, micro.targets)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def spans_of(position_ids: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Where sequences end in the flattened rows, which begin with position 0 each: for layers that ask for it."""
    ends = np.append(np.flatnonzero(position_ids.ravel() == 0), position_ids.size)
    return {"ends": torch.from_numpy(ends.astype(np.int32)).to(device), "longest": int(np.diff(ends).max())}


def by_place(
    samples: Sequence[TrainingSample], micro: MicroBatch, found: Tensor
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """What was found for each learnt token, back with its sample: [answer], no number where nothing is learnt."""
    parts = np.split(found.float().cpu().numpy(), np.cumsum(micro.lengths)[:-1]) if samples else []
    for item, part in zip(samples, parts, strict=True):
        whole = np.full(len(item.sample.token_ids), np.nan, np.float32)
        whole[item.sample.loss_mask] = part
        yield item.place, whole
