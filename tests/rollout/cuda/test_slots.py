"""Who has which slot and pages, and what the device is told of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from practicum.rollout.answers import Ending
from practicum.rollout.inbox import Ticket
from practicum.rollout.rows import Pending

from practicum.rollout.cuda.pages import PAGE
from practicum.rollout.cuda.slots import Seats, SlotRow
from practicum.types import Prompt, RolloutRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def rows(num_prompt: int, num: int) -> list[SlotRow]:
    params = SamplingParams(500, num_answers=num, top_k=3_000_000_000)
    asked = RolloutRequest(Prompt("p", text="?"), np.ones(num_prompt, np.int32), params, 2**64 - 1)
    pending = Pending(Ticket(asked, lambda *_: None), Ending(params, [1], None))
    return [SlotRow(pending, answer) for answer in range(num)]


@pytest.fixture
def seats() -> Any:
    seats = Seats(4, 1000, torch.device("cuda"))
    seats.begin_anew(9)
    return seats


def test_answers_to_a_prompt_share_the_pages_that_it_fills(seats: Seats) -> None:
    own = rows(2 * PAGE + 3, 3)
    seats.seat([own])
    assert len({tuple(row.pages[:2]) for row in own}) == 1
    assert len({row.pages[2] for row in own}) == len({row.slot for row in own}) == 3
    assert (seats.num_free, seats.pool.num_free) == (1, 3)
    for row in own:
        assert seats.slots.tables[row.slot, :3].tolist() == row.pages
        assert seats.slots.positions[row.slot] == 2 * PAGE + 2
        assert seats.slots.seeds[row.slot] == -1  # the same bits
    for row in own:
        seats.leave(row)
    assert (seats.num_free, seats.pool.num_free) == (4, 8)


def test_rows_grow_all_or_none(seats: Seats) -> None:
    first, second = rows(PAGE - 1, 1)[0], rows(5 * PAGE - 1, 1)[0]
    seats.seat([[first], [second]])
    assert seats.grow([first, second]) and seats.pool.num_free == 2
    first.num_launched = second.num_launched = 2
    taken = seats.pool.take(1)
    assert not seats.grow([first, second])
    assert (len(first.pages), len(second.pages), seats.pool.num_free) == (1, 5, 1)
    seats.pool.give_back(taken)
    assert seats.grow([first, second])
    assert seats.slots.tables[second.slot, :6].tolist() == second.pages
