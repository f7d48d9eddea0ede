"""A causal LM that answers with log-probs instead of logits, and one that answers with values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from practicum.errors import ModelError
from practicum.train.head import MAX_LOGITS, log_probs_of


@torch.no_grad()
def supports_packing(model: Any) -> bool:
    """Return whether samples that share a row leave each other alone; not every family heeds positions, so try it.

    Recurrent layers carry state along the row, and some attention masks are built without looking at positions.
    """
    random = np.random.default_rng(0)
    first, second = (torch.from_numpy(random.integers(0, model.config.vocab_size, (1, n))) for n in (7, 5))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    was_training = model.training
    model.eval()
    alone = model(input_ids=second, use_cache=False).logits[0].log_softmax(-1)
    row = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits[0]
    model.train(was_training)
    return bool((row[7:].log_softmax(-1) - alone).abs().max() < 1e-3)


@torch.no_grad()
def _is_plain(head: Any, model: Any) -> bool:
    """Return whether logits are what the head makes of the body's output, and nothing is done to them after."""
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    ids = torch.arange(3, device=model.device)[None]
    was_training = model.training
    model.eval()
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    is_plain = torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    model.train(was_training)
    return is_plain


def entropies(log_probs: Tensor) -> Tensor:
    """Return those of distributions [n, vocabulary], a few at a time: in the cache of a CPU, or in little memory."""
    rows = max(1, (2**19 if log_probs.device.type == "cpu" else 2**26) // log_probs.shape[-1])
    return torch.cat([-(part.exp().mul_(part)).sum(-1) for part in log_probs.split(rows)])


class LogProbModel(nn.Module):
    """Computes the output layer only at the positions asked for, so prompt and padding cost no vocabulary row.

    The positions reach the output layer through a hook before it; what a family does with its logits afterwards (caps,
    scales) stays in force.
    """

    def __init__(self, model: Any, learns_entropy: bool = False) -> None:
        """Wrap a model; `learns_entropy` gives the entropies gradients, for which all probabilities are kept."""
        super().__init__()
        self.model = model
        self._learns_entropy = learns_entropy
        self._positions: Tensor | None = None
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__} has no output layer that could be found: it cannot be trained.")
        self.is_fast = False  # whether its layers must know where sequences end
        self._plain_head = head if _is_plain(head, model) else None
        head.register_forward_pre_hook(self._select)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predict_at: Tensor,
        targets: Tensor,
        temperature: float,
        **spans: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of `targets` [n] and entropies [n] at the flat positions `predict_at` [n], in float32.

        `spans` tell layers that were made for it where sequences end.
        """
        head = self._plain_head
        if head is not None and len(targets) * head.out_features > MAX_LOGITS:
            hidden = self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **spans)[0]
            chosen = hidden.flatten(0, 1)[predict_at]
            return log_probs_of(chosen, head, targets, temperature, self._learns_entropy)
        self._positions = predict_at
        try:
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **spans).logits[0]
        finally:
            self._positions = None
        assert len(logits) == len(targets), "the output layer was not called with the selected positions"
        logits = logits.float() if temperature == 1 else logits.float() / temperature
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1) if self._learns_entropy else entropies(log_probs.detach())
        return -nll_loss(log_probs, targets, reduction="none"), entropy

    def _select(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden = args[0]
        return (hidden.flatten(0, 1)[self._positions].unsqueeze(0), *args[1:])


class ValueModel(nn.Module):
    """The body of a causal LM under one output: what an answer is going to be worth. It begins by expecting nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        if model.base_model is model:
            raise ModelError(f"{type(model).__name__} has no body apart from its head: it cannot be made a critic.")
        self.body = model.base_model
        self.is_fast = False  # whether its layers must know where sequences end
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, position_ids: Tensor, predict_at: Tensor, **spans: Any) -> Tensor:
        """Return values [n] at flat positions `predict_at` [n], in float32: each before the token predicted there."""
        hidden = self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False, **spans)[0]
        values: Tensor = self.head(hidden.flatten(0, 1)[predict_at])
        return values.float().sum(-1)  # over the one output: FSDP warns of views
