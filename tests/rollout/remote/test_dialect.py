from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.remote.completions import CompletionsClient
from practicum.rollout.remote.dialect import Dialect, TokenReader, find_filtered, seed_of, shake_hands
from practicum.types import Prompt, RolloutRequest, SamplingParams
from tests.rollout.fake_completions import FakeServer, make_table


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def met(server: FakeServer, tokenizer: Any, model: str | None = None) -> Dialect:
    async def shake() -> Dialect:
        client = CompletionsClient(timeout_s=20)
        try:
            dialect = await shake_hands(client, server.url, model, tokenizer)
            if dialect.is_filtered is None:
                dialect = replace(dialect, is_filtered=await find_filtered(client, server.url, dialect, tokenizer))
            return dialect
        finally:
            await client.close()

    with server:
        return asyncio.run(shake())


@pytest.mark.parametrize("dialect", ["vllm", "plain", "texts"])
@pytest.mark.parametrize(
    ("kind", "expected"), [("raw", (False, False)), ("tempered", (True, False)), ("processed", (True, True))]
)
def test_what_log_probs_mean_is_found_out(tokenizer: Any, dialect: str, kind: str, expected: tuple[bool, bool]) -> None:
    found = met(FakeServer(dialect, log_probs=kind, tokenizer=tokenizer), tokenizer)
    assert (found.is_tempered, found.is_filtered) == expected
    assert (found.model, found.most_tokens, found.is_rich) == ("table", 64, dialect == "vllm")


def test_a_model_that_is_certain_of_everything_leaves_it_open(tokenizer: Any) -> None:
    found = met(FakeServer(table=make_table(scale=5000.0)), tokenizer)
    assert (found.is_tempered, found.is_filtered) == (False, True)


def test_ours_is_taken_at_its_word(tokenizer: Any) -> None:
    found = met(FakeServer("practicum"), tokenizer)
    assert found.is_rich and found.is_tempered and not found.is_filtered and found.can_number_answers


def test_servers_that_cannot_be_used_are_refused(tokenizer: Any) -> None:
    with pytest.raises(RolloutError, match="neither token ids nor the tokens"):
        met(FakeServer("texts", names_tokens=False), tokenizer)
    with pytest.raises(RolloutError, match="no token of the model has the text '\\?'"):
        met(FakeServer("texts"), tokenizer)
    with pytest.raises(RolloutError, match="neither token ids nor the tokens"):
        met(FakeServer("texts", tells_log_probs=False, tokenizer=tokenizer), tokenizer)
    with pytest.raises(RolloutError, match="'other'; it lists: table"):
        met(FakeServer(), tokenizer, "other")


RAW = Dialect("m", "vllm", None, True, False, False)
PROCESSED = Dialect("m", "vllm", None, True, True, True)
BARE = Dialect("m", "", None, False, False, True)


@pytest.mark.parametrize(
    ("dialect", "params", "refusal"),
    [
        (RAW, SamplingParams(1), None),
        (RAW, SamplingParams(1, 0.0), None),
        (RAW, SamplingParams(1, top_k=3, top_p=0.5), None),
        (RAW, SamplingParams(1, 0.7), "before temperature"),
        (PROCESSED, SamplingParams(1, 0.7), None),
        (PROCESSED, SamplingParams(1, top_p=0.5), "after top-k and top-p"),
        (PROCESSED, SamplingParams(1, 0.0, top_k=3), None),
        (BARE, SamplingParams(1, top_k=3), "no top_k"),
        (BARE, SamplingParams(1, ignore_eos=True), "no ignore_eos"),
    ],
)
def test_what_log_probs_would_be_wrong_for_is_refused(
    dialect: Dialect, params: SamplingParams, refusal: str | None
) -> None:
    if refusal is None:
        dialect.check(params, "http://x")
    else:
        with pytest.raises(RolloutError, match=refusal):
            dialect.check(params, "http://x")


def test_each_answer_has_a_seed_of_its_own() -> None:
    def request(seed: int, first: int) -> RolloutRequest:
        ids = np.array([1, 2], np.int32)
        return RolloutRequest(Prompt("p", text="x"), ids, SamplingParams(4), seed, first)

    assert seed_of(request(5, 3), 0) == seed_of(request(5, 0), 0) + 3
    assert len({seed_of(request(seed, 0), 0) for seed in range(1000)}) == 1000
    assert len({seed_of(request(5, first), before) for first in range(5) for before in range(1, 5)}) == 20
    assert all(0 <= seed_of(request(2**64 - 1, 0), before) < 2**31 for before in range(50))


def test_tokens_are_known_by_id_or_by_a_text_that_only_one_has(tokenizer: Any) -> None:
    reader = TokenReader(tokenizer, "http://x")
    assert reader.ids({"token_ids": [4, 5]}) == [4, 5]
    assert reader.ids({"logprobs": {"tokens": ["token_id:9", "token_id:3"]}}) == [9, 3]
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    assert reader.ids({"logprobs": {"tokens": texts}}) == list(range(len(tokenizer)))

    class Twins:
        def __len__(self) -> int:
            return 2

        def decode(self, ids: list[int]) -> str:
            return "same"

        def convert_ids_to_tokens(self, token: int) -> str:
            return f"piece{token}"

    twins = TokenReader(Twins(), "http://x")
    assert twins.ids({"logprobs": {"tokens": ["piece1"]}}) == [1]
    with pytest.raises(RolloutError, match="several tokens have the text 'same'"):
        twins.ids({"logprobs": {"tokens": ["same"]}})


def test_missing_log_probs_are_not_made_up(tokenizer: Any) -> None:
    reader = TokenReader(tokenizer, "http://x")
    for told in ([-1.0], [-1.0, None], [-1.0, float("-inf")]):
        with pytest.raises(RolloutError, match="not the log-prob of each"):
            reader.log_probs({"logprobs": {"token_logprobs": told}}, 2)
