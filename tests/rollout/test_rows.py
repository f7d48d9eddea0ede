from __future__ import annotations

import numpy as np

from practicum.rollout.answers import Ending
from practicum.rollout.inbox import Ticket
from practicum.rollout.rows import Pending, Row
from practicum.rollout.sampling import uniforms
from practicum.types import Prompt, RolloutRequest, SamplingParams

PARAMS = SamplingParams(3, num_answers=2)
TICKET = Ticket(RolloutRequest(Prompt("1", text="?"), np.arange(5, dtype=np.int32), PARAMS, seed=7), lambda *_: None)


def test_a_row_has_numbers_of_its_own_and_ends_by_itself() -> None:
    row = Row(TICKET, 1, Ending(PARAMS, [9], None), 5)
    expected = uniforms([(7, 1)], 3)[0].tolist()
    assert row.uniform() == expected[0]
    assert row.push(4, -0.5) is None and row.uniform() == expected[1]
    assert row.push(9, -0.1) == "stop"
    assert (row.tokens, row.log_probs, row.length, row.most_tokens) == ([4, 9], [-0.5, -0.1], 7, 8)


def test_a_request_waits_until_all_its_answers_have_a_row() -> None:
    pending = Pending(TICKET, Ending(PARAMS, [9], None))
    assert (pending.num_left, pending.num_tokens, pending.most_tokens) == (2, 5, 8)
    pending.next_answer += 1
    assert pending.num_left == 1
