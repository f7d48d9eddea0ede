"""Sampling tokens reproducibly: one uniform number per sequence and position, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from practicum.errors import TrainingError
from practicum.types import SamplingParams


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits [rows, vocabulary], and its log-prob before top-k and top-p."""
    scaled = logits.float()
    if params.temperature > 0:
        scaled = scaled / params.temperature
    log_probs = scaled.log_softmax(-1)
    if log_probs[:, 0].isnan().any():  # one bad logit makes the whole row so
        raise TrainingError(
            "the model's logits are no longer numbers: its weights are spoilt. Go back to a checkpoint from before and "
            "lower actor.lr."
        )
    if params.temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        # Inverse transform: the first token at which the running sum of probabilities passes the uniform number.
        # Scaling by the last sum keeps rounding from ever picking a token beyond the last possible one.
        running = _filtered(log_probs, params).exp().cumsum(-1)
        tokens = torch.searchsorted(running, uniform[:, None] * running[:, -1:], right=True)[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def draw_each(logits: Tensor, uniform: Tensor, params: Sequence[SamplingParams]) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probs of rows with parameters of their own; equal ones are drawn together."""
    ways = [(one.temperature, one.top_p, one.top_k) for one in params]
    tokens, log_probs = [0] * len(ways), [0.0] * len(ways)
    order = range(len(ways)) if len(set(ways)) == 1 else sorted(range(len(ways)), key=ways.__getitem__)
    for _, same in groupby(order, key=ways.__getitem__):
        rows = list(same)
        whole = len(rows) == len(ways)
        chosen = logits if whole else logits[rows]
        drawn, found = draw(chosen, uniform if whole else uniform[rows], params[rows[0]])
        for row, token, log_prob in zip(rows, drawn.tolist(), found.tolist(), strict=True):
            tokens[row], log_probs[row] = token, log_prob
    return tokens, log_probs


def _filtered(log_probs: Tensor, params: SamplingParams) -> Tensor:
    """Return log-probs, minus infinity for what top-k and top-p rule out; they are not normalised again."""
    if 0 < params.top_k < log_probs.shape[-1]:
        smallest = log_probs.topk(params.top_k, dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < smallest, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = log_probs.softmax(-1).sort(dim=-1, descending=True)
        # A token stays if the ones before it have not yet reached top_p, so the likeliest always stays.
        dropped = ordered.cumsum(-1) - ordered >= params.top_p
        log_probs = log_probs.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
    return log_probs
