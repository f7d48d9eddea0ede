"""One answer being written: when it ends, what it becomes, its random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.replay.hooks import RouterShape
from practicum.rollout.engine.sequence import Ending, Sequence, check_length, check_tokens, uniforms
from practicum.types import Prompt, PromptGroup, RoutedExperts, Sample, SamplingParams


def asked(params: SamplingParams, written: Sample | None = None, number: int = 0) -> Sequence:
    ids = np.array([5, 6, 7], np.int32)
    return Sequence(Prompt("q", text="?"), ids, params, seed=1, number=number, written=written)


def pushed(sequence: Sequence, tokens: list[int], tokenizer: Any, eos: int = 1) -> list[str | None]:
    sequence.begin([eos], tokenizer)
    return [sequence.push(token, -float(token)) for token in tokens]


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
    endless = Ending(SamplingParams(4, ignore_eos=True, stop_token_ids=(digits[1],)), [eos], tokenizer)
    assert endless.of(eos, 1) is None
    assert endless.of(digits[1], 1) == "stop"
    words = Ending(SamplingParams(40, stop=("2+",)), [eos], tokenizer)
    assert words.of(digits[1], 2, digits[:2]) is None
    assert words.of(digits[2], 3, digits[:3]) == "stop"


def test_a_sequence_ends_with_its_tokens_texts_or_length(tokenizer: Any) -> None:
    digits = tokenizer("12+3")["input_ids"]
    assert pushed(asked(SamplingParams(3)), [5, 1], tokenizer) == [None, "stop"]
    assert pushed(asked(SamplingParams(2, ignore_eos=True)), [1, 1], tokenizer) == [None, "length"]
    texts = asked(SamplingParams(9, stop=("2+",)))
    assert pushed(texts, digits[:3], tokenizer) == [None, None, "stop"]
    begun = asked(SamplingParams(9, stop=("2+",)))
    pushed(begun, digits[:2], tokenizer)
    again = asked(SamplingParams(9, stop=("2+",)), begun.to_sample(tokenizer, 0))
    assert pushed(again, digits[2:3], tokenizer) == ["stop"]


def test_what_was_written_before_comes_first(tokenizer: Any) -> None:
    params = SamplingParams(9)
    sequence = asked(params)
    pushed(sequence, [8, 9], tokenizer)
    first = sequence.to_sample(tokenizer, 3)
    assert first.finish_reason == "abort"
    sequence.continue_from(first)
    assert sequence.ids.tolist() == [5, 6, 7, 8, 9]
    assert (sequence.num_tokens, sequence.num_written, sequence.max_tokens) == (5, 2, 12)
    assert sequence.to_sample(tokenizer, 4) is first
    pushed(sequence, [10], tokenizer)
    assert sequence.ids.tolist() == [5, 6, 7, 8, 9, 10]
    whole = sequence.to_sample(tokenizer, 4, "stop")
    assert whole.token_ids.tolist() == [8, 9, 10]
    assert whole.versions.tolist() == [3, 3, 4]
    assert whole.log_probs.tolist() == [-8, -9, -10]
    assert whole.text == tokenizer.decode([8, 9, 10])
    assert sequence.to_sample(tokenizer, [7], "stop").versions.tolist() == [3, 3, 7]
    nothing = asked(params).to_sample(tokenizer, 0)
    assert (len(nothing.token_ids), nothing.finish_reason, nothing.text) == (0, "abort", "")


def test_routes_are_of_all_tokens_but_the_last_and_those_it_was_written_with_stay(tokenizer: Any) -> None:
    shape = RouterShape(np.array([0, 2], np.int32), 2, 8)
    sequence = asked(SamplingParams(9))
    assert sequence.routed_experts(shape) is None
    pushed(sequence, [8, 9], tokenizer)
    sequence.routes = [np.full((3, 2, 2), [1, 3], np.uint8), np.full((1, 2, 2), [0, 5], np.uint8)]
    routes = sequence.routed_experts(shape)
    assert routes is not None
    assert routes.known.tolist() == [True] * 4 + [False]
    assert routes.experts[:4, 0].tolist() == [[1, 3]] * 3 + [[0, 5]]
    sample = sequence.to_sample(tokenizer, 0, "abort", routes)
    sequence.continue_from(sample)
    pushed(sequence, [4], tokenizer)
    sequence.routes = [np.full((5, 2, 2), [6, 7], np.uint8)]
    whole = sequence.to_sample(tokenizer, 0, "stop", sequence.routed_experts(shape)).routes
    assert isinstance(whole, RoutedExperts)
    assert whole.experts[:5, 0].tolist() == [[1, 3]] * 3 + [[0, 5], [6, 7]]
    assert whole.known.tolist() == [True] * 5 + [False]


def test_it_continues_the_aborted_sample_of_its_trajectory(tokenizer: Any) -> None:
    params = SamplingParams(9, num_answers=2)
    group = PromptGroup("g", Prompt("q", text="?"), np.array([5, 6, 7], np.int32), params, 3, session="s")
    new = Sequence.of(group, group.trajectories[1])
    assert (new.seed, new.number, new.session, new.written) == (3, 1, "s", None)
    pushed(new, [4], tokenizer)
    group.trajectories[1].add(new.to_sample(tokenizer, 0))
    again = Sequence.of(group, group.trajectories[1])
    assert again.ids.tolist() == [5, 6, 7, 4]
    assert not again.shares_prompt(Sequence.of(group, group.trajectories[0]))


def test_random_numbers_depend_on_seed_and_number_alone_and_continue_where_it_was_aborted(tokenizer: Any) -> None:
    numbers = [uniforms(seed, number, 5).tolist() for seed, number in ((1, 0), (1, 1), (2, 0))]
    assert len({value for own in numbers for value in own}) == 15
    assert uniforms(1, 0, 3).tolist() == numbers[0][:3]
    large = [uniforms(seed, 0, 4).tolist() for seed in (2**63 + 1, 2**63 + 2, 2**64 - 1)]  # a float tells none apart
    assert len({value for own in large for value in own}) == 12
    sequence = asked(SamplingParams(5, ignore_eos=True), number=1)
    assert sequence.uniform() == sequence.uniform() == numbers[1][0]
    pushed(sequence, [4, 4], tokenizer)
    assert sequence.uniform() == numbers[1][2]
    sequence.continue_from(sequence.to_sample(tokenizer, 0))
    assert sequence.uniform() == numbers[1][2]
    assert asked(SamplingParams(5), sequence.written, number=1).uniform() == numbers[1][2]
