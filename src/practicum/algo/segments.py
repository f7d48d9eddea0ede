"""Sums and means over ragged parts of a flat tensor: the tokens of a sequence, the answers to a prompt.

Everything per token is flat here, [tokens], with the sequences laid end to end and no padding. A second tensor of the
same length says which sequence each token belongs to. Its numbers mean nothing but equal or not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def sums(x: Tensor, ids: Tensor) -> Tensor:
    """Each element replaced by the sum over its part, [tokens]. The parts may be in any order."""
    values, index = torch.unique(ids, return_inverse=True)
    return x.new_zeros(len(values)).index_add(0, index, x)[index]


def counts(ids: Tensor) -> Tensor:
    """The size of each element's part, [tokens] of int64."""
    return sums(torch.ones_like(ids), ids)


def means(x: Tensor, ids: Tensor) -> Tensor:
    """Each element replaced by the mean over its part, [tokens]."""
    return sums(x, ids) / counts(ids)


def are_last(sequences: Tensor) -> Tensor:
    """Return whether each token is the last of its sequence, [tokens] of bool. The tokens of a sequence lie
    together."""
    return torch.cat([sequences[1:] != sequences[:-1], sequences.new_ones(min(1, len(sequences)), dtype=torch.bool)])


def discounted_sums(x: Tensor, sequences: Tensor, factor: float) -> Tensor:
    """`sum over l >= 0 of factor^l * x[t + l]` within the sequence of t.

    The tokens of a sequence lie together, in order. By doubling: sums over 2n tokens are made of two sums over n, so
    that a sequence of 30,000 tokens takes 15 passes over the batch and not 30,000 steps.
    """
    step = 1
    while step < len(x):
        together = sequences[step:] == sequences[:-step]
        if not together.any():  # no sequence is longer than what has been summed
            break
        x = x + pad(torch.where(together, x[step:], 0.0) * factor**step, (0, step))
        step *= 2
    return x
