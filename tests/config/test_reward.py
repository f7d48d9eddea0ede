from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from practicum.config import LimitsConfig, RewardConfig, TermConfig


def complaint(**config: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate(config)
    return str(caught.value)


def test_one_grader_or_function_is_one_term() -> None:
    options = {"ignore_case": True}
    assert RewardConfig(grader="exact", options=options).all_terms == (TermConfig(grader="exact", options=options),)
    assert RewardConfig(function="f.py:g").all_terms == (TermConfig(function="f.py:g"),)
    terms = (TermConfig(grader="exact"), TermConfig(function="f.py:g", weight=0.5))
    assert RewardConfig(terms=terms).all_terms == terms


def test_sources_alone_are_enough() -> None:
    assert RewardConfig(sources={"sums": (TermConfig(grader="numeric"),)}).all_terms == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "set exactly one of reward.grader, reward.function and reward.terms"),
        ({"grader": "exact", "function": "f.py:g"}, "set exactly one of"),
        ({"grader": "exact", "terms": [{"grader": "exact"}]}, "set exactly one of"),
        ({"function": "f.py:g", "options": {"a": 1}}, "reward.options are those of reward.grader"),
        ({"terms": [{"grader": "exact"}], "options": {"a": 1}}, "each of reward.terms has its own"),
        ({"terms": [{}]}, "set exactly one of grader and function"),
        ({"terms": [{"grader": "exact", "function": "f.py:g"}]}, "set exactly one of grader and function"),
        ({"terms": [{"function": "f.py:g", "options": {"a": 1}}]}, "options are for graders"),
        ({"sources": {"a": [{"grader": "exact", "name": ""}]}}, "at least 1 character"),
        ({"grader": "exact", "max_failure_share": 1.0}, "less than 1"),
        ({"grader": "exact", "timeout_s": 0}, "greater than 0"),
        ({"grader": "exact", "retries": -1}, "greater than or equal to 0"),
        ({"grader": "exact", "on_failure": "zero"}, "'mask' or 'drop_group'"),
        ({"grader": "exact", "memory_mb": 1}, "greater than or equal to 64"),
        ({"grader": "exact", "limits": {"concurrency": 0}}, "greater than or equal to 1"),
        ({"grader": "exact", "model": {"path": "m", "replicas": 0}}, "greater than or equal to 1"),
        ({"grader": "exact", "model": {"path": "m", "kind": "oracle"}}, "'classifier' or 'generative'"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], words: str) -> None:
    assert words in complaint(**config)


def test_limits_are_set_when_one_of_them_is() -> None:
    assert not LimitsConfig().are_set
    assert LimitsConfig(tokens_per_minute=1).are_set
    assert LimitsConfig(concurrency=1).are_set
