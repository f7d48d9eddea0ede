from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.loop.validation import (
    GradedAnswer,
    check_keep_best,
    graded_answer,
    ks_up_to,
    majority_at_k,
    pass_at_k,
    validation_metrics,
    validation_names,
)
from practicum.types import Score, Trajectory
from tests.samples import graded_group


def trajectory(text: str, score: Score) -> Trajectory:
    return graded_group((text, score)).trajectories[0]


def voted(vote: str, is_right: bool) -> GradedAnswer:
    return GradedAnswer(float(is_right), is_right, vote)


def mean_over_draws(answers: Sequence[GradedAnswer], k: int, figure: str) -> float:
    """By trying every draw, as the definition has it."""
    found = []
    for drawn in itertools.combinations(answers, k):
        if figure == "pass":
            found.append(float(any(answer.is_right for answer in drawn)))
            continue
        counts = Counter(answer.vote for answer in drawn)
        winners = [answer for answer in drawn if counts[answer.vote] == max(counts.values())]
        found.append(sum(answer.is_right for answer in winners) / len(winners))
    return sum(found) / len(found)


some_answers = st.lists(st.builds(voted, st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=9)


@given(some_answers, st.data())
def test_pass_at_k_is_the_mean_over_all_draws(answers: list[GradedAnswer], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    num_right = sum(answer.is_right for answer in answers)
    assert pass_at_k(len(answers), num_right, k) == pytest.approx(mean_over_draws(answers, k, "pass"), abs=1e-12)


@given(some_answers, st.data())
def test_the_majority_is_the_mean_over_all_draws(answers: list[GradedAnswer], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    assert majority_at_k(answers, k) == pytest.approx(mean_over_draws(answers, k, "majority"), abs=1e-9)


def test_the_majority_can_be_wrong_where_one_answer_is_right() -> None:
    answers = [voted("7", False)] * 5 + [voted("8", True)] * 3
    assert majority_at_k(answers, 8) == 0.0
    assert pass_at_k(8, 3, 8) == 1.0
    tied = [voted("7", False)] * 2 + [voted("8", True)] * 2
    assert majority_at_k(tied, 4) == 0.5


def test_hundreds_of_answers_take_no_time() -> None:
    counts = [100, 60, 31, 20, 17, 9, 5, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    answers = [voted(str(i), i == 0) for i, count in enumerate(counts) for _ in range(count)]
    assert len(answers) == 256
    start = time.process_time()
    found = [majority_at_k(answers, k) for k in (1, 2, 4, 16, 64, 256)]
    assert time.process_time() - start < 5
    assert found[0] == pytest.approx(100 / 256) and found[-1] == 1.0
    assert found[1:] == sorted(found[1:])
    everybody = [voted(str(i), i < 500) for i in range(2000)]  # all different: any may win
    assert majority_at_k(everybody, 64) == pytest.approx(0.25)
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("num", "ks"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_k_doubles_up_to_the_number_of_answers(num: int, ks: list[int]) -> None:
    assert ks_up_to(num) == ks


def test_answers_vote_with_what_their_grader_read_or_else_with_their_text() -> None:
    read = graded_answer(trajectory("I think it is 1/2", Score(1.0, answer="1/2")), 0.5)
    unread = graded_answer(trajectory("<think>7? no</think>\n\n The  answer\nis 8 ", Score(1.0)), 0.5)
    assert read is not None and read.vote == "1/2"
    assert unread is not None and unread.vote == "The answer is 8"


def test_right_is_above_the_threshold() -> None:
    def is_right(value: float, above: float) -> bool:
        found = graded_answer(trajectory("x", Score(value)), above)
        assert found is not None
        return found.is_right

    assert not is_right(0.5, 0.5) and is_right(0.51, 0.5)
    assert is_right(-0.5, -1.0) and not is_right(0.9, 0.9)
    assert graded_answer(trajectory("x", Score.failed("timeout", "late")), 0.5) is None


def test_one_dataset() -> None:
    texts = ["4", "4", "5", "4", "1", "2", "3", "9"]  # two prompts, four answers each
    values = [1.0, 1.0, 0.0, 1.0, 0.0, 0.6, 0.0, 0.0]
    answers = [(text, Score(value)) for text, value in zip(texts, values, strict=True)]
    metrics = validation_metrics([graded_group(*answers[:4]), graded_group(*answers[4:])], right_above=0.5)
    expected = {
        "validation/accuracy": sum(values) / 8,
        "validation/mean@4": sum(values) / 8,
        "validation/failed_share": 0.0,
        "validation/pass@1": (3 / 4 + 1 / 4) / 2,
        "validation/pass@2": (1 + 1 / 2) / 2,
        "validation/pass@4": 1.0,
        "validation/maj@2": (3 / 4 + 1 / 4) / 2,
        "validation/maj@4": (1 + 1 / 4) / 2,
    }
    assert metrics == pytest.approx(expected)
    assert sorted(validation_names([""], 4)) == sorted(name for name in expected if "failed" not in name)


def test_datasets_have_figures_of_their_own_beside_those_of_all() -> None:
    given = (("a", "gsm8k", 1.0), ("b", "math", 0.0), ("c", "", 0.0), ("d", "math", 1.0))
    groups = [graded_group((text, Score(value)), source=source) for text, source, value in given]
    metrics = validation_metrics(groups, right_above=0.5)
    assert metrics["validation/pass@1"] == metrics["validation/accuracy"] == 0.5
    assert metrics["validation/gsm8k/pass@1"] == 1.0
    assert metrics["validation/math/accuracy"] == 0.5
    assert metrics["validation/other/mean@1"] == 0.0
    names = validation_names([group.prompt.data_source for group in groups], 1)
    assert set(names) == {name for name in metrics if "failed" not in name}


def test_what_could_not_be_graded_is_counted_and_is_no_zero() -> None:
    failed = Score.failed("timeout", "late")
    scores = [Score(1.0), failed, Score(1.0), failed, Score(0.0), Score(1.0), failed, failed]
    answers = list(zip("44441255", scores, strict=True))
    metrics = validation_metrics([graded_group(*answers[:4]), graded_group(*answers[4:])], right_above=0.5)
    assert metrics["validation/failed_share"] == 0.5
    assert metrics["validation/accuracy"] == 0.75
    assert metrics["validation/pass@1"] == 0.75  # of two graded answers to each: both right, one right
    assert metrics["validation/pass@2"] == 1.0
    assert "validation/pass@4" not in metrics and metrics["validation/too_few@4"] == 1.0
    assert "validation/too_few@2" not in metrics


def test_a_prompt_without_any_grade_is_left_out() -> None:
    failed = Score.failed("invalid", "?")
    metrics = validation_metrics([graded_group(("4", Score(1.0))), graded_group(("4", failed))], right_above=0.5)
    assert metrics["validation/pass@1"] == 1.0 and metrics["validation/too_few@1"] == 0.5
    nothing = validation_metrics([graded_group(("4", failed)), graded_group(("4", failed))], right_above=0.5)
    assert nothing == {"validation/failed_share": 1.0, "validation/too_few@1": 1.0}


def test_the_best_is_by_a_figure_that_will_be_there(make_config: Callable[..., Config]) -> None:
    check_keep_best(make_config(), [])
    config = make_config("trainer.keep_best=validation/pass@4", "validation.answers_per_prompt=4")
    check_keep_best(config, ["a", "a"])
    with pytest.raises(ConfigError, match=r"pass@8 is no figure of .*: there are validation/accuracy, .*pass@4"):
        check_keep_best(
            make_config("trainer.keep_best=validation/pass@8", "validation.answers_per_prompt=4"), ["a", "a"]
        )
    with pytest.raises(ConfigError, match="from a recording validates nothing"):
        check_keep_best(config, [])
    with pytest.raises(ConfigError, match=r"trainer\.keep_best=validation/accuracy needs data\.validation"):
        make_config("trainer.keep_best=validation/accuracy", "data.validation=null")
    with pytest.raises(ConfigError, match=r"trainer\.keep_best = 'reward/mean'"):
        make_config("trainer.keep_best=reward/mean")
