"""The launcher by its protocol: what it says when it cannot do what it was asked."""

from __future__ import annotations

import pytest

from practicum.errors import RewardError
from practicum.reward.sandbox import Limits, box, isolation_problem

isolated = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")


def ask(**changes: object) -> box.Outcome:
    spec = box.request(Limits(), False, None)
    spec |= {"argv": [*spec["argv"], "-c", "print(1)"], "stdins": [b""]} | changes
    with box.launch(spec) as launcher:
        return box.read_outcome(launcher, 30)


@isolated
def test_answers_with_an_outcome() -> None:
    assert ask().stdout == b"1\n"


@isolated
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"argv": ["/no/such/python"]}, "No such file"),
        ({"binds": [("/no/such/folder", "/lib")]}, "No such file"),
        ({"filter": b"\xff" * 8}, "system-call filter: Invalid argument"),
        ({"files": {"large": bytes(64 << 20)}}, "No space left"),
    ],
)
def test_refuses_in_words_and_never_runs_half_a_box(changes: dict[str, object], why: str) -> None:
    with pytest.raises(RewardError, match=f"could not be started.*{why}"):
        ask(**changes)


@isolated
def test_a_launcher_whose_caller_is_gone_starts_nothing() -> None:
    with pytest.raises(RewardError, match="ended before its program"):
        ask(caller=1)
