"""The engine that writes with transformers' own `generate`: runs every causal LM transformers has, at its pace.

Tokens are drawn by a logits processor of ours, which hands `generate` a row with one possible token left. So each
sequence has its own random numbers, and log-probs are kept as they arise instead of storing all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from practicum.models import load_model, load_tokenizer
from practicum.rollout.base import BaseRollout
from practicum.rollout.sampling import draw, uniforms
from practicum.types import FinishReason, RolloutRequest, Sample, SamplingParams
from practicum.weights import WeightUpdate


class HFRollout(BaseRollout):
    def __init__(self, model_path: str, *, device: torch.device, dtype: torch.dtype, max_batch: int) -> None:
        self._device = device
        self._max_batch = max_batch
        self._tokenizer = load_tokenizer(model_path)
        self._model = load_model(model_path, dtype).eval().requires_grad_(False)
        self._eos_ids = _eos_ids(self._model, self._tokenizer)
        # A model's saved generation settings (penalties, its own temperature) would bend what `draw` decides.
        self._model.generation_config = GenerationConfig(
            eos_token_id=self._eos_ids, pad_token_id=self._tokenizer.pad_token_id, do_sample=False
        )
        self._version = 0
        self._shared = False
        self._awake = False

    def resume(self) -> None:
        if not self._shared:
            self._model.to(self._device)
        self._awake = True

    def release(self) -> None:
        if not self._shared and self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()
        self._awake = False

    def update_weights(self, update: WeightUpdate) -> None:
        parameters = dict(self._model.named_parameters())
        self._shared = update.shared and self._model.dtype == torch.float32
        for name, tensor in update.tensors:
            parameter = parameters.pop(name)
            if self._shared:
                parameter.data = tensor
            else:
                parameter.data.copy_(tensor)
        assert not parameters, f"the update left out {', '.join(parameters)}"
        if self._shared:
            self._model.to(self._device)  # the parameters are there already; buffers such as rotary tables follow
        self._version = update.version

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Sample]:
        assert self._awake, "generate before resume"
        samples: list[Sample] = []
        for params, same in groupby(requests, key=lambda request: request.params):
            rows = [(request, answer) for request in same for answer in range(params.num_answers)]
            for start in range(0, len(rows), self._max_batch):
                samples += self._write(rows[start : start + self._max_batch], params)
        return samples

    @torch.no_grad()
    def _write(self, rows: Sequence[tuple[RolloutRequest, int]], params: SamplingParams) -> list[Sample]:
        input_ids, mask = _left_padded([request.prompt_ids for request, _ in rows], self._tokenizer.pad_token_id)
        noise = uniforms([(request.seed, answer) for request, answer in rows], params.max_new_tokens)
        drawing = _Drawing(noise.to(self._device), params)
        output = self._model.generate(
            torch.from_numpy(input_ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            max_new_tokens=params.max_new_tokens,
            logits_processor=LogitsProcessorList([drawing]),
        )
        tokens = output[:, input_ids.shape[1] :].cpu().numpy().astype(np.int32)
        log_probs = torch.stack(drawing.log_probs, dim=1).cpu().numpy()
        lengths = [_answer_length(row, self._eos_ids) for row in tokens]
        answers = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [
            self._sample(request, answer, log_probs[i, : lengths[i]], texts[i])
            for i, ((request, _), answer) in enumerate(zip(rows, answers, strict=True))
        ]

    def _sample(
        self, request: RolloutRequest, answer: NDArray[np.int32], log_probs: NDArray[np.float32], text: str
    ) -> Sample:
        finish: FinishReason = "stop" if int(answer[-1]) in self._eos_ids else "length"
        return Sample(
            prompt=request.prompt,
            prompt_ids=request.prompt_ids,
            token_ids=answer.copy(),
            log_probs=log_probs.copy(),
            loss_mask=np.ones(len(answer), dtype=np.bool_),
            versions=np.full(len(answer), self._version, dtype=np.int32),
            text=text,
            finish_reason=finish,
        )


class _Drawing(LogitsProcessor):
    """Draws the token itself and leaves `generate` no other choice."""

    def __init__(self, noise: Tensor, params: SamplingParams) -> None:
        self._noise = noise
        self._params = params
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, log_probs = draw(scores, self._noise[:, len(self.log_probs)], self._params)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[:, None], 0.0)


def _left_padded(prompts: Sequence[NDArray[np.int32]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    width = max(len(ids) for ids in prompts)
    input_ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, ids in enumerate(prompts):
        input_ids[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = 1
    return input_ids, mask


def _answer_length(tokens: NDArray[np.int32], eos_ids: Sequence[int]) -> int:
    """Up to and including the first end-of-text token; what `generate` wrote after it is padding."""
    ends = np.flatnonzero(np.isin(tokens, eos_ids))
    return int(ends[0]) + 1 if len(ends) else len(tokens)


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({int(tokenizer.eos_token_id), *map(int, declared)})
