"""The loss as a whole against plain Python, and its gradient for any split into micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.algo import AGGREGATIONS, LOSSES, Objective, Tokens, Totals

LENGTHS = [3, 1, 4, 2, 5]
TOTALS = Totals(num_tokens=15, num_sequences=5, max_tokens=6)


def tokens_of(answers: list[int], seed: int = 0) -> tuple[Tokens, Tensor]:
    """The tokens of some of five answers, always the same for an answer; and the log-probs that are learnt."""
    random = torch.Generator().manual_seed(seed)
    columns = torch.randn(6, sum(LENGTHS), generator=random, dtype=torch.float64) * 0.3
    sequences = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
    chosen = torch.isin(sequences, torch.tensor(answers, dtype=torch.int64))
    new, old, written, reference, entropy, advantages = (column[chosen] for column in columns)
    learnt = new.requires_grad_()
    told = Tokens(learnt, entropy + 2 * learnt, old, written, advantages, sequences[chosen], reference)
    return told, learnt


def gradient(objective: Objective, parts: list[list[int]]) -> tuple[float, list[float]]:
    total, found = 0.0, {}
    for part in parts:
        tokens, learnt = tokens_of(part)
        losses = objective(tokens, TOTALS, 0.3)
        losses.total.backward()
        assert learnt.grad is not None
        total += losses.total.item()
        ends = iter(learnt.grad.tolist())
        found |= {answer: [next(ends) for _ in range(LENGTHS[answer])] for answer in part}
    return total, [x for answer in range(5) for x in found[answer]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_do_not_depend_on_the_split(loss: str, aggregation: str) -> None:
    objective = Objective(loss, aggregation=aggregation, correction="masked", level="geometric", kl="k3")
    whole, slopes = gradient(objective, [[0, 1, 2, 3, 4]])
    for parts in ([[0], [1], [2], [3], [4]], [[1, 3], [0, 2, 4]], [[], [0, 1, 2, 3, 4]]):
        value, same = gradient(objective, parts)
        assert value == pytest.approx(whole, rel=1e-6)
        assert same == pytest.approx(slopes, rel=1e-5, abs=1e-9)


def test_every_term_is_as_written_in_the_papers() -> None:
    objective = Objective(
        "ppo", {"clip_low": 0.1, "clip_high": 0.2}, "sequence_mean", "truncated", "token", {"high": 1.1}, "k2", 0.01
    )
    tokens, _ = tokens_of([0, 1, 2, 3, 4])
    columns = (tokens.log_probs, tokens.entropy, tokens.old_log_probs, tokens.rollout_log_probs, tokens.advantages)
    assert tokens.reference_log_probs is not None
    rows = zip(*(column.tolist() for column in (*columns, tokens.reference_log_probs, tokens.sequences)), strict=True)
    expected = 0.0
    for new, entropy, old, written, advantage, reference, sequence in rows:
        ratio = math.exp(new - old)
        loss = -min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage)
        loss *= min(math.exp(old - written), 1.1)
        loss += 0.3 * (new - reference) ** 2 / 2 - 0.01 * entropy
        expected += loss / LENGTHS[sequence] / 5
    losses = objective(tokens, TOTALS, 0.3)
    assert losses.total.item() == pytest.approx(expected, rel=1e-6)
    assert losses.correction is not None and 0 < losses.correction.cut_share < 1
    assert not losses.of_tokens.requires_grad


def entropy_slopes(**changes: Any) -> list[float]:
    return gradient(Objective(**changes), [[0, 1, 2, 3, 4]])[1]


def test_what_is_switched_off_pulls_at_nothing() -> None:
    plain = entropy_slopes()
    assert entropy_slopes(entropy_bonus=0.1) == pytest.approx([x - 0.1 * 2 / 15 for x in plain], rel=1e-5)
    assert entropy_slopes(kl="k2") != pytest.approx(plain)
    tokens, _ = tokens_of([0])
    assert Objective()(tokens, TOTALS).correction is None
