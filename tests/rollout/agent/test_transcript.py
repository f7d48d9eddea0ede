from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.rollout.agent.transcript import Transcript
from practicum.types import Prompt, RoutedExperts, Sample

PROMPT = Prompt("p", text="?", metadata={"level": 1})


def turn(transcript: Transcript, *ids: int, routes: RoutedExperts | None = None) -> Sample:
    num = len(ids)
    return Sample(
        PROMPT,
        transcript.all_ids,
        np.array(ids, np.int32),
        -np.arange(num, dtype=np.float32),
        np.ones(num, np.bool_),
        np.full(num, 4, np.int32),
        "t",
        "stop",
        routes,
    )


def started() -> Transcript:
    return Transcript(PROMPT, np.array([1, 2], np.int32))


def test_a_conversation_is_one_sample_with_the_words_of_others_masked_out() -> None:
    transcript = started()
    transcript.add_turn(turn(transcript, 5, 6))
    transcript.add_said(np.array([7], np.int32))
    transcript.add_turn(turn(transcript, 8))
    sample = transcript.sample("last", "stop", {"environment": 3})
    assert sample.prompt_ids.tolist() == [1, 2] and sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.loss_mask.tolist() == [True, True, False, True]
    assert sample.versions.tolist() == [4, 4, -1, 4]
    assert np.array_equal(sample.log_probs, np.array([0, -1, np.nan, 0], np.float32), equal_nan=True)
    assert sample.prompt.metadata == {"level": 1, "environment": 3} and PROMPT.metadata == {"level": 1}
    assert (sample.text, sample.finish_reason, transcript.num_turns) == ("last", "stop", 2)
    assert transcript.all_ids.tolist() == [1, 2, 5, 6, 7, 8]


def test_a_turn_must_follow_what_is_there() -> None:
    transcript = started()
    first = turn(transcript, 5)
    transcript.add_turn(first)
    with pytest.raises(AssertionError, match="follows something else"):
        transcript.add_turn(first)


def test_nothing_written_is_an_empty_sample() -> None:
    sample = started().sample("", "abort")
    assert len(sample.token_ids) == 0 and sample.token_ids.dtype == np.int32


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=5), st.integers(0, 3))
def test_a_broken_off_conversation_is_taken_apart_where_it_was_put_together(
    spans: list[tuple[int, int]], num_last: int
) -> None:
    transcript = started()
    for num_written, num_said in spans:
        transcript.add_turn(turn(transcript, *range(num_written)))
        transcript.add_said(np.arange(num_said, dtype=np.int32))
    if num_last:
        last = turn(transcript, *range(num_last))
        transcript.add_turn(last)
    broken_off = transcript.sample("", "abort")
    again, begun = Transcript.of(broken_off)
    assert again.num_turns == len(spans)
    if num_last:
        assert begun is not None and begun.token_ids.tolist() == list(range(num_last))
        assert begun.prompt_ids.tolist() == last.prompt_ids.tolist()
        again.add_turn(begun)
    else:
        assert begun is None
    whole = again.sample("", "abort")
    for name in ("token_ids", "log_probs", "loss_mask", "versions"):
        assert np.array_equal(getattr(whole, name), getattr(broken_off, name), equal_nan=name == "log_probs")


def routes(num: int, expert: int, *known: bool) -> RoutedExperts:
    return RoutedExperts(np.full((num, 2, 1), expert, np.uint8), np.array([0, 1], np.int32), np.array(known), 8)


def test_a_token_keeps_the_experts_it_had_when_it_was_first_seen() -> None:
    transcript = started()
    transcript.add_turn(turn(transcript, 5, routes=routes(3, 1, True, True, False)))
    transcript.add_said(np.array([6], np.int32))
    transcript.add_turn(turn(transcript, 7, routes=routes(5, 2, False, False, True, True, False)))
    found = transcript.sample("", "stop").routes
    assert found is not None
    assert found.known.tolist() == [True, True, True, True, False]
    assert found.experts[:4, :, 0].tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]


def test_what_was_said_last_has_no_experts_yet() -> None:
    transcript = started()
    transcript.add_turn(turn(transcript, 5, routes=routes(3, 1, True, True, False)))
    transcript.add_said(np.array([6, 7], np.int32))
    found = transcript.sample("", "abort").routes
    assert found is not None and found.known.tolist() == [True, True, False, False, False]
