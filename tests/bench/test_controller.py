"""The `controller` benchmark without Ray: its rows, and a contestant's step on teams of plain objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench.controller import FURTHER, OWN, TABLE, add_growth
from bench.controller_work import items, rows, time_batches, time_start, timed
from bench.sides import Sides, contest, rows_of
from bench.turns import Plan

COUNTS = {"items": 2, "rows": 1}
OURS = {"noop": 1.0, "rows": 50.0, "items": 2.0, "start": 0.8, "noop_8": 4.0, "noop_32": 16.0}
OURS_WITH_FAKES = {**OURS, "fakes_256": 0.256, "fakes_1024": 1.024}


BURN = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True); input()"


class SleepingTeam:
    """Processes that use some CPU time and then sleep; its echoes are answered on the spot."""

    def __init__(self, num_workers: int) -> None:
        command = [sys.executable, "-c", BURN]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num_workers)
        ]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def noop(self) -> None:
        pass

    def batches(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        yield "items", "", items
        yield "rows", "quickly", lambda: rows().copy()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        for process in self._processes:
            process.communicate(b"\n")


class ForgetfulTeam(SleepingTeam):
    def batches(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        yield "rows", "", lambda: np.zeros_like(rows())


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


@pytest.fixture
def stopped() -> Iterator[Callable[[type[SleepingTeam]], Callable[[int], SleepingTeam]]]:
    """Makes teams whose processes are gone after the test, whatever became of it."""
    teams: list[SleepingTeam] = []

    def starter(kind: type[SleepingTeam]) -> Callable[[int], SleepingTeam]:
        def start(num_workers: int) -> SleepingTeam:
            teams.append(kind(num_workers))
            return teams[-1]

        return start

    yield starter
    for team in teams:
        for process in team._processes:
            process.kill()
            process.wait()


def test_each_case_has_a_row_against_each_peer_in_its_own_unit() -> None:
    bare = {"noop": 2.0, "rows": 100.0, "items": 4.0, "start": 0.4, "noop_8": 8.0, "noop_32": 32.0}
    verl = {"noop": 4.0, "rows": 500.0, "items": 10.0, "start": 8.0}
    variants = {"verl (TensorDict)": {"rows": 600.0}, "verl (NumPy)": {"rows": 200.0}}
    found = rows_of(TABLE, {"practicum": OURS, "bare ray": bare, "verl": verl, **variants})
    assert [(row.case, row.peer_name, rounded(row.ratio)) for row in found] == [
        ("no-op, 2 workers", "bare ray", 2.0),
        ("no-op, 2 workers", "verl", 4.0),
        ("64 MiB batch, 2 workers", "bare ray", 2.0),
        ("64 MiB batch, 2 workers", "verl", 10.0),
        ("64 MiB batch, 2 workers", "verl (TensorDict)", 12.0),
        ("64 MiB batch, 2 workers", "verl (NumPy)", 4.0),
        ("64 small items, 2 workers", "bare ray", 2.0),
        ("64 small items, 2 workers", "verl", 5.0),
        ("start-up, 2 workers", "bare ray", 0.5),
        ("start-up, 2 workers", "verl", 10.0),
    ]
    first, last = found[0], found[-1]
    assert (first.metric, rounded(first.ours), rounded(first.peer)) == ("ms per call", 1.0, 2.0)
    assert (last.metric, rounded(last.ours), rounded(last.peer)) == ("s", 0.8, 8.0)


def test_without_verl_the_rows_against_bare_ray_remain() -> None:
    found = rows_of(TABLE, {"practicum": OURS, "bare ray": OURS})
    assert {row.peer_name for row in found} == {"bare ray"}
    assert len(found) == len(TABLE) - 2  # growth is measured apart


def test_growth_is_the_slope_and_fakes_have_no_peer() -> None:
    growing = {"practicum": OURS_WITH_FAKES, "bare ray": {"noop": 2.0, "noop_8": 8.0, "noop_32": 32.0}}
    sides: Sides = {"practicum": {}, "bare ray": {}}
    workers = add_growth(sides, FURTHER, growing, "noop")
    fakes = add_growth(sides, OWN, growing, "fakes")
    rows = [(rounded(row.ours), rounded(row.peer), row.peer_name) for row in rows_of(TABLE, sides)]
    assert rows == [(500.0, 1000.0, "bare ray"), (1.0, None, None)]
    assert set(workers) == {"practicum", "bare ray"} and set(fakes) == {"practicum"}
    assert list(workers["practicum"]["ms_by_size"]) == ["2", "8", "32"]
    assert list(fakes["practicum"]["ms_by_size"]) == ["256", "1024"]


def test_batches_are_timed_by_side_and_way(stopped: Any) -> None:
    timings = time_batches({"one": stopped(SleepingTeam)(1), "other": stopped(SleepingTeam)(1)}, COUNTS)
    assert set(timings) == {"one: items", "other: items", "one (quickly): rows", "other (quickly): rows"}


def test_the_parts_of_a_step_are_sorted_by_side() -> None:
    script = """
