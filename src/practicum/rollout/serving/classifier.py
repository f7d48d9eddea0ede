"""A sequence classifier with one output: token ids in, a raw score out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.errors import ModelError
from practicum.models import load_classifier, load_tokenizer
from practicum.rollout.serving.texts import Encoder, Limit
from practicum.rollout.sleeping import SleepingWeights


class Classifier:
    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, max_batch_tokens: int) -> None:
        self._path = path
        self._device = device
        tokenizer = load_tokenizer(path, for_writing=False)
        self._model = load_classifier(path, dtype).eval().requires_grad_(False)
        self.encoder = Encoder(tokenizer, self._model.config.get_text_config().vocab_size)
        most = Limit(max_batch_tokens, "max_batch_tokens, which one forward pass has room for")
        self.limit = Limit.of(self._model.config, tokenizer, most)
        self.label = str(self._model.config.id2label[0])
        self._text_config = self._model.config.get_text_config()
        self._pad_id: int | None = self._text_config.pad_token_id
        self.weights = SleepingWeights(self._model, device, lambda: load_classifier(path, dtype))

    @torch.no_grad()
    def scores(self, inputs: Sequence[NDArray[np.int32]]) -> list[float | Exception]:
        """The output for each input as the model gives it, with no sigmoid over it."""
        pad_id = self._padding_for(inputs)
        if pad_id is None:
            half = len(inputs) // 2
            return self.scores(inputs[:half]) + self.scores(inputs[half:])
        width = max(len(ids) for ids in inputs)
        input_ids = np.full((len(inputs), width), pad_id, dtype=np.int64)
        mask = np.zeros((len(inputs), width), dtype=np.int64)
        for row, ids in enumerate(inputs):
            input_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        output = self._model(
            input_ids=torch.from_numpy(input_ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
        )
        return [self._checked(score) for score in output.logits[:, 0].float().cpu().tolist()]

    def _padding_for(self, inputs: Sequence[NDArray[np.int32]]) -> int | None:
        """Models made from causal ones take the output at the last token that is not padding, by its id.

        Where the model names no such id, alone in a batch it would take the very last token. It does so in company too
        if the padding is an id that no input ends with: which one does not matter, since nothing attends to it. None
        when the inputs end with all ids there are.
        """
        if self._pad_id is not None:
            return self._pad_id
        last = {int(ids[-1]) for ids in inputs}
        free = next((token for token in range(self._text_config.vocab_size) if token not in last), None)
        self._text_config.pad_token_id = free
        return free

    def _checked(self, score: float) -> float | Exception:
        if math.isfinite(score):
            return score
        return ModelError(f"model {self._path!r} gave {score}, which is no score.")
