from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.router.cost import Costs
from tests.reward.router.simulation import make_head

PLAIN = make_head()


def costs_of_headers(values: list[float]) -> list[float]:
    costs = Costs()
    return [costs.of(make_head(cost=value), b"")[0] for value in values]


def lognormal(num: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [math.exp(rng.gauss(0.0, 1.0)) for _ in range(num)]


def test_the_header_is_believed_first_then_the_tokens_then_the_length() -> None:
    costs = Costs()
    asks = b'{"prompt": "2+2=", "max_tokens": 100}'
    _, header = costs.of(make_head(cost=3.0), asks)
    _, tokens = costs.of(PLAIN, asks)
    _, length = costs.of(PLAIN, b'{"prompt": "2+2="}')
    assert len({header, tokens, length}) == 3
    assert costs.of(make_head(cost=9.0), b"")[1] is header
    assert costs.of(PLAIN, b'{"max_tokens":5}')[1] is tokens
    assert costs.of(PLAIN, b"")[1] is length


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
@pytest.mark.parametrize(
    "form", ['{{"{}": {}}}', '{{"{}":{}}}', '{{"{}"  :\n {}, "n": 7}}', '{{"parameters": {{"{}": {}}}}}']
)
def test_who_asks_for_more_tokens_costs_more(name: str, form: str) -> None:
    costs = Costs()
    few, kind = costs.of(PLAIN, form.format(name, 10).encode())
    many, same = costs.of(PLAIN, form.format(name, 1000).encode())
    assert kind is same and many > 1.5 * few
    assert costs.of(make_head(cost=1.0), b"")[1] is not kind


@pytest.mark.parametrize(
    "body", [b'{"max_tokens": null}', b'{"max_tokens": "5"}', b'{"tokens": 5}', b'{"prompt": "\\"max_tokens\\": 5"}']
)
def test_what_only_looks_like_tokens_counts_by_its_length(body: bytes) -> None:
    costs = Costs()
    assert costs.of(PLAIN, body)[1] is costs.of(PLAIN, b"")[1]


def test_a_longer_prompt_costs_more_for_the_same_tokens() -> None:
    costs = Costs()
    bodies = [b'{"max_tokens": 10, "prompt": "%s"}' % (b"x" * num) for num in (0, 10_000)]
    short, long = [costs.of(PLAIN, body)[0] for body in bodies * 30][-2:]
    assert long > 2 * short


def test_a_longer_body_costs_more() -> None:
    costs = Costs()
    for num in (10, 1000) * 30:
        costs.of(PLAIN, b"x" * num)
    assert costs.of(PLAIN, b"x" * 1000)[0] == pytest.approx(1001 / 11 * costs.of(PLAIN, b"x" * 10)[0], rel=0.05)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e9])
def test_an_average_request_costs_about_1_in_any_unit(unit: float) -> None:
    told = costs_of_headers([unit * value for value in lognormal(2000)])
    assert sum(told) / len(told) == pytest.approx(1.0, abs=0.1)
    assert sum(told[-500:]) / 500 == pytest.approx(1.0, abs=0.15)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30), st.sampled_from([0.001, 7.0, 1e6]))
def test_the_unit_makes_no_difference(values: list[float], unit: float) -> None:
    assert costs_of_headers([unit * value for value in values]) == pytest.approx(costs_of_headers(values))


def test_the_mean_follows_when_another_unit_is_used() -> None:
    values = lognormal(1000)
    told = costs_of_headers([*values, *(1000.0 * value for value in values)])
    assert sum(told[-500:]) / 500 == pytest.approx(1.0, abs=0.15)


def test_a_kind_whose_requests_take_longer_costs_more() -> None:
    costs = Costs()
    quick, slow = make_head(cost=5.0), PLAIN
    before = [costs.of(head, b"")[0] for head in (quick, slow)]
    assert before == [1.0, 1.0]
    for _ in range(100):
        costs.learn(costs.of(quick, b"")[1], 1.0)
        costs.learn(costs.of(slow, b"")[1], 4.0)
    costs.tick()
    one, four = (costs.of(head, b"")[0] for head in (quick, slow))
    assert four == pytest.approx(4.0 * one)
    assert (one + four) / 2 == pytest.approx(1.0, abs=0.05)


def test_a_kind_that_nothing_was_learned_of_costs_what_all_cost() -> None:
    costs = Costs()
    costs.tick()
    assert costs.of(PLAIN, b"")[0] == 1.0
    for _ in range(50):
        costs.learn(costs.of(PLAIN, b"")[1], 10.0)
    costs.tick()
    assert costs.of(PLAIN, b"")[0] == pytest.approx(1.0)
    assert costs.of(make_head(cost=7.0), b"")[0] == 1.0


def test_within_a_kind_costs_keep_their_order() -> None:
    told = costs_of_headers([1.0] * 100 + [1.0, 2.0, 4.0, 8.0])[-4:]
    assert all(less < more for less, more in pairwise(told))
