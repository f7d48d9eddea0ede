from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.remote.capabilities import Capabilities, TokenReader, probe, probe_filters, seed_of
from practicum.rollout.remote.client import CompletionsClient
from practicum.types import Prompt, SamplingParams
from tests.rollout.fake_completions import FakeServer, make_table
from tests.samples import make_sample


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def probed(server: FakeServer, tokenizer: Any, model: str | None = None) -> Capabilities:
    async def work() -> Capabilities:
        client = CompletionsClient(timeout_s=20)
        try:
            found = await probe(client, server.url, model, tokenizer)
            if found.is_filtered is None:
                found = replace(found, is_filtered=await probe_filters(client, server.url, found, tokenizer))
            return found
        finally:
            await client.close()

    with server:
        return asyncio.run(work())


@pytest.mark.parametrize("dialect", ["vllm", "plain", "texts"])
@pytest.mark.parametrize(
    ("kind", "expected"), [("raw", (False, False)), ("tempered", (True, False)), ("processed", (True, True))]
)
def test_what_log_probs_mean_is_found_out(tokenizer: Any, dialect: str, kind: str, expected: tuple[bool, bool]) -> None:
    found = probed(FakeServer(dialect, log_probs=kind, tokenizer=tokenizer), tokenizer)
    assert (found.is_tempered, found.is_filtered) == expected
    assert (found.model, found.max_tokens, found.has_extensions) == ("table", 64, dialect == "vllm")


def test_a_model_that_is_certain_of_everything_leaves_it_open(tokenizer: Any) -> None:
    found = probed(FakeServer(table=make_table(scale=5000.0)), tokenizer)
    assert (found.is_tempered, found.is_filtered) == (False, True)


def test_ours_is_taken_at_its_word(tokenizer: Any) -> None:
    found = probed(FakeServer("practicum"), tokenizer)
    assert found.has_extensions and found.is_tempered and not found.is_filtered and found.can_number_answers


def test_servers_that_cannot_be_used_are_refused(tokenizer: Any) -> None:
    with pytest.raises(RolloutError, match="neither token ids nor the tokens"):
        probed(FakeServer("texts", names_tokens=False), tokenizer)
    with pytest.raises(RolloutError, match="no token of the model has the text '\\?'"):
        probed(FakeServer("texts"), tokenizer)
    with pytest.raises(RolloutError, match="neither token ids nor the tokens"):
        probed(FakeServer("texts", tells_log_probs=False, tokenizer=tokenizer), tokenizer)
    with pytest.raises(RolloutError, match="'other'; it lists: table"):
        probed(FakeServer(), tokenizer, "other")


RAW = Capabilities("m", "vllm", None, True, False, False)
PROCESSED = Capabilities("m", "vllm", None, True, True, True)
BARE = Capabilities("m", "", None, False, False, True)


@pytest.mark.parametrize(
    ("known", "params", "refusal"),
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
    known: Capabilities, params: SamplingParams, refusal: str | None
) -> None:
    if refusal is None:
        known.check(params, "http://x")
    else:
        with pytest.raises(RolloutError, match=refusal):
            known.check(params, "http://x")


def test_each_answer_has_a_seed_of_its_own() -> None:
    def seed(seed: int, number: int, num_written: int = 0) -> int:
        ids, params = np.array([1, 2], np.int32), SamplingParams(4)
        written = make_sample(2, num_written) if num_written else None
        return seed_of(Sequence(Prompt("p", text="x"), ids, params, seed, number, written=written))

    assert seed(5, 3) == seed(5, 0) + 3
    assert len({seed(one, 0) for one in range(1000)}) == 1000
    assert len({seed(5, number, before) for number in range(5) for before in range(1, 5)}) == 20
    assert all(0 <= seed(2**64 - 1, 0, before) < 2**31 for before in range(50))


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
