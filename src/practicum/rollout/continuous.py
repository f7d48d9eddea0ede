"""Continuous batching, as far as it is the same on every device: requests come in between two steps, and go.

What writes has rows, one for each answer under way, and requests that wait for rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np
import torch

from practicum.errors import RolloutError
from practicum.replay import RouteRecorder
from practicum.rollout.answers import Ending, sample_of, untouched
from practicum.rollout.inbox import Inbox
from practicum.rollout.own_model import OwnModelRollout
from practicum.rollout.rows import Pending, Row
from practicum.types import FinishReason, RoutedExperts

_WAIT_S = 0.5


class ContinuousRollout(OwnModelRollout):
    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        keep_routes: bool,
        stays_loaded: bool = False,
    ) -> None:
        super().__init__(model_path, device=device, dtype=dtype, stays_loaded=stays_loaded)
        self._max_batch = max_batch
        self._pending: deque[Pending] = deque()
        self._rows: list[Row] = []
        self._recorder = RouteRecorder(self._model) if keep_routes else None

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        super().close()

    @abstractmethod
    def _end(self, index: int, reason: FinishReason) -> None:
        """The answer of the row with this index is done: told, and its room is free."""

    @property
    def _num_waiting_rows(self) -> int:
        """That have begun, and have lost their room for a while."""
        return 0

    def _take_in(self, inbox: Inbox) -> None:
        under_way = len(self._rows) + self._num_waiting_rows
        is_idle = not (under_way or self._pending)
        room = self._max_batch - under_way - len(self._pending)
        if is_idle or room > 0:
            for ticket in inbox.take(max(1, room), _WAIT_S if is_idle else 0.0):
                self._pending.append(Pending(ticket, Ending(ticket.request.params, self.eos_ids, self._tokenizer)))

    def _break_off(self, inbox: Inbox) -> None:
        for index in reversed(range(len(self._rows))):
            if inbox.is_aborted or self._rows[index].ticket.is_cancelled:
                self._end(index, "abort")
        for pending in [p for p in self._pending if inbox.is_aborted or p.ticket.is_cancelled]:
            self._pending.remove(pending)
            for answer in range(pending.next_answer, pending.ticket.request.params.num_answers):
                pending.ticket.done(answer, untouched(pending.ticket.request))

    def _tell(self, row: Row, reason: FinishReason) -> None:
        row.ticket.done(
            row.answer,
            sample_of(
                row.ticket.request,
                np.array(row.tokens, np.int32),
                np.array(row.log_probs, np.float32),
                self._version,
                reason,
                self._tokenizer,
                self._routes_of(row),
            ),
        )

    def _routes_of(self, row: Row) -> RoutedExperts | None:
        if self._recorder is None:
            return None
        experts = np.concatenate(row.routes)
        experts.sort(axis=-1)
        known = np.ones(row.length, np.bool_)
        known[len(experts) :] = False  # the last token was drawn and has been through no layer
        blank = np.zeros((row.length - len(experts), *experts.shape[1:]), experts.dtype)
        shape = self._recorder.shape
        return RoutedExperts(np.concatenate([experts, blank]), shape.layers, known, shape.num_experts)

    def _too_large(self, what: str, needed: float, cache_gb: float) -> RolloutError:
        return RolloutError(
            f"{what} may take {needed / 1e9:.3g} GB of keys and values, more than rollout.cache_gb={cache_gb:g}: raise "
            "it, or lower rollout.max_new_tokens."
        )

    def _unsupported(self, why: str) -> RolloutError:
        family: Any = self._model.config.model_type
        return RolloutError(
            f"the native engine does not support the model family {family!r} of {self._path!r} ({why}). "
            "Use the engine hf (rollout.engine=hf, or --engine hf), which runs every causal model of transformers."
        )
