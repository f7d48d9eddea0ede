from __future__ import annotations

from practicum.controller.averages import MovingAverages


def test_what_was_seen_is_expected_again_of_the_same_key_only() -> None:
    averages = MovingAverages()
    averages.add("code", 2.0)
    assert averages.get("code", 7.0) == 2.0 and averages.get("sums", 7.0) == 7.0


def test_one_outlier_does_not_change_the_expectation_much_but_many_do() -> None:
    averages = MovingAverages()
    averages.add("sums", 1.0)
    averages.add("sums", 10.0)
    assert 1.0 < averages.get("sums", 0.0) < 2.0
    for _ in range(200):
        averages.add("sums", 10.0)
    assert 9.0 < averages.get("sums", 0.0) <= 10.0
