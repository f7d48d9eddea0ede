"""The recipe's parts fit together: its config is valid, its examples look like its conversations, its tool is right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from practicum.config import Config
from practicum.models import encode_prompts
from practicum.rollout.agent.conversation import Conversations
from practicum.rollout.tokenizer import check_tokenizer
from practicum.types import Message, Prompt, PromptGroup, Sample
from recipes.tools.prepare import (
    CHARACTERS,
    all_problems,
    batch_of,
    make_calculator_model,
    make_tokenizer,
    warm_up,
)
from recipes.tools.tools import calculate
from tests.rollout.scripted import ScriptedEngine

RECIPE = Path(__file__).parents[2] / "recipes" / "tools"


def test_the_tool_multiplies_and_says_what_it_wants() -> None:
    assert calculate("47*68") == 3196 and calculate(" 47 * 68") == 3196
    for wrong in ("47+68", "12*", "", "47*68*2", "9" * 9 + "*2"):
        with pytest.raises(ValueError, match="write two numbers with"):
            calculate(wrong)


def test_an_example_is_token_for_token_what_a_conversation_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the model would be warmed up for something else than it practises."""
    monkeypatch.chdir(RECIPE.parents[1])
    config = Config.load(RECIPE / "train.yaml").rollout
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda text: "3196" if "<tool>" in text else "[47*68]")

    async def converse() -> Sample:
        conversations = Conversations(engine, tokenizer, config.agent)
        await conversations.start()
        try:
            prompt = Prompt("p", messages=(Message("user", "47*68="),), answer="3196")
            (ids,) = encode_prompts(tokenizer, [prompt], conversations.user_code.schemas)
            group = PromptGroup("p", prompt, ids, Config.load(RECIPE / "train.yaml").validation_sampling, 0)
            ((finished,),) = [groups async for groups in conversations.generate([group])]
            return finished.trajectories[0].last
        finally:
            await conversations.close()

    sample = asyncio.run(asyncio.wait_for(converse(), 60))
    example, learnt = batch_of(tokenizer, [(47, 68)], [True])
    assert example[0].tolist() == [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
    assert learnt[0].tolist() == [False] * len(sample.prompt_ids) + sample.loss_mask.tolist()
    assert sample.text == sample.prompt.answer  # what the grader compares


def test_the_tokenizer_can_hold_the_conversation_and_what_the_tool_complains_of() -> None:
    report = check_tokenizer(make_tokenizer(), ["47*68=", "error: calculate: write two numbers with * between them"])
    assert report.holds("round trip") and report.holds_turns
    assert make_calculator_model(0).config.vocab_size == len(CHARACTERS)


def test_held_out_problems_are_never_trained_on_and_a_warm_up_makes_a_model() -> None:
    train, held_out = all_problems(seed=0)
    assert not set(train) & set(held_out) and len(train) + len(held_out) == 68 * 68
    model, tokenizer = warm_up(train, seed=0, num_steps=2, asking_share=0.5, batch_size=4)
    assert all(np.isfinite(parameter.detach().numpy()).all() for parameter in model.parameters())
    assert tokenizer.chat_template is not None
