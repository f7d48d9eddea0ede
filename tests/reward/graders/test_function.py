from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from practicum.errors import RewardError
from practicum.reward.graders.function import load_function, shape_of, source_of
from practicum.types import Score
from tests.reward.builders import REWARDS, function, graded_by_worker, samples_of

SAMPLES = samples_of("0", "1", "2", "3", truth="1")


def grade(name: str, timeout_s: float = 5.0, samples: Any = None) -> list[Score]:
    """In processes, as a run does it; what a failure of the term is called is left out of its reason."""
    graded = graded_by_worker({"function": function(name)}, samples or SAMPLES, timeout_s=timeout_s)
    return [one.score for one in graded]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("length", [1.0] * 4),
        ("patient", [0.0, 1.0, 2.0, 3.0]),
        ("in_bulk", [0.0, 1.0, 2.0, 3.0]),
        ("in_bulk_async", [4.0] * 4),
        ("how_many_at_once", [4.0] * 4),
        ("compute_score", [0.0, 1.0, 0.0, 0.0]),
        ("compute_score_async", [0.0, 1.0, 0.0, 0.0]),
        ("compute_score_of_less", [0.0, 1.0, 0.0, 0.0]),
        ("an_object", [3.0] * 4),
        ("an_async_object", [4.0] * 4),
        ("a_partial", [3.0] * 4),
    ],
)
def test_plain_functions_async_functions_lists_and_those_written_for_verl(name: str, values: list[float]) -> None:
    assert [score.value for score in grade(name)] == values


def test_scores_with_parts() -> None:
    assert grade("with_parts")[0].parts == {"length": 3}
    assert grade("compute_score")[1].parts == {"acc": 1.0}  # what is no number is left out


def test_a_function_may_say_itself_that_it_cannot_grade() -> None:
    assert grade("gives_up")[0] == Score.failed("invalid", "gives_up: no answer found")


def test_async_functions_run_side_by_side() -> None:
    scores = grade("meets", timeout_s=20.0, samples=samples_of(*["100"] * 100))
    assert [score.value for score in scores] == [100.0] * 100


def test_an_import_path_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("math:floor")(1.5) == 1
    (tmp_path / "beside_me.py").write_text("def grade(sample): return 1.0")
    monkeypatch.chdir(tmp_path)
    assert load_function("beside_me:grade")(None) == 1.0


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 3.0")
    (tmp_path / "uses.py").write_text("import neighbour_of_reward as n\ndef grade(sample): return n.VALUE")
    graded = graded_by_worker({"function": f"{tmp_path}/uses.py:grade"}, SAMPLES)
    assert [one.score.value for one in graded] == [3.0] * 4


@pytest.mark.parametrize("name", ["blocks_the_loop", "will_not_be_cancelled", "exits_async", "times_out_itself"])
def test_async_functions_are_held_to_the_deadline_too(name: str) -> None:
    scores = grade(name, timeout_s=0.3)
    bad = {"exits_async": "invalid", "times_out_itself": "invalid"}.get(name, "timeout")
    assert [score.status for score in scores] == ["ok", bad, "ok", "ok"]
    assert scores[1].value is None


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises_on_one", "invalid", "raised KeyError: 'no such thing'"),
        ("hangs_on_one", "timeout", "took longer than 0.3 s"),
        ("exits_on_one", "invalid", "SystemExit: 3"),
    ],
)
def test_a_failure_costs_that_sample_and_no_other(name: str, status: str, reason: str) -> None:
    scores = grade(name, timeout_s=0.3)
    assert [score.status for score in scores] == ["ok", status, "ok", "ok"]
    assert scores[1].value is None
    assert reason in scores[1].reason and scores[1].reason.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_a_number", "finite"),
        ("returns_text", "'good' is neither a number nor a Score"),
        ("one_too_few", "returned 0 scores for 1 samples"),
        ("parts_that_are_no_numbers", "part 'verdict' is 'good', not a number"),
    ],
)
def test_a_useless_return_value_is_invalid_not_zero(name: str, reason: str) -> None:
    scores = grade(name)
    assert [(score.status, score.value) for score in scores] == [("invalid", None)] * 4
    assert reason in scores[0].reason


def test_one_useless_value_in_a_list_costs_its_own_sample() -> None:
    scores = grade("one_bad_value")
    assert [score.status for score in scores] == ["ok", "invalid", "ok", "ok"]
    assert "returned what is no score" in scores[1].reason


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("nowhere.py:grade", "nowhere.py does not exist"),
        (f"{REWARDS}:grdae", "has no function 'grdae'; it defines share_of_even_digits, length"),
        (f"{REWARDS}:REWARDS", "has no function 'REWARDS'"),
        (f"{REWARDS}:takes_two", "cannot be called with one sample"),
        (f"{REWARDS}:takes_none", "cannot be called with one sample"),
        (f"{REWARDS}:compute_score_of_more", "verl's def compute_score(data_source, solution_str"),
        ("builtins:max", "does not say what it takes"),
        ("no_such_package.module:grade", "import raised ModuleNotFoundError"),
        ("just_a_name", "write path/to/file.py:function"),
        (":grade", "write path/to/file.py:function"),
    ],
)
def test_a_function_that_cannot_work_is_refused_by_name(spec: str, complaint: str) -> None:
    with pytest.raises(RewardError) as caught:
        shape_of(spec)
    assert complaint in str(caught.value)
    assert spec in str(caught.value)


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(1)", "def grade(sample:"])
def test_a_file_that_fails_on_import_says_how(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(RewardError, match=r"broken\.py raised (ZeroDivisionError|SystemExit|SyntaxError)"):
        load_function(f"{tmp_path}/broken.py:grade")


def test_the_state_of_the_file_is_part_of_what_tells_functions_apart(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def grade(sample): return 1.0")
    graded = load_function(f"{file}:grade")
    first = source_of(graded)
    assert source_of(graded) == first
    file.write_text("def grade(sample): return 2.0")
    assert source_of(graded) != first
    sources = {source_of(load_function(function(name))) for name in ("length", "an_object", "a_partial")}
    assert len(sources) == 1 and sources != {""}
    assert source_of(load_function("math:floor")) == ""
