from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from practicum.rollout.answers import Ending, check_length, check_tokens, eos_ids, sample_of, untouched, written_ids

from practicum.errors import RolloutError
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams


def asked(params: SamplingParams, written: Sample | None = None) -> RolloutRequest:
    return RolloutRequest(Prompt("q", text="?"), np.array([5, 6, 7], np.int32), params, seed=1, written=written)


def test_what_the_model_has_no_room_for_is_named() -> None:
    check_length(asked(SamplingParams(7)), 10, "m")
    check_length(asked(SamplingParams(7000)), None, "m")
    with pytest.raises(RolloutError, match=r"prompt q has 3 tokens.*max_new_tokens=8.*would have 11.*'m'.*room for 10"):
        check_length(asked(SamplingParams(8)), 10, "m")


def test_a_token_the_model_does_not_know_is_named() -> None:
    check_tokens(asked(SamplingParams(7)), 8, "m")
    with pytest.raises(RolloutError, match=r"prompt q has token 7, but model 'm' knows 7 tokens"):
        check_tokens(asked(SamplingParams(7)), 7, "m")


def test_endings(tokenizer: Any) -> None:
    eos = int(tokenizer.eos_token_id)
    digits = tokenizer("12+3")["input_ids"]
    plain = Ending(SamplingParams(4), [eos], tokenizer)
    assert plain.of(eos, 1) == "stop"
    assert plain.of(digits[0], 3) is None
    assert plain.of(digits[0], 4) == "length"
    assert not plain.reads_text
    endless = Ending(SamplingParams(4, ignore_eos=True, stop_token_ids=(digits[1],)), [eos], tokenizer)
    assert endless.of(eos, 1) is None
    assert endless.of(digits[1], 1) == "stop"
    words = Ending(SamplingParams(40, stop=("2+",)), [eos], tokenizer)
    assert words.reads_text
    assert words.of(digits[1], 2, digits[:2]) is None
    assert words.of(digits[2], 3, digits[:3]) == "stop"


def test_what_was_written_before_comes_first(tokenizer: Any) -> None:
    params = SamplingParams(9)
    first = sample_of(asked(params), np.array([8, 9], np.int32), np.array([-1, -2], np.float32), 3, "abort", tokenizer)
    again = asked(params).going_on(0, first)
    assert written_ids(again).tolist() == [5, 6, 7, 8, 9]
    whole = sample_of(again, np.array([10], np.int32), np.array([-3], np.float32), 4, "stop", tokenizer)
    assert whole.token_ids.tolist() == [8, 9, 10]
    assert whole.versions.tolist() == [3, 3, 4]
    assert whole.log_probs.tolist() == [-1, -2, -3]
    assert whole.text == tokenizer.decode([8, 9, 10])
    assert untouched(again) is first
    nothing = untouched(asked(params))
    assert (len(nothing.token_ids), nothing.finish_reason, nothing.text) == (0, "abort", "")


def test_all_ends_of_text_count(model: Any, tokenizer: Any) -> None:
    own = int(tokenizer.eos_token_id)
    before = model.generation_config.eos_token_id
    try:
        for declared, expected in ((None, {own}), (own, {own}), ([own, 9], {own, 9})):
            model.generation_config.eos_token_id = declared
            assert set(eos_ids(model, tokenizer)) == expected
    finally:
        model.generation_config.eos_token_id = before
