from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum import Message, Prompt, Sample, SamplingParams, Score
from tests.samples import make_sample as random_sample


def make_sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt": Prompt("p", text="1+1="),
        "prompt_ids": np.array([1, 2], np.int32),
        "token_ids": np.array([3, 4, 5], np.int32),
        "log_probs": np.zeros(3, np.float32),
        "loss_mask": np.ones(3, np.bool_),
        "versions": np.zeros(3, np.int32),
        "text": "2",
        "finish_reason": "stop",
    }
    return Sample(**{**fields, **changes})


def test_a_prompt_is_either_text_or_messages() -> None:
    assert Prompt("a", text="hello").messages is None
    with pytest.raises(ValueError, match="either messages or text"):
        Prompt("a")
    with pytest.raises(ValueError, match="either messages or text"):
        Prompt("a", text="x", messages=(Message("user", "x"),))
    with pytest.raises(ValueError, match="is empty"):
        Prompt("a", text="")


def test_a_sample_refuses_arrays_of_different_lengths() -> None:
    assert make_sample().num_tokens == 5
    for field in ("log_probs", "loss_mask", "versions"):
        with pytest.raises(ValueError, match="differ in length"):
            make_sample(**{field: np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="no prompt or no answer"):
        make_sample(prompt_ids=np.empty(0, np.int32))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_an_ok_score_has_a_finite_value(value: float | None) -> None:
    with pytest.raises(ValueError, match="finite"):
        Score(value)


def test_a_failed_score_has_no_value() -> None:
    assert Score(None, status="timeout").value is None
    with pytest.raises(ValueError, match="has no value"):
        Score(0.0, status="invalid")
    with pytest.raises(ValueError, match="not one of"):
        Score(0.0, status="fine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"num_answers": 0}]
)
def test_sampling_parameters_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingParams(**{"max_new_tokens": 8, **changes})


def same(one: Sample, other: Sample) -> bool:
    arrays = ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions")
    for name in arrays:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine.dtype != theirs.dtype or not np.array_equal(mine, theirs):
            return False
    return (one.prompt, one.text, one.finish_reason) == (other.prompt, other.text, other.finish_reason)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.text(max_size=5)), min_size=1, max_size=8))
def test_samples_of_a_group_come_out_as_they_went_in_and_share_their_prompt(shapes: list[tuple[int, int, str]]) -> None:
    prompt = Prompt("p", text="?", answer="4")
    samples = [random_sample(p, a, text=text, seed=i) for i, (p, a, text) in enumerate(shapes)]
    for sample in samples:
        sample.prompt = prompt
    unpacked = pickle.loads(pickle.dumps(samples))
    assert len(unpacked) == len(samples) and all(map(same, unpacked, samples))
    assert len({id(sample.prompt) for sample in unpacked}) == 1


def test_whatever_travels_arrives_the_same() -> None:
    chat = Prompt("c", messages=(Message("user", "hi"),), answer=[1], data_source="s", metadata={"level": 2})
    assert pickle.loads(pickle.dumps(chat)) == chat
    assert same(pickle.loads(pickle.dumps(make_sample(prompt=chat))), make_sample(prompt=chat))
    for score in (Score(0.5, parts={"a": 1.0}), Score.failed("timeout", "late")):
        assert pickle.loads(pickle.dumps(score)) == score


def test_what_a_grader_read_crosses_processes_but_is_no_part_of_the_grade() -> None:
    score = Score(1.0, answer="4")
    assert pickle.loads(pickle.dumps(score)).answer == "4"
    assert score == Score(1.0)
