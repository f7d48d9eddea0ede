from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from practicum import Prompt, Sample
from practicum.config import RewardConfig
from practicum.errors import RewardError
from practicum.reward.rubric import Rubric
from practicum.types import Score
from tests.samples import make_sample

REWARDS = Path(__file__).parents[1] / "rewards.py"


def rubric(**config: Any) -> Rubric:
    return Rubric.make(RewardConfig.model_validate(config))


def sample(text: str, truth: Any = None, source: str = "") -> Sample:
    made = make_sample(text=text, truth=truth)
    return replace(made, prompt=replace(made.prompt, data_source=source))


def test_one_grader_is_its_own_score() -> None:
    assert rubric(grader="exact").grade_by_rule(sample("4", "4")) == Score(1.0)


def test_several_terms_are_a_weighted_sum_with_named_parts() -> None:
    made = rubric(
        terms=[
            {"grader": "exact"},
            {"grader": "exact", "options": {"ignore_case": True}, "weight": 0.5, "name": "loosely"},
        ]
    )
    assert made.grade_by_rule(sample("aa", "aa")) == Score(1.5, parts={"exact": 1.0, "loosely": 1.0})
    assert made.grade_by_rule(sample("aa", "AA")) == Score(0.5, parts={"exact": 0.0, "loosely": 1.0})


def test_one_term_with_a_weight_shows_its_raw_value_as_a_part() -> None:
    made = rubric(terms=[{"grader": "exact", "weight": 2.0}])
    assert made.grade_by_rule(sample("4", "4")) == Score(2.0, parts={"exact": 1.0})


def test_parts_of_a_term_keep_its_name_in_front() -> None:
    made = rubric(terms=[{"grader": "numeric", "name": "sum"}, {"grader": "exact"}])
    score = made.grade_by_rule(sample("The answer is 4", "4"))
    assert score.value == 1.0
    assert score.answer == "4"  # of the first term that tells
    assert set(score.parts) > {"sum", "exact"} and all(n in ("sum", "exact") or n[:4] == "sum/" for n in score.parts)


def test_a_term_that_cannot_be_graded_spoils_the_sum() -> None:
    made = rubric(terms=[{"grader": "exact"}, {"grader": "numeric", "weight": 0.1}])
    score = made.grade_by_rule(sample("4", "four"))
    assert (score.status, score.value) == ("invalid", None)
    assert score.reason.startswith("numeric: ")


def test_a_sum_that_is_no_number_is_invalid() -> None:
    made = rubric(terms=[{"grader": "exact", "weight": 1e308}, {"grader": "exact", "weight": 1e308, "name": "again"}])
    assert made.grade_by_rule(sample("4", "4")).status == "invalid"


def test_the_data_source_chooses_the_terms() -> None:
    made = rubric(grader="exact", sources={"sums": [{"grader": "numeric"}]})
    assert made.grade_by_rule(sample("4.0", "4", "sums")).value == 1.0
    assert made.grade_by_rule(sample("4.0", "4", "other")).value == 0.0


def test_a_source_without_a_grader_is_refused_before_the_run_and_never_a_zero() -> None:
    made = rubric(sources={"digits": [{"grader": "exact"}]})
    with pytest.raises(ValueError, match=r"data_source 'other': reward\.sources has only digits"):
        made.check(Prompt("p", text="?", answer="4", data_source="other"))
    with pytest.raises(ValueError, match="no data_source"):
        made.check(Prompt("p", text="?", answer="4"))
    assert made.grade_by_rule(sample("4", "4", "other")).status == "invalid"


def test_a_ground_truth_that_does_not_fit_names_source_and_grader() -> None:
    made = rubric(grader="exact", sources={"sums": [{"grader": "numeric", "name": "sum"}]})
    made.check(Prompt("p", text="?", answer="4", data_source="sums"))
    with pytest.raises(ValueError, match="data_source 'sums', grader sum: "):
        made.check(Prompt("p", text="?", answer="four", data_source="sums"))
    with pytest.raises(ValueError, match="no data_source, grader exact: "):
        made.check(Prompt("p", text="?"))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"grader": "exakt"}, "reward: there is no grader 'exakt'; did you mean 'exact'?"),
        ({"grader": "exact", "options": {"x": 1}}, "grader exact has no option 'x'"),
        ({"terms": [{"grader": "exact"}, {"grader": "exact"}]}, "two terms are called 'exact'; give one of them"),
        ({"sources": {"a": [{"grader": "zzz"}]}}, "reward.sources.a[0]: there is no grader 'zzz'"),
        ({"function": "nowhere.py:grade"}, "reward.function='nowhere.py:grade': file nowhere.py does not exist"),
        ({"grader": "classifier"}, "grader classifier asks a model: describe it under reward.model, or name servers"),
        (
            {"grader": "judge", "model": {"path": "m"}},
            "grader judge needs reward.model.kind=generative, not classifier",
        ),
        ({"grader": "endpoint"}, "grader endpoint needs the option 'urls'"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RewardError) as caught:
        rubric(**config)
    assert complaint in str(caught.value)


def test_what_needs_neither_processes_nor_others_is_by_rule() -> None:
    assert rubric(grader="exact").is_by_rule
    assert not rubric(grader="math").is_by_rule
    assert not rubric(terms=[{"grader": "exact"}, {"function": f"{REWARDS}:length"}]).is_by_rule
    judged = rubric(grader="judge", options={"urls": "http://127.0.0.1:1"})
    assert not judged.is_by_rule and len(judged.asks) == 1


def test_a_function_in_a_file_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REWARDS.parent)
    made = rubric(function="rewards.py:length")
    monkeypatch.chdir(tmp_path)
    (term,) = pickle.loads(pickle.dumps(made)).default
    assert term.name == "length"
    assert term.grader.grade(sample("abc")) == Score(3.0)


def test_whatever_decides_the_score_is_in_the_identity(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def grade(sample): return 1.0\ndef other(sample): return 1.0\n")
    made = [
        rubric(grader="exact"),
        rubric(grader="exact", options={"ignore_case": True}),
        rubric(grader="numeric"),
        rubric(function=f"{file}:grade"),
        rubric(function=f"{file}:other"),
        rubric(grader="judge", options={"urls": "http://a", "votes": 1}),
        rubric(grader="judge", options={"urls": "http://b", "votes": 1}),
    ]
    identities = [one.default[0].identity for one in made]
    file.write_text("def grade(sample): return 2.0\ndef other(sample): return 1.0\n")
    identities.append(rubric(function=f"{file}:grade").default[0].identity)
    assert len(set(identities)) == len(identities)
    weighted = rubric(terms=[{"grader": "exact", "weight": 3.0, "name": "x"}])
    assert weighted.default[0].identity == identities[0]  # the weight comes in after
