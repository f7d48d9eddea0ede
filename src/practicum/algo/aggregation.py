"""Aggregation of token losses to one number: a weight for each token, so that the loss is their weighted sum.

    loss of a mini-batch = sum over all ranks, micro-batches and tokens of weight * loss of the token

The weights come from counts over the whole mini-batch, known before the first micro-batch is looked at, and from the
length of the token's own sequence, which is never split. So the gradient does not depend on how samples are dealt out
to micro-batches and ranks. A loss divided by what a micro-batch happens to hold would.

A token that is left out on the way (by a mask on importance weights) adds nothing and still counts below the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algo.segments import counts


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over a mini-batch, all ranks and micro-batches together."""

    num_tokens: int  # learnt
    num_sequences: int  # with at least one learnt token
    max_tokens: int  # the most an answer may have, whatever these have


Aggregation = Callable[[Tensor, Totals], Tensor]


def token_mean(sequences: Tensor, totals: Totals) -> Tensor:
    """`1 / num_tokens`: all tokens weigh the same, long answers more than short ones (DAPO, arXiv 2503.14476, eq. 8).

    DAPO writes the mean over a group's tokens; here, as in its own code, it is over those of the mini-batch.
    sequences [tokens] of this micro-batch tell which tokens belong together; the result is [tokens] of float32.
    """
    return _constant(sequences, 1 / max(1, totals.num_tokens))


def sequence_mean(sequences: Tensor, totals: Totals) -> Tensor:
    """`1 / (num_sequences * length)`: the mean over sequences of the mean over tokens (GRPO, arXiv 2402.03300, eq. 3).

    All answers weigh the same, so a token of a long one weighs less. `length` counts learnt tokens.
    """
    return 1 / (counts(sequences).to(torch.float32) * max(1, totals.num_sequences))


def sequence_sum(sequences: Tensor, totals: Totals) -> Tensor:
    """`1 / num_sequences`: the mean over sequences of the sum over tokens, which is the bare policy gradient."""
    return _constant(sequences, 1 / max(1, totals.num_sequences))


def constant(sequences: Tensor, totals: Totals) -> Tensor:
    """`1 / (num_sequences * max_tokens)`: Dr.GRPO's constant (arXiv 2503.20783, section 3.2).

    `sequence_sum` in the size of a mean: a token's weight depends neither on its answer's length nor on the others'.
    """
    return _constant(sequences, 1 / max(1, totals.num_sequences * totals.max_tokens))


def _constant(sequences: Tensor, weight: float) -> Tensor:
    return torch.full_like(sequences, weight, dtype=torch.float32)


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}
