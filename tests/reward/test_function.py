from __future__ import annotations

import time
from pathlib import Path

import pytest

from practicum.errors import RewardError
from practicum.reward.function import FunctionGrader, load_function
from practicum.types import Score
from tests.samples import make_sample

REWARDS = Path(__file__).parents[1] / "rewards.py"
SAMPLES = [make_sample(text=str(i), seed=i) for i in range(4)]


def grade(name: str, timeout_s: float = 5.0) -> list[Score]:
    return FunctionGrader(load_function(f"{REWARDS}:{name}"), timeout_s).grade(SAMPLES)


def test_plain_functions_async_functions_and_lists() -> None:
    assert [score.value for score in grade("length")] == [1.0] * 4
    assert [score.value for score in grade("patient")] == [0.0, 1.0, 2.0, 3.0]
    assert [score.value for score in grade("in_bulk")] == [0.0, 1.0, 2.0, 3.0]
    assert grade("with_parts")[0].parts == {"length": 3}


def test_async_functions_run_side_by_side() -> None:
    grader = FunctionGrader(load_function(f"{REWARDS}:patient"), 5.0)
    start = time.monotonic()
    grader.grade([make_sample(text="1")] * 40)
    assert time.monotonic() - start < 1.0  # one after the other: two seconds


def test_an_import_path_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("math:floor").function(1.5) == 1
    (tmp_path / "beside_me.py").write_text("def grade(sample): return 1.0")
    monkeypatch.chdir(tmp_path)
    assert load_function("beside_me:grade").function(None) == 1.0


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 3.0")
    (tmp_path / "uses.py").write_text("import neighbour_of_reward as n\ndef grade(sample): return n.VALUE")
    assert load_function(f"{tmp_path}/uses.py:grade").function(None) == 3.0


@pytest.mark.parametrize("name", ["blocks_the_loop", "will_not_be_cancelled", "exits_async", "times_out_itself"])
def test_async_functions_are_held_to_the_deadline_too(name: str) -> None:
    start = time.monotonic()
    scores = grade(name, timeout_s=0.3)
    assert time.monotonic() - start < 2.5
    bad = {"exits_async": "invalid", "times_out_itself": "invalid"}.get(name, "timeout")
    assert scores[1].status == bad and scores[1].value is None
    if name != "blocks_the_loop":  # one that blocks stops its neighbours from running at all
        assert [score.status for score in scores] == ["ok", bad, "ok", "ok"]


def test_a_function_that_always_hangs_does_not_take_its_time_for_every_sample() -> None:
    grader = FunctionGrader(load_function(f"{REWARDS}:always_hangs"), 0.05)
    start = time.monotonic()
    scores = grader.grade([make_sample()] * 500)
    assert time.monotonic() - start < 5
    assert {score.status for score in scores} == {"timeout"}
    assert "not tried" in scores[-1].reason


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises_on_one", "invalid", "raised KeyError: 'no such thing'"),
        ("hangs_on_one", "timeout", "took longer than 0.3 s"),
        ("exits_on_one", "invalid", "SystemExit(3)"),
    ],
)
def test_a_failure_costs_that_sample_and_no_other(name: str, status: str, reason: str) -> None:
    scores = grade(name, timeout_s=0.3)
    assert [score.status for score in scores] == ["ok", status, "ok", "ok"]
    assert scores[1].value is None
    assert reason in scores[1].reason


@pytest.mark.parametrize("name", ["not_a_number", "returns_text", "one_too_few"])
def test_a_useless_return_value_is_invalid_not_zero(name: str) -> None:
    scores = grade(name)
    assert [(score.status, score.value) for score in scores] == [("invalid", None)] * 4
    assert "returned" in scores[0].reason


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("nowhere.py:grade", "nowhere.py does not exist"),
        (f"{REWARDS}:grdae", "has no function 'grdae'"),
        (f"{REWARDS}:takes_two", "cannot be called with one sample"),
        (f"{REWARDS}:takes_none", "cannot be called with one sample"),
        ("no_such_package.module:grade", "import raised ModuleNotFoundError"),
        ("just_a_name", "write path/to/file.py:function"),
    ],
)
def test_a_function_that_cannot_work_is_refused_by_name(spec: str, complaint: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_function(spec)
    assert complaint in str(caught.value)
    assert spec in str(caught.value)


def test_a_file_that_fails_on_import_says_how(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        load_function(f"{tmp_path}/broken.py:grade")
