"""A conversation as one sample: turns of the model and what was said in between, token by token, only ever appended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.replay import decoded
from practicum.types import FinishReason, Prompt, RoutedExperts, Sample


class Transcript:
    def __init__(self, prompt: Prompt, prompt_ids: NDArray[np.int32]) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.num_turns = 0
        self._ids: list[NDArray[np.int32]] = []
        self._log_probs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.bool_]] = []
        self._versions: list[NDArray[np.int32]] = []
        self._routes: RoutedExperts | None = None
        self.num_tokens = 0
        """Without the prompt."""

    @property
    def all_ids(self) -> NDArray[np.int32]:
        """What the engine is given for the next turn."""
        return np.concatenate([self.prompt_ids, *self._ids])

    def add_turn(self, turn: Sample) -> None:
        """What the model wrote, as it wrote it."""
        assert len(turn.prompt_ids) == len(self.prompt_ids) + self.num_tokens, "a turn that follows something else"
        self._add(turn.token_ids, turn.log_probs, turn.loss_mask, turn.versions)
        self.num_turns += 1
        if turn.routes is not None:
            routes = decoded([turn.routes])[0]
            self._routes = routes if self._routes is None else self._routes.grown(routes)

    def add_said(self, token_ids: NDArray[np.int32]) -> None:
        """What others said, and the marks around it: nobody learns to say it."""
        num = len(token_ids)
        self._add(token_ids, np.full(num, np.nan, np.float32), np.zeros(num, np.bool_), np.full(num, -1, np.int32))

    def sample(self, text: str, reason: FinishReason, metadata: dict[str, Any] | None = None) -> Sample:
        """All of it; `metadata` is added to that of the prompt."""
        prompt = replace(self.prompt, metadata={**self.prompt.metadata, **metadata}) if metadata else self.prompt
        return Sample(
            prompt=prompt,
            prompt_ids=self.prompt_ids,
            token_ids=np.concatenate([np.empty(0, np.int32), *self._ids]),
            log_probs=np.concatenate([np.empty(0, np.float32), *self._log_probs]),
            loss_mask=np.concatenate([np.empty(0, np.bool_), *self._mask]),
            versions=np.concatenate([np.empty(0, np.int32), *self._versions]),
            text=text,
            finish_reason=reason,
            routes=None if self._routes is None else self._routes.padded(len(self.prompt_ids) + self.num_tokens),
        )

    def _add(self, *arrays: NDArray[Any]) -> None:
        for kept, array in zip((self._ids, self._log_probs, self._mask, self._versions), arrays, strict=True):
            kept.append(array)  # type: ignore[attr-defined]
        self.num_tokens += len(arrays[0])

    @classmethod
    def of(cls, sample: Sample) -> tuple[Transcript, Sample | None]:
        """A conversation that was broken off: all but the turn of the model it ends with, and that turn."""
        transcript = cls(sample.prompt, sample.prompt_ids)
        edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        bounds = [0, *edges.tolist(), len(sample.loss_mask)] if len(sample.loss_mask) else []
        spans = [slice(start, end) for start, end in pairwise(bounds)]
        routes = None if sample.routes is None else decoded([sample.routes])[0]
        for span in spans:
            if not sample.loss_mask[span.start]:
                transcript.add_said(sample.token_ids[span])
                continue
            turn = Sample(
                transcript.prompt,
                transcript.all_ids,
                sample.token_ids[span],
                sample.log_probs[span],
                sample.loss_mask[span],
                sample.versions[span],
                "",
                "abort",
            )
            if span.stop == len(sample.loss_mask):
                transcript._routes = routes
                return transcript, turn
            transcript.add_turn(turn)
        transcript._routes = routes
        return transcript, None
