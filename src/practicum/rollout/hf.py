"""The engine that writes with transformers' own `generate`: runs every causal LM transformers has, at its pace.

Tokens are drawn by a logits processor of ours, which hands `generate` a row with one possible token left. So each
sequence has its own random numbers, and log-probs are kept as they arise instead of storing all scores. When a row ends
is ours to say too: one batch may hold answers that were begun before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from practicum.rollout.answers import Ending, sample_of, untouched, written_ids
from practicum.rollout.inbox import Inbox, Ticket
from practicum.rollout.own_model import OwnModelRollout
from practicum.rollout.sampling import draw, uniforms
from practicum.types import FinishReason, SamplingParams

_WAIT_S = 0.5


class HFRollout(OwnModelRollout):
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
        super().__init__(model_path, device=device, dtype=dtype, stays_loaded=stays_loaded)
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens
        # A model's saved generation settings (penalties, its own temperature) would bend what `draw` decides.
        self._model.generation_config = GenerationConfig(pad_token_id=self._tokenizer.pad_token_id, do_sample=False)

    def write(self, inbox: Inbox) -> None:
        assert self._awake, "generate before resume"
        while not inbox.is_over:
            for batch in self._batches(inbox.take(self._max_batch, _WAIT_S)):
                self._write(batch, inbox)

    def _batches(self, tickets: Sequence[Ticket]) -> list[list[_Row]]:
        """Answers with the same parameters, so many at a time."""
        by_params: dict[SamplingParams, list[_Row]] = {}
        for ticket in tickets:
            params = ticket.request.params
            rows = by_params.setdefault(replace(params, num_answers=1), [])
            rows += [_Row(ticket, answer) for answer in range(params.num_answers)]
        return [batch for rows in by_params.values() for batch in self._split(rows)]

    def _split(self, rows: list[_Row]) -> list[list[_Row]]:
        batches: list[list[_Row]] = []
        for row in rows if self._max_batch_tokens is None else sorted(rows, key=lambda row: row.num_tokens):
            # Sorted, so that this row would be the longest of its batch.
            is_full = not batches or len(batches[-1]) == self._max_batch
            if is_full or (len(batches[-1]) + 1) * row.num_tokens > (self._max_batch_tokens or math.inf):
                batches.append([])
            batches[-1].append(row)
        return batches

    @torch.no_grad()
    def _write(self, rows: Sequence[_Row], inbox: Inbox) -> None:
        going = [row for row in rows if not (row.ticket.is_cancelled or inbox.is_aborted)]
        for row in rows:
            if row not in going:
                row.ticket.done(row.answer, untouched(row.ticket.request))
        if not going:
            return
        params = going[0].ticket.request.params
        input_ids, mask = _left_padded([written_ids(row.ticket.request) for row in going], self._tokenizer.pad_token_id)
        drawing = _Drawing(going, params, self._device)
        ending = _Stop(going, drawing, Ending(params, self.eos_ids, self._tokenizer), inbox)
        self._model.generate(
            torch.from_numpy(input_ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            max_new_tokens=max(row.num_left for row in going),
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([ending]),
        )
        tokens, log_probs = np.stack(drawing.tokens, 1), np.stack(drawing.log_probs, 1)
        for index, row in enumerate(going):
            length, reason = ending.reasons[index]
            own = tokens[index, :length].copy(), log_probs[index, :length].copy()
            sample = sample_of(row.ticket.request, *own, self._version, reason, self._tokenizer)
            row.ticket.done(row.answer, sample)


@dataclass(frozen=True, slots=True)
class _Row:
    """One answer in a batch."""

    ticket: Ticket
    answer: int

    @property
    def num_before(self) -> int:
        written = self.ticket.request.written
        return 0 if written is None else len(written.token_ids)

    @property
    def num_tokens(self) -> int:
        """At most, prompt and answer together."""
        return len(self.ticket.request.prompt_ids) + self.ticket.request.params.max_new_tokens

    @property
    def num_left(self) -> int:
        return self.ticket.request.params.max_new_tokens - self.num_before


class _Drawing(LogitsProcessor):
    """Draws the token itself and leaves `generate` no other choice."""

    def __init__(self, rows: Sequence[_Row], params: SamplingParams, device: torch.device) -> None:
        requests = [row.ticket.request for row in rows]
        seeds = [(r.seed, r.first_answer + row.answer) for r, row in zip(requests, rows, strict=True)]
        self._noise = uniforms(seeds, params.max_new_tokens).to(device)
        self._at = torch.tensor([row.num_before for row in rows], device=device)
        self._last = params.max_new_tokens - 1
        self._params = params
        self.tokens: list[NDArray[np.int32]] = []  # [rows] of each step
        self.log_probs: list[NDArray[np.float32]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        at = (self._at + len(self.tokens)).clamp(max=self._last)  # rows that have ended go on for nothing
        tokens, log_probs = draw(scores, self._noise.gather(1, at[:, None])[:, 0], self._params)
        self.tokens.append(tokens.cpu().numpy().astype(np.int32))
        self.log_probs.append(log_probs.cpu().numpy())
        return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[:, None], 0.0)


class _Stop(StoppingCriteria):
    """Knows which rows have ended, and tells those who listen of every token."""

    def __init__(self, rows: Sequence[_Row], drawing: _Drawing, ending: Ending, inbox: Inbox) -> None:
        self._rows = rows
        self._drawing = drawing
        self._ending = ending
        self._inbox = inbox
        self._before = [row.ticket.request.written for row in rows]
        self.reasons: dict[int, tuple[int, FinishReason]] = {}  # by row: how many tokens it wrote, and why it ended

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        tokens, log_probs = self._drawing.tokens[-1].tolist(), self._drawing.log_probs[-1].tolist()
        num_new = len(self._drawing.tokens)
        for index, row in enumerate(self._rows):
            if index in self.reasons:
                continue
            if row.ticket.on_tokens is not None:
                row.ticket.on_tokens(row.answer, [tokens[index]], [log_probs[index]])
            reason = self._ending.of(tokens[index], row.num_before + num_new, self._recent(index))
            if reason is None and (row.ticket.is_cancelled or self._inbox.is_aborted):
                reason = "abort"
            if reason is not None:
                self.reasons[index] = (num_new, reason)
        return torch.tensor([index in self.reasons for index in range(len(self._rows))], device=input_ids.device)

    def _recent(self, index: int) -> list[int]:
        if not self._ending.reads_text:
            return []
        before = self._before[index]
        written = [] if before is None else before.token_ids.tolist()
        return [*written, *(int(step[index]) for step in self._drawing.tokens)]


def _left_padded(prompts: Sequence[NDArray[np.int32]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    width = max(len(ids) for ids in prompts)
    input_ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, ids in enumerate(prompts):
        input_ids[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = 1
    return input_ids, mask
