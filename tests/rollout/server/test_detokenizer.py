from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from practicum.rollout.server.detokenizer import IncrementalDetokenizer
from practicum.rollout.server.encoder import Encoder


def byte_encoder() -> Encoder:
    """Every byte is a token, so that most characters are several; id 256 ends a text."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))


ENCODER = byte_encoder()


@given(
    st.text(st.sampled_from("ab né€😀"), min_size=1, max_size=30), st.lists(st.text("ab né", min_size=1, max_size=4))
)
def test_pieces_are_the_text_and_nothing_of_a_stop(text: str, stops: list[str]) -> None:
    ids = [*ENCODER.text(text).tolist(), 256]
    detokenizer = IncrementalDetokenizer(ENCODER, stops)
    pieces = [detokenizer.add([token]) for token in ids]
    told = "".join(pieces) + detokenizer.finish(ids)
    complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert told == (text[: min(complete)[1]] if complete else text)
    assert told == IncrementalDetokenizer(ENCODER, stops).finish(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    detokenizer = IncrementalDetokenizer(ENCODER, ["bcd"])
    pieces = [detokenizer.add([token]) for token in ENCODER.text("abcabcde").tolist()]
    assert pieces == ["a", "", "", "bca", "", "", "", ""]


def test_the_stop_text_that_is_complete_first_counts() -> None:
    assert IncrementalDetokenizer(ENCODER, ["b", "abc"]).finish(ENCODER.text("abc").tolist()) == "a"
    assert IncrementalDetokenizer(ENCODER, ["bc", "abc"]).finish(ENCODER.text("abc").tolist()) == ""


@pytest.mark.parametrize(("keeps_stop", "told"), [(False, "a"), (True, "abc")])
def test_a_stop_text_may_be_kept(keeps_stop: bool, told: str) -> None:
    detokenizer = IncrementalDetokenizer(ENCODER, ["bc"], keeps_stop=keeps_stop)
    assert detokenizer.finish(ENCODER.text("abc").tolist()) == told


def test_special_tokens_are_shown_if_asked_for() -> None:
    assert IncrementalDetokenizer(ENCODER, []).finish([256]) == ""
    assert IncrementalDetokenizer(ENCODER, [], skip_special_tokens=False).finish([256]) == "<end>"
