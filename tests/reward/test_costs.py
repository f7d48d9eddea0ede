from __future__ import annotations

from dataclasses import replace

from practicum import Sample
from practicum.reward.costs import ExpectedCosts
from tests.samples import make_sample


def sample(answer: int, source: str = "") -> Sample:
    made = make_sample(answer=answer)
    return replace(made, prompt=replace(made.prompt, data_source=source))


def test_longer_answers_are_expected_to_cost_more() -> None:
    costs = ExpectedCosts()
    assert 0 < costs.expected(sample(1)) < costs.expected(sample(100))


def test_what_was_seen_is_expected_again_of_the_same_source_only() -> None:
    costs = ExpectedCosts()
    costs.learn(sample(100, "code"), 2.0)
    assert costs.expected(sample(100, "code")) == 2.0
    assert costs.expected(sample(100, "sums")) == ExpectedCosts().expected(sample(100, "sums")) < 2.0


def test_one_outlier_does_not_change_the_expectation_much_but_many_do() -> None:
    costs = ExpectedCosts()
    costs.learn(sample(100), 1.0)
    costs.learn(sample(100), 10.0)
    assert 1.0 < costs.expected(sample(100)) < 2.0
    for _ in range(200):
        costs.learn(sample(100), 10.0)
    assert 9.0 < costs.expected(sample(100)) <= 10.0