from bench.contestant import Line, step
line = Line()
numbers = {"practicum: noop": 1.0, "verl (NumPy): rows": 3.0, "practicum: math: s": 2.0}
line.serve([], lambda case: step(1.0, 1, **numbers))
"""
    plan = Plan(warmup_steps=0, num_rounds=1, steps_per_turn=1)
    sides, where = contest({"one": [sys.executable, "-c", script]}, plan, {})
    assert sides == {"practicum": {"noop": 1.0, "math: s": 2.0}, "verl (NumPy)": {"rows": 3.0}}
    assert where["rounds"] == 1


def test_sides_take_turns_and_make_as_many_calls() -> None:
    calls: list[str] = []
    timed("call", {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 30)
    assert (calls.count("a"), calls.count("b")) == (30, 30)
    assert "".join(calls) == "a" * 7 + "b" * 14 + "a" * 14 + "b" * 14 + "a" * 9 + "b" * 2


def test_an_answer_that_differs_from_what_was_sent_is_refused(stopped: Any) -> None:
    with pytest.raises(RuntimeError, match="us, rows: what came back is not what was sent"):
        time_batches({"us": stopped(ForgetfulTeam)(1)}, COUNTS)


def test_a_start_counts_the_cpu_time_of_the_processes_that_it_ended(stopped: Any) -> None:
    _, ended_cpu_s = time_start(stopped(SleepingTeam))
    assert ended_cpu_s > 0.1  # more than one of the two burns


def test_a_start_that_found_its_processes_running_is_refused(stopped: Any) -> None:
    running = stopped(SleepingTeam)(2)
    with pytest.raises(RuntimeError, match="were running before the start-up"):
        time_start(lambda _: running)


# Growth in a straight line


def growth(ms_by_size: dict[int, float]) -> tuple[float, dict[str, Any]]:
    sides: Sides = {"us": {}}
    points = add_growth(sides, FURTHER, {"us": {f"fakes_{size}": ms for size, ms in ms_by_size.items()}}, "fakes")
    return sides["us"][FURTHER], points["us"]


def test_a_straight_line_has_its_slope_and_explains_everything() -> None:
    slope, points = growth({size: 1.0 + size * 0.5 for size in (32, 2, 8)})
    assert slope == pytest.approx(500.0)
    assert points["r_squared"] == 1.0
    assert list(points["ms_by_size"].items()) == [("2", 2.0), ("8", 5.0), ("32", 17.0)]


def test_a_fixed_cost_on_top_of_a_straight_line_is_no_growth() -> None:
    assert growth({2: 3.0, 8: 6.0, 32: 18.0})[1]["worst_growth_of_cost_per_worker"] < 1.0


def test_a_cost_that_grows_with_the_square_shows_even_where_the_fit_is_good() -> None:
    _, points = growth({size: size**2 / 1e3 for size in (256, 1024, 4096)})
    assert points["r_squared"] > 0.9
    assert points["worst_growth_of_cost_per_worker"] == 4.0
