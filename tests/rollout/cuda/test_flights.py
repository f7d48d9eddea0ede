"""What was drawn comes to the host once, and not for rows that have ended."""

from __future__ import annotations

import pytest
import torch

from practicum.rollout.cuda.flights import Flights
from tests.rollout.cuda.test_slots import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_launches_land_in_their_order_without_those_that_have_ended() -> None:
    flights, own = Flights(8, None, torch.device("cuda")), rows(5, 3)
    for number in range(2):
        flights.tokens[:3] = torch.tensor([1, 2, 3], device="cuda") + 10 * number
        flights.log_probs[:3] = -0.5 - number
        flights.take_off(own, None)
    assert len(flights) == 2 and own[0].num_launched == 2
    assert [(row.answer, token, log_prob) for row, token, log_prob in flights.land()] == [
        (0, 1, -0.5), (1, 2, -0.5), (2, 3, -0.5)
    ]  # fmt: skip
    own[1].has_ended = True
    assert [(row.answer, token) for row, token, _ in flights.land()] == [(0, 11), (2, 13)]
    assert [row.num_launched for row in own] == [0, 0, 0]
