from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from practicum.errors import RewardError
from practicum.reward.graders import GRADERS, Grader, make_grader
from practicum.reward.graders.numeric import Numeric

RULES = ("exact", "numeric", "math", "choice", "regex", "json_schema", "overlong", "repetition")


def test_graders_are_made_by_name() -> None:
    assert make_grader("numeric", {"marker": "####"}, "reward") == Numeric(marker="####")
    assert set(RULES) <= set(GRADERS)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_says_what_it_does(name: str) -> None:
    assert GRADERS[name].__doc__


@pytest.mark.parametrize("grader", GRADERS.values())
def test_every_option_says_what_it_does(grader: type[Grader]) -> None:
    for name, field in grader.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "numerik",
            {},
            "reward.graders[0]: there is no grader 'numerik'; did you mean 'numeric'? the graders are: exact,",
        ),
        ("zzz", {}, "reward.graders[0]: there is no grader 'zzz'; the graders are: exact,"),
        ("exact", {"ignorecase": True}, "grader exact has no option 'ignorecase'; did you mean 'ignore_case'?"),
        ("exact", {"zzz": 1}, "grader exact has no option 'zzz'; its options are: ignore_case, ignore_punctuation."),
        ("json_schema", {"schemas": {}}, "did you mean 'schema'? its options are: schema, schema_key, fenced."),
        ("math", {"strict": True}, "grader math has no option 'strict'; it has none."),
        ("overlong", {"margin": 1}, "grader overlong needs the option 'max_tokens'."),
        ("overlong", {"max_tokens": 1, "margin": 2}, "grader overlong: margin=2 must not be larger"),
        ("repetition", {"n": 0}, "grader repetition, option n = 0: should be greater than or equal to 1."),
        ("repetition", {"n": 0, "unit": "x"}, "2 mistakes\n  - grader repetition, option n"),
        ("regex", {"pattern": "("}, "grader regex: pattern='(' is not a regular expression"),
        ("json_schema", {"schema": "missing.json"}, "grader json_schema: schema file missing.json cannot be read"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as caught:
        make_grader(name, options, "reward.graders[0]")
    assert str(caught.value).startswith("reward.graders[0]: ")
    assert message in str(caught.value)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, practicum.reward.graders; print(*{'sympy', 'torch', 'ray', 'jsonschema'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
