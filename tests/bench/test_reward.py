"""The `reward` benchmark without Ray and verl: what is graded, how it is counted, and its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import reward, reward_ours
from bench.harness import Options
from bench.reward_functions import ASYNC, HOSTILE, MATH, MISDEEDS, RAISE, REPLICAS, RULE, SYNC, compute_score
from bench.reward_work import LOST, Batch, Item, hostile_items, math_items, num_lost, rule_items, timed
from bench.sides import Sides, rows_of
from practicum.reward.graders.math import Math
from practicum.types import Score

CPU_MS = "math: CPU ms per sample"
SIDES: Sides = {
    "practicum": {
        "rule: ms per call": 4.0,
        "math: samples/s": 1000.0,
        CPU_MS: 1.8,
        "math: share of two cores used": 0.9,
        "async: s / ideal s": 1.1,
        "sync: s / ideal s": 1.2,
        f"raise: {LOST}": 1,
        "hostile: s": 4.0,
        "hostile: samples with a wrong status or score": 2,
        "hostile: processes left": 0,
        "replicas: s": 8.0,
        "replicas: scores missing": 0,
        "replicas: largest difference of a score": 0.0,
    },
    "bare loop": {CPU_MS: 1.6},
    "bare loops on both cores": {CPU_MS: 1.7},
    "verl": {
        "rule: ms per call": 20.0,
        "math: samples/s": 500.0,
        CPU_MS: 2.0,
        "math: share of two cores used": 0.5,
        "sync: s / ideal s": 2.0,
        f"raise: {LOST}": 100,
    },
    "verl (rate_limited)": {"async: s / ideal s": 2.2, f"raise: {LOST}": 1},
    "deadline arithmetic": {"hostile: s": 6.0},
    "undisturbed": {"replicas: s": 2.0},
}


def answers(values: Sequence[float | None] | Exception) -> tuple[Batch, list[int]]:
    """Return a batch that gets these scores, or raises, and the list in which its calls are counted."""
    calls: list[int] = []

    def grade() -> Sequence[float | None]:
        calls.append(1)
        if isinstance(values, Exception):
            raise values
        return values

    return (grade, lambda graded: graded), calls


def found_rows(sides: Sides) -> list[tuple[str, str, str | None, float, float | None]]:
    rows = rows_of(reward.TABLE, sides)
    ratios = [None if row.ratio is None else round(row.ratio, 4) for row in rows]
    return [(r.case, r.metric, r.peer_name, round(r.ours, 4), ratio) for r, ratio in zip(rows, ratios, strict=True)]


def test_every_case_has_its_rows() -> None:
    math, sync, hostile = "math-verify", "sync function of 50 ms", "hostile, 1 % of each of five kinds"
    lost = "samples with neither their score nor a stated failure"
    assert found_rows(SIDES) == [
        ("rule, 64 samples", "ms per call", "verl", 4.0, 5.0),
        (math, "samples/s", "verl", 1000.0, 2.0),
        (math, "CPU ms per sample", "bare loop", 1.8, 0.8889),
        (math, "CPU ms per sample", "bare loops on both cores", 1.8, 0.9444),
        (math, "CPU ms per sample", "verl", 1.8, 1.1111),
        (math, "share of two cores used", "verl", 0.9, 1.8),
        ("async function of 50 ms", "s / ideal s", "verl (rate_limited)", 1.1, 2.0),
        (sync, "s / ideal s", "verl", 1.2, 1.6667),
        ("hostile, 1 % raise", lost, "verl", 1.0, 100.0),
        ("hostile, 1 % raise", lost, "verl (rate_limited)", 1.0, 1.0),
        (hostile, "s", "deadline arithmetic", 4.0, 1.5),
        (hostile, "samples with a wrong status or score", None, 2.0, None),
        (hostile, "processes left", None, 0.0, None),
        ("one replica killed, one hung", "s", "undisturbed", 8.0, 0.25),
        ("one replica killed, one hung", "scores missing", None, 0.0, None),
        ("one replica killed, one hung", "largest difference of a score", None, 0.0, None),
    ]


def test_without_verl_the_same_cases_remain() -> None:
    alone = found_rows({name: numbers for name, numbers in SIDES.items() if not name.startswith("verl")})
    assert {row[0] for row in alone} == {row[0] for row in found_rows(SIDES)}
    bare = {"bare loop", "bare loops on both cores"}
    assert {row[2] for row in alone} == {None, *bare, "deadline arithmetic", "undisturbed"}


def test_quick_and_full_runs_have_the_same_cases() -> None:
    assert list(reward.QUICK_LOADS["practicum"]) == list(reward.FULL_LOADS["practicum"]) == list(reward.CASES)
    assert list(reward.QUICK_LOADS["verl"]) == list(reward.FULL_LOADS["verl"])
    for loads in (reward.QUICK_LOADS, reward.FULL_LOADS):
        assert loads["verl"][RAISE] == loads["practicum"][HOSTILE]


@pytest.mark.parametrize(
    ("case", "started"),
    [
        ("rule", {"practicum": [RULE], "verl": [RULE]}),
        ("math", {"practicum (functions)": [MATH], "bare": [MATH], "verl": [MATH]}),
        ("async", {"practicum (functions)": [ASYNC], "verl (rate_limited)": [ASYNC]}),
        ("raise", {"hostile": [RAISE], "verl": [RAISE], "verl (rate_limited)": [RAISE]}),
        ("replica", {"replicas": [REPLICAS]}),
    ],
)
def test_only_those_who_have_something_to_do_are_started(case: str, started: dict[str, list[str]]) -> None:
    commands = reward.commands_of(Options(case=case), reward.QUICK_LOADS, "python-of-verl", Path("tokenizer"))
    assert {name: list(json.loads(command[-2])) for name, command in commands.items()} == started


def test_without_a_peer_verl_is_not_started() -> None:
    started = list(reward.commands_of(Options(), reward.QUICK_LOADS, None, Path("tokenizer")))
    assert started == ["practicum", "practicum (functions)", "bare", "hostile", "replicas"]


def test_the_tokenizer_gives_back_the_words(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reward.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for item in [*math_items(4), *rule_items(4)]:
        ids = tokenizer(item.text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == item.text
        assert len(ids) < len(item.text) / 1.5


# What is graded


def test_math_answers_deserve_what_math_verify_gives_them() -> None:
    items = math_items(16 * 8)  # eight answers to a problem of each kind
    grader = Math()
    grader.prepare()
    assert [grader.grade(reward_ours.make_sample(item)).value for item in items] == [item.value for item in items]
    assert [compute_score(MATH, item.text, item.truth, {}) for item in items] == [i.value for i in items]
    assert 0.3 < sum(item.value == 1.0 for item in items) / len(items) < 0.7


def test_samples_are_the_same_for_everyone_and_new_in_every_step() -> None:
    for make in (math_items, rule_items):
        assert make(20, 1) == make(20, 1) != make(20, 2)


def test_one_in_a_hundred_of_each_kind_misbehaves() -> None:
    items = hostile_items(400)
    assert len(items) == 400
    assert Counter(item.text for item in items if item.value is None) == dict.fromkeys(MISDEEDS, 4)
    assert items[0].value is not None
    assert {item.text for item in hostile_items(400, ["raise"]) if item.value is None} == {"raise"}


def test_an_answer_that_is_no_misdeed_is_graded() -> None:
    with pytest.raises(ValueError, match="cannot be graded"):
        compute_score(RAISE, "raise", "?", {})
    assert compute_score(RAISE, " 4 ", "4", {}) == 1.0
    assert compute_score(RULE, "5", "4", {}) == 0.0


# How it is counted


def test_a_batch_is_graded_as_often_as_asked_and_every_score_is_looked_at() -> None:
    items = rule_items(33)
    batch, calls = answers([item.value for item in items])
    numbers = timed(SYNC, items, batch, 4)
    assert len(calls) == 4
    # 33 calls of 50 ms, of which 32 go at a time, take at least twice as long as one.
    assert numbers["s / ideal s"] == pytest.approx(numbers["ms per call"] / 1e3 / 0.1)
    assert numbers["samples/s"] == pytest.approx(33e3 / numbers["ms per call"])
    with pytest.raises(RuntimeError, match="1 of 33 scores are wrong"):
        timed(RULE, items, answers([None, *(item.value for item in items[1:])])[0], 1)


def test_a_silent_zero_is_lost_and_a_stated_failure_is_not() -> None:
    items = [replace(item, value=1.0) for item in rule_items(2)] + [Item(0, "raise", "?", None)]
    assert num_lost(items, answers([1.0, 1.0, None])[0]) == 0
    assert num_lost(items, answers([1.0, 1.0, 0.0])[0]) == 1
    assert num_lost(items, answers(RuntimeError("the whole batch failed"))[0]) == 3


def test_hostile_answers_must_have_their_own_status() -> None:
    timeout, invalid = Score.failed("timeout", "late"), Score.failed("invalid", "raised")
    items = [Item(0, "hang", "?", None), Item(0, "crash", "?", None), Item(0, "4", "4", 1.0)]
    assert not reward_ours.mistaken(items, [timeout, invalid, Score(1.0)])
    wrong = reward_ours.mistaken(items, [invalid, timeout, Score(0.0)])
    assert wrong == {("hang", "invalid"): 1, ("crash", "timeout"): 1, ("fine", "ok"): 1}


def test_the_time_allowed_holds_even_if_one_worker_gets_all_that_hang() -> None:
    assert reward_ours.allowed_s(num_hanging=20, rest_s=0.5) == 20 * 2.0 / 4 + 2.0 + 0.5


def test_a_process_with_our_mark_is_seen_and_others_are_not() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    env = {**os.environ, reward_ours.MARK: "test-mark"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert reward_ours.num_marked("test-mark") == 1
        assert reward_ours.num_marked("another mark") == 0
        process.communicate(b"\n")
    assert reward_ours.num_marked("test-mark") == 0


def test_scores_are_compared_where_both_runs_have_one() -> None:
    failed = Score.failed("timeout", "late")
    one, other = [Score(1.0), Score(2.0), failed], [Score(1.0), Score(2.5), Score(9.0)]
    assert reward_ours.largest_difference(one, other) == 0.5
    assert reward_ours.largest_difference([failed], [failed]) == 0.0


def test_bare_loops_use_cpu_time() -> None:
    samples = [reward_ours.make_sample(item) for item in math_items(8)]
    Math().prepare()
    assert reward_ours.loop_cpu_s(samples) > 0
    assert reward_ours.loops_cpu_s(samples) > 0
