"""Contests in which one process may speak for several sides and measures several numbers in a step.

A step's parts are then named `SIDE: NUMBER` (`practicum: noop`, `verl (NumPy): rows`), whichever process they are from,
and a table says which number stands in which row. What others used of the machine while they were taken is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from bench.harness import Row, beside
from bench.turns import Plan, alternate, opened

OURS = "practicum"
END_S = 3.0  # then contestants are killed: Ray's processes take their time to part, and leave nothing of worth
Sides = dict[str, dict[str, float]]  # side -> number -> its median over the steps
Table = Sequence[tuple[str, str, str, Literal["higher", "lower"]]]  # case, metric, number, which way is better


def contest(commands: Mapping[str, Sequence[str]], plan: Plan, env: Mapping[str, str]) -> tuple[Sides, dict[str, Any]]:
    """Let contestants take turns; return their numbers, and what the result file says of how they were measured."""
    with TemporaryDirectory(prefix="bench-") as folder, opened(commands, Path(folder), env, END_S) as contestants:
        tallies = alternate(contestants, plan)
    sides: Sides = {}
    for tally in tallies.values():
        for name, value in tally.parts().items():
            side, colon, number = name.partition(": ")
            if colon:  # else it is the step as a whole
                sides.setdefault(side, {})[number] = value
    return sides, {
        "rounds": plan.num_rounds,
        "ray_settings": dict(env),
        "versions": {name: dict(tally.versions) for name, tally in tallies.items()},
        "cpu_share_of_others": round(max(tally.others_share for tally in tallies.values()), 3),
    }


def rows_of(table: Table, sides: Sides) -> list[Row]:
    """Return ours beside all others who have the number, for each line of the table whose number we have."""
    rows = []
    for case, metric, number, better in table:
        if number in sides.get(OURS, {}):
            found = {side: numbers[number] for side, numbers in sides.items() if number in numbers}
            rows += beside(case, metric, found.pop(OURS), found, better)
    return rows
