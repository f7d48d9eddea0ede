"""Whether a cost grows in a straight line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench.series import Series


def test_a_straight_line_has_its_slope_and_explains_everything() -> None:
    series = Series({32: 1.0 + 32 * 0.5, 2: 1.0 + 2 * 0.5, 8: 1.0 + 8 * 0.5})
    assert series.slope == pytest.approx(0.5)
    assert series.r_squared == pytest.approx(1.0)


def test_a_fixed_cost_on_top_of_a_straight_line_is_no_growth() -> None:
    assert Series({2: 3.0, 8: 6.0, 32: 18.0}).worst_growth < 1.0


def test_a_cost_that_grows_with_the_square_shows_even_where_the_fit_is_good() -> None:
    series = Series({size: size**2 / 1e6 for size in (256, 1024, 4096)})
    assert series.r_squared > 0.9
    assert series.worst_growth == pytest.approx(4.0)


def test_the_environment_block_has_the_points_in_order() -> None:
    block = Series({8: 0.004, 2: 0.001}).as_dict()
    assert list(block["ms_by_size"].items()) == [("2", 1.0), ("8", 4.0)]
    assert block["r_squared"] == 1.0
    assert block["worst_growth_of_cost_per_worker"] == 1.0
