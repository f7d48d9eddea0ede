"""What continuous batching is on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.rollout.inbox import Inbox, Ticket
from practicum.rollout.native import NativeRollout
from practicum.types import SamplingParams
from tests.rollout.contract import request


@pytest.fixture
def engine(tiny_model: Path) -> Any:
    engine = NativeRollout(
        str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=1, keep_routes=True
    )  # fmt: skip
    engine.resume()
    yield engine
    engine.close()


def test_what_waits_for_a_row_is_told_untouched_when_all_is_broken_off(engine: Any, tokenizer: Any) -> None:
    inbox, found = Inbox(), {}

    def begun(answer: int, tokens: list[int], log_probs: list[float]) -> None:
        inbox.abort()

    params = SamplingParams(30, num_answers=2, ignore_eos=True)
    for index in range(2):
        own = request(tokenizer, "1+2=", params, seed=index)

        def told(answer: int, sample: Any, index: int = index) -> None:
            found[index, answer] = sample

        assert inbox.put(Ticket(own, told, begun))
    engine.write(inbox)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {sample.finish_reason for sample in found.values()} == {"abort"}
    assert sorted(len(sample.token_ids) for sample in found.values())[:3] == [0, 0, 0]


def test_routes_are_known_of_all_tokens_but_the_last_and_ascend(engine: Any, tokenizer: Any) -> None:
    (sample,) = engine.generate([request(tokenizer, "1+2=", SamplingParams(9, ignore_eos=True))])
    assert sample.routes.known.tolist() == [True] * (sample.num_tokens - 1) + [False]
    assert (np.diff(sample.routes.experts[:-1].astype(int)) > 0).all()
