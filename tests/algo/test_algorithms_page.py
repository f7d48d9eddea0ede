"""docs/algorithms.md names every choice there is, and its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from practicum.algo import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LEVELS, LOSSES

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
UNNAMED = {"eps"}  # of no use to anyone choosing


@pytest.mark.parametrize(
    "key, names",
    [
        ("algorithm.advantage", ADVANTAGES),
        ("algorithm.loss", LOSSES),
        ("algorithm.aggregation", AGGREGATIONS),
        ("algorithm.kl.estimator", KL_ESTIMATORS),
        ("algorithm.correction.kind", CORRECTIONS),
        ("algorithm.correction.level", LEVELS),
    ],
)
def test_every_entry_of_a_table_has_its_config_line(key: str, names: Iterable[str]) -> None:
    assert set(re.findall(rf"`{re.escape(key)}=(\w+)`", PAGE)) == set(names)


def test_every_option_is_named() -> None:
    functions = [estimator.function for estimator in ADVANTAGES.values()] + [*LOSSES.values(), *CORRECTIONS.values()]
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        for option in (p.name for p in parameters if p.kind is p.KEYWORD_ONLY):
            assert option in UNNAMED or re.search(rf"\b{option}\b", PAGE), f"{function.__name__}: {option}"
