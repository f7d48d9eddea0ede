"""How failures of several ranks are told; the rest of a crew is seen through its group."""

from __future__ import annotations

import pickle

from practicum.controller.crew import _with_company
from practicum.errors import WorkerDied, WorkerError


def failure(kind: type[WorkerError], rank: int, group: str = "crew") -> WorkerError:
    return kind(f"rank {rank} failed", group=group, ranks=[rank])


def test_others_who_failed_in_the_same_way_are_named_too() -> None:
    told = _with_company([failure(WorkerError, 0), failure(WorkerError, 1), failure(WorkerError, 2)])
    assert (str(told), told.ranks) == ("rank 0 failed [ranks 1-2 failed too]", (0, 1, 2))


def test_those_who_failed_in_another_way_or_elsewhere_are_not() -> None:
    told = _with_company([failure(WorkerDied, 1), failure(WorkerError, 0), failure(WorkerDied, 2, "other")])
    assert (str(told), told.ranks) == ("rank 1 failed", (1,))
    assert [str(other) for other in told.others] == ["rank 0 failed", "rank 2 failed"]
    assert [str(other) for other in pickle.loads(pickle.dumps(told)).others] == ["rank 0 failed", "rank 2 failed"]
