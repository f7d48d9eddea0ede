from __future__ import annotations

import pickle

import numpy as np
import pytest

from practicum.replay import coded, decoded
from practicum.types import RoutedExperts, route_dtype


def random_routes(num_tokens: int, num_layers: int, k: int, num_experts: int, seed: int = 0) -> RoutedExperts:
    random = np.random.default_rng([seed, num_tokens])
    experts = np.argsort(random.random((num_tokens, num_layers, num_experts)))[..., :k]
    experts = np.sort(experts, axis=-1).astype(route_dtype(num_experts))
    known = np.arange(num_tokens) < num_tokens - 1
    experts[~known] = 0  # what stands there means nothing
    return RoutedExperts(experts, np.arange(num_layers, dtype=np.int32) + 1, known, num_experts)


def assert_same(one: RoutedExperts, other: RoutedExperts) -> None:
    assert np.array_equal(one.known, other.known) and np.array_equal(one.layers, other.layers)
    assert one.experts.dtype == other.experts.dtype and one.num_experts == other.num_experts
    assert np.array_equal(one.experts[one.known], other.experts[one.known])


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (64, 8), (300, 4), (512, 10), (1, 1)])
def test_routes_of_many_samples_are_coded_at_once_and_read_one_by_one(num_experts: int, k: int) -> None:
    routes = [random_routes(num, 3, k, num_experts) for num in (1, 7, 64, 130, 2)]
    codes = coded(routes)
    for one, code in zip(routes, codes, strict=True):
        assert_same(one, decoded([code])[0])
    for one, back in zip(routes, decoded(codes), strict=True):
        assert_same(one, back)


def test_they_are_smaller_than_the_array() -> None:
    routes = random_routes(1000, 48, 8, 128)
    assert coded([routes])[0].num_bytes < 0.65 * routes.num_bytes


def test_what_is_not_coded_is_left_as_it_is() -> None:
    one, other = random_routes(5, 2, 2, 8), random_routes(9, 2, 2, 8)
    first, second = decoded([coded([one])[0], other])
    assert_same(first, one)
    assert second is other
    assert decoded([]) == [] and coded([]) == []


def test_coded_routes_travel_and_come_back() -> None:
    routes = [random_routes(num, 3, 2, 8) for num in (4, 6)]
    mixed = [None, *coded(routes), None]
    back = pickle.loads(pickle.dumps(mixed))
    assert back[0] is back[3] is None
    for one, own in zip(routes, back[1:3], strict=True):
        assert_same(one, decoded([own])[0])
