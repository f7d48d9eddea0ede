"""The engine that writes with transformers' own `generate`: runs every causal LM transformers has, at its pace.

Tokens are drawn by a logits processor of ours, which hands `generate` a row with one possible token left. So each
sequence has its own random numbers, and log-probs are kept as they arise instead of storing all scores. When a row ends
is ours to say too: one batch may hold answers that were begun before, and others may be aborted between two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from practicum.models import DTYPES, resolve_device
from practicum.rollout.engine.loop import LocalRollout
from practicum.rollout.engine.model import EngineModel
from practicum.rollout.engine.sampling import draw_each
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engines import EngineSettings
from practicum.types import SamplingParams


class HFRollout(LocalRollout):
    """Writes `max_batch` answers at a time, fewer where with their prompts they could be over `max_batch_tokens`."""

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        max_batch_tokens: int | None = None,
        stays_loaded: bool = False,
    ) -> None:
        super().__init__(partial(EngineModel, model_path, device=device, dtype=dtype, stays_loaded=stays_loaded))
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens
        self._queue: list[Sequence] = []
        self._rows: list[Sequence | None] = []  # of the batch that is being written; None where one has ended
        self._params: list[SamplingParams] = []  # of each row
        self._drawn: tuple[list[int], list[float]] = [], []  # tokens and log-probs of the rows, as they were drawn last
        # A model's saved generation settings (penalties, its own temperature) would bend what `draw_each` decides.
        pad_id = self.model.tokenizer.pad_token_id
        self.model.module.generation_config = GenerationConfig(pad_token_id=pad_id, do_sample=False)

    @classmethod
    def of(cls, settings: EngineSettings) -> HFRollout:
        return cls(
            settings.model_path,
            device=resolve_device(settings.device),
            dtype=DTYPES[settings.dtype],
            max_batch=settings.max_batch,
            max_batch_tokens=settings.max_batch_tokens,
            stays_loaded=settings.stays_loaded,
        )

    @property
    def num_running(self) -> int:
        return sum(row is not None for row in self._rows)

    # In the engine's thread

    @torch.no_grad()
    def _step(self) -> None:
        """Write one batch."""
        batch = self._next_batch()
        self._rows, self._params = [*batch], [sequence.params for sequence in batch]
        input_ids, mask = _left_padded([sequence.ids for sequence in batch], self.model.tokenizer.pad_token_id)
        self.model.module.generate(
            torch.from_numpy(input_ids).to(self.model.device),
            attention_mask=torch.from_numpy(mask).to(self.model.device),
            max_new_tokens=max(sequence.max_tokens - sequence.num_tokens for sequence in batch),
            logits_processor=LogitsProcessorList([self._draw]),
            stopping_criteria=StoppingCriteriaList([self._take]),
        )
        self._rows = []

    def _next_batch(self) -> list[Sequence]:
        """Take the answers with the parameters of the first that waits, as many as a batch may have."""
        same = [sequence for sequence in self._queue if sequence.params == self._queue[0].params]
        if self._max_batch_tokens is not None:
            same.sort(key=lambda sequence: sequence.max_tokens)
        batch: list[Sequence] = []
        for sequence in same[: self._max_batch]:
            # Sorted, so that this one would be the longest.
            if batch and (len(batch) + 1) * sequence.max_tokens > (self._max_batch_tokens or math.inf):
                break
            batch.append(sequence)
        taken = set(batch)
        self._queue = [sequence for sequence in self._queue if sequence not in taken]
        return batch

    def _draw(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token for each row; return scores that leave `generate` no other choice."""
        uniforms = torch.tensor([0.0 if row is None else row.uniform() for row in self._rows], device=scores.device)
        self._drawn = draw_each(scores, uniforms, self._params)
        tokens = torch.tensor(self._drawn[0], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[:, None], 0.0)

    def _take(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Take in the drawn tokens, and commands that came meanwhile; return which rows have ended."""
        ended = []
        for index, (row, token, log_prob) in enumerate(zip(self._rows, *self._drawn, strict=True)):
            if row is not None and self._push(row, token, log_prob):
                ended.append(row)
                self._rows[index] = None
        self._finish(ended)
        self._poll()
        self._deliver()
        return torch.tensor([row is None for row in self._rows], device=input_ids.device)

    def _add(self, sequences: list[Sequence]) -> None:
        self._queue += sequences

    def _remove(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        gone = set(sequences)
        ended = [sequence for sequence in (*self._rows, *self._queue) if sequence is not None and sequence in gone]
        self._rows[:] = [None if row in gone else row for row in self._rows]
        self._queue = [sequence for sequence in self._queue if sequence not in gone]
        return ended

    def _reset(self) -> None:
        self._rows = []

    @property
    def _has_work(self) -> bool:
        return bool(self._queue or self._rows)


def _left_padded(prompts: list[NDArray[np.int32]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    width = max(len(ids) for ids in prompts)
    input_ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, ids in enumerate(prompts):
        input_ids[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = 1
    return input_ids, mask
