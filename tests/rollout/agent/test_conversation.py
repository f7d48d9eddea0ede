"""One conversation over turns that the test hands it; see test_driver.py for whole ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from practicum.rollout.answers import sample_of

from practicum.rollout.agent.async_engine import Writing
from practicum.rollout.agent.conversation import Conversation, TurnLimits
from practicum.rollout.agent.turns import TurnTemplate
from practicum.types import Message, Prompt, RolloutRequest, Sample, SamplingParams
from tests.rollout.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


class Echo:
    """Says the model's words back until it says enough."""

    outcome: Any = None

    async def begin(self, prompt: Prompt) -> str | None:
        return None

    async def reply(self, text: str, marked: str, *, is_last: bool) -> Sequence[dict[str, str]] | None:
        assert marked == f"{text}<|im_end|>"
        return None if text == "enough" else [{"role": "user", "content": text}]


def converse(words: list[str], limits: TurnLimits, most: int = 500, first_answer: int = 0) -> tuple[Sample, list[Any]]:
    asked: list[RolloutRequest] = []

    def begin(request: RolloutRequest) -> Writing:
        ids = [*TOKENIZER(words[len(asked)])["input_ids"], END][: request.params.max_new_tokens]
        asked.append(request)
        future = asyncio.get_running_loop().create_future()
        array = np.array(ids, np.int32)
        reason: Any = "stop" if ids[-1] == END else "length"
        future.set_result(sample_of(request, array, array.astype(np.float32), 0, reason, TOKENIZER))
        return Writing([future], lambda: None)

    async def run() -> Sample:
        prompt = Prompt("p", messages=(Message("user", "hi"),))
        request = RolloutRequest(prompt, np.array([9], np.int32), SamplingParams(most), 5, first_answer)
        conversation = Conversation(
            request,
            talk=Echo(),
            template=TurnTemplate(TOKENIZER),
            tokenizer=TOKENIZER,
            eos_ids=[END],
            limits=limits,
            begin=begin,
        )
        return await conversation.run()

    return asyncio.run(run()), asked


def test_it_goes_on_until_there_is_no_reply() -> None:
    sample, asked = converse(["a", "b", "enough"], TurnLimits(5))
    assert (len(asked), sample.text, sample.finish_reason) == (3, "enough", "stop")
    assert asked[2].prompt_ids.tolist() == [9, *sample.token_ids[: -len(TOKENIZER("enough")["input_ids"]) - 1]]


@pytest.mark.parametrize(
    ("limits", "most", "num_turns"),
    [(TurnLimits(2), 500, 2), (TurnLimits(5), 10, 1), (TurnLimits(5, max_turn_tokens=1), 500, 1)],
)
def test_limits_end_it(limits: TurnLimits, most: int, num_turns: int) -> None:
    sample, asked = converse(["a", "b", "enough"], limits, most)
    assert (len(asked), sample.finish_reason) == (num_turns, "length")
    assert len(sample.token_ids) <= most and sample.loss_mask[-1]
    assert all(request.params.max_new_tokens <= most for request in asked)


def test_each_turn_draws_by_request_answer_and_turn_alone() -> None:
    def seeds(first_answer: int) -> list[tuple[int, int]]:
        _, asked = converse(["a", "b", "enough"], TurnLimits(5), first_answer=first_answer)
        return [(request.seed, request.first_answer) for request in asked]

    assert seeds(0) == seeds(0)
    assert seeds(0)[0] == (5, 0) and seeds(3)[0] == (5, 3)  # the first turn as an answer without turns
    assert len({*seeds(0), *seeds(1)}) == 6
