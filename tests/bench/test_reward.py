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
from bench.harness import Options, Row
from bench.reward_functions import ASYNC, MATH, MATH_IN_THREAD, MISDEEDS, RAISE, RULE, SYNC, compute_score
from bench.reward_work import Item, Job, Load, hostile_items, math_items, num_lost, rule_items, timed
from practicum.reward.graders.math import Math
from practicum.types import Score

SIZES = reward.Sizes(
    ours={RULE: Load(64, 10), MATH: Load(100), ASYNC: Load(256), SYNC: Load(320)},
    verl={RULE: Load(64, 10), MATH_IN_THREAD: Load(50), ASYNC: Load(256), SYNC: Load(32), RAISE: Load(100)},
    num_hostile=100,
    num_for_replicas=3,
)
PARTS = {
    "practicum": {
        "rule: seconds": 0.004,
        "math: seconds": 0.1,
        "math: cpu_s": 0.18,
        "async: seconds": 0.055,
        "sync: seconds": 0.6,
    },
    "bare": {"bare loop: cpu_s": 0.16, "bare loops on both cores: cpu_s": 0.17},
    "verl": {
        "rule: seconds": 0.02,
        "math in thread: seconds": 0.1,
        "math in thread: cpu_s": 0.1,
        "sync: seconds": 0.1,
        "raise: lost": 100,
    },
    "verl (rate_limited)": {"async: seconds": 0.11, "raise: lost": 1},
}
FOUND = {
    "hostile": {"took_s": 4.0, "allowed_s": 6.0, "wrong": 2, "wrong_raise": 1, "left": 0},
    "replicas": {"disturbed_s": 8.0, "undisturbed_s": 2.0, "missing": 0, "difference": 0.0},
}


class Answers:
    """A side that returns these scores, or raises."""

    def __init__(self, values: Sequence[float | None] | Exception) -> None:
        self._values = values
        self.num_calls = 0

    def grade(self) -> Sequence[float | None]:
        self.num_calls += 1
        if isinstance(self._values, Exception):
            raise self._values
        return self._values

    def values(self, graded: Sequence[float | None]) -> Sequence[float | None]:
        return graded


def found_rows(parts: reward.Parts, found: reward.Parts) -> list[tuple[str, str, str | None, float, float | None]]:
    rows: list[Row] = [*reward.contest_rows(parts, SIZES), *reward.fault_rows(parts, found)]
    ratios = [None if row.ratio is None else round(row.ratio, 4) for row in rows]
    return [(r.case, r.metric, r.peer_name, round(r.ours, 4), ratio) for r, ratio in zip(rows, ratios, strict=True)]


