from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from practicum import Message, Prompt, Sample, SamplingParams, Score


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
