from __future__ import annotations

import math

import pytest
import torch

from practicum.algo import combined_figures, figures_by_staleness


def test_figures_are_those_of_the_tokens_of_one_staleness() -> None:
    written = torch.tensor([-1.0, -2.0, -3.0, -0.5])
    now = torch.tensor([-1.0, -1.0, -3.0, -1.5])
    found = figures_by_staleness(torch.tensor([0, 1, 0, 1]), now, written)
    assert list(found) == [0, 1]
    assert (found[0].num_tokens, found[0].kl, found[0].weights.max_weight) == (2, 0.0, 1.0)
    # k3 of a token is w - 1 - log w with the weight w = exp(now - written).
    assert found[1].kl == pytest.approx(math.e - 1 - 1 + math.exp(-1) - 1 + 1)
    assert found[1].weights.max_weight == pytest.approx(math.e)
    assert found[1].weights.mean_weight == pytest.approx((math.e + math.exp(-1)) / 2)


def test_parts_combine_to_the_whole() -> None:
    torch.manual_seed(0)
    staleness, now, written = torch.randint(0, 3, (50,)), -torch.rand(50), -torch.rand(50)
    whole = figures_by_staleness(staleness, now, written)
    parts = [
        figures_by_staleness(staleness[part], now[part], written[part])
        for part in (slice(0, 7), slice(7, 7), slice(7, 50))
    ]
    both = combined_figures(parts)
    assert list(both) == list(whole) == [0, 1, 2]
    for updates, figures in whole.items():
        assert both[updates].num_tokens == figures.num_tokens
        assert both[updates].kl == pytest.approx(figures.kl)
        assert both[updates].weights.mean_weight == pytest.approx(figures.weights.mean_weight)
    assert combined_figures([]) == {}