def test_every_case_has_its_rows() -> None:
    math, sync, hostile = "math-verify", "sync function of 50 ms", "hostile, 1 % of each of five kinds"
    lost = "samples with neither their score nor a stated failure"
    assert found_rows(PARTS, FOUND) == [
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
    alone = found_rows({name: PARTS[name] for name in ("practicum", "bare")}, FOUND)
    assert {row[0] for row in alone} == {row[0] for row in found_rows(PARTS, FOUND)}
    assert {row[2] for row in alone} == {None, *reward.LOOPS, "deadline arithmetic", "undisturbed"}


def test_quick_and_full_runs_have_the_same_cases() -> None:
    assert list(reward.QUICK_SIZES.ours) == list(reward.FULL_SIZES.ours) == list(reward.CASES)
    assert list(reward.QUICK_SIZES.verl) == list(reward.FULL_SIZES.verl)
    for sizes in (reward.QUICK_SIZES, reward.FULL_SIZES):
        assert sizes.verl[RAISE].num_samples == sizes.num_hostile


@pytest.mark.parametrize(
    ("case", "started"),
    [
        ("rule", {"practicum": [RULE], "verl": [RULE]}),
        ("math", {"practicum (functions)": [MATH], "bare": [MATH], "verl": [MATH_IN_THREAD]}),
        ("async", {"practicum (functions)": [ASYNC], "verl (rate_limited)": [ASYNC]}),
        ("raise", {"verl": [RAISE], "verl (rate_limited)": [RAISE]}),
        ("replica", {}),
    ],
)
def test_only_those_who_have_something_to_do_are_started(case: str, started: dict[str, list[str]]) -> None:
    commands = reward.contest_commands(Options(case=case), SIZES, "python-of-verl", "tokenizer")
    assert {name: list(Job.parse(command[-1]).loads) for name, command in commands.items()} == started


def test_without_a_peer_verl_is_not_started() -> None:
    started = list(reward.contest_commands(Options(), SIZES, None, "tokenizer"))
    assert started == ["practicum", "practicum (functions)", "bare"]


def test_a_job_survives_the_command_line() -> None:
    job = Job("folder", {RULE: Load(64, 3)}, "naive")
    assert Job.parse(job.dump()) == job


def test_the_tokenizer_gives_back_the_words(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reward.write_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for item in [*math_items(4), *rule_items(4)]:
        ids = tokenizer(item.text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == item.text
        assert len(ids) < len(item.text) / 1.5


# What is graded


def test_math_answers_deserve_what_math_verify_gives_them() -> None:
    items = math_items(16 * 8)  # eight answers to a problem of each kind
    grader = Math()
    grader.prepare()
    assert [grader.grade(reward_ours.make_sample(item, [1])).value for item in items] == [item.value for item in items]
    assert [compute_score(MATH_IN_THREAD, item.text, item.truth, {}) for item in items] == [i.value for i in items]
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
    items = rule_items(3)
    side = Answers([item.value for item in items])
    measured = timed(items, side, 4)
    assert side.num_calls == 4
    assert set(measured) == {"seconds", "cpu_s"}
    with pytest.raises(RuntimeError, match="1 of 3 scores are wrong"):
        timed(items, Answers([None, *(item.value for item in items[1:])]), 1)


def test_a_silent_zero_is_lost_and_a_stated_failure_is_not() -> None:
    items = [replace(item, value=1.0) for item in rule_items(2)] + [Item(0, "raise", "?", None)]
    assert num_lost(items, Answers([1.0, 1.0, None])) == 0
    assert num_lost(items, Answers([1.0, 1.0, 0.0])) == 1
    assert num_lost(items, Answers(RuntimeError("the whole batch failed"))) == 3


def test_hostile_answers_must_have_their_own_status() -> None:
    timeout, invalid = Score.failed("timeout", "late"), Score.failed("invalid", "raised")
    items = [Item(0, "hang", "?", None), Item(0, "crash", "?", None), Item(0, "4", "4", 1.0)]
    assert reward_ours.wrong_ones(items, [timeout, invalid, Score(1.0)]) == []
    wrong = reward_ours.wrong_ones(items, [invalid, timeout, Score(0.0)])
    assert [item for item, _ in wrong] == items
    assert set(reward_ours.kinds_of(wrong)) == {
        "hang taken for invalid",
        "crash taken for timeout",
        "fine taken for ok",
    }


def test_the_time_allowed_holds_even_if_one_worker_gets_all_that_hang() -> None:
    assert reward_ours.allowed_s(num_hanging=20, rest_s=0.5) == 20 * 2.0 / 4 + 2.0 + 0.5


def test_a_process_with_our_mark_is_seen_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_ours, "GONE_WITHIN_S", 0.2)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    env = {**os.environ, reward_ours.MARK: "test-mark"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert reward_ours.num_left("test-mark") == 1
        assert reward_ours.num_left("another mark") == 0
        process.communicate(b"\n")
    assert reward_ours.num_left("test-mark") == 0


def test_scores_are_compared_where_both_runs_have_one() -> None:
    failed = Score.failed("timeout", "late")
    one, other = [Score(1.0), Score(2.0), failed], [Score(1.0), Score(2.5), Score(9.0)]
    assert reward_ours.largest_difference(one, other) == 0.5
    assert reward_ours.largest_difference([failed], [failed]) == 0.0


def test_bare_loops_use_cpu_time() -> None:
    samples = [reward_ours.make_sample(item, [1]) for item in math_items(8)]
    Math().prepare()
    assert reward_ours.loop_cpu_s(samples) > 0
    assert reward_ours.loops_cpu_s(samples) > 0


def test_the_sizes_can_be_written_to_a_result_file() -> None:
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(reward.FULL_SIZES)))["ours"][MATH] == {"num_samples": 10_000, "num_calls": 1}
