from __future__ import annotations

import pytest

from practicum.train.schedule import SCHEDULES, lr_factor


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero_at_the_end() -> None:
    rates = [lr_factor("linear", update, 10, 2) for update in range(11)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[10] == 0.0


@pytest.mark.parametrize(("schedule", "halfway"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)])
def test_halfway(schedule: str, halfway: float) -> None:
    assert lr_factor(schedule, 50, 100, 0) == pytest.approx(halfway)
    assert schedule in SCHEDULES
