"""The contract of src/practicum/rollout/base.py as tests that every engine passes: derive from `EngineContract`.

A subclass gives the fixture `engine`: resumed, holding the model of `tiny_model`, of float32. Engines that draw tokens
by themselves and not as `sampling.draw` does say so with `draws_like_us = False`. `model` and `tokenizer` are in
conftest.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from practicum.controller.loop import run_sync
from practicum.errors import RolloutError
from practicum.models import load_model
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.scheduler import Scheduler
from practicum.rollout.engine.sequence import Sequence
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import WeightUpdate

T = TypeVar("T")
TEXTS = ["1+2=", "<user>10+20=<bot>", "7", "99+99="]
CLOSE = 2e-5
"""How far log-probs may be from those of a full forward pass, in float32."""


def check_blocks(own: Scheduler) -> None:
    """Assert that every block and slot belongs to those that hold it and nobody else."""
    held: dict[int, int] = {}
    for sequence in own.running:
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for block in sequence.blocks:
            held[block] = held.get(block, 0) + 1
    free = set(own._free_blocks)
    assert len(free) == len(own._free_blocks) and not free & held.keys() and 0 not in free | held.keys()
    assert len(free) + len(held) == own.num_blocks
    assert all(own._num_holders[block] == num for block, num in held.items())
    slots = [sequence.slot for sequence in own.running] + own._free_slots
    assert sorted(slots) == list(range(own._max_batch))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return run_sync(coroutine)


def group_of(tokenizer: Any, text: str, params: SamplingParams, seed: int = 0) -> PromptGroup:
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    return PromptGroup(f"{text}/{seed}", Prompt(text, text=text), ids, params, seed)


def sequences_of(groups: Iterable[PromptGroup]) -> list[Sequence]:
    return [Sequence.of(group, trajectory) for group in groups for trajectory in group.trajectories]


def written(engine: BaseRollout, groups: Iterable[PromptGroup]) -> list[Sample]:
    """The samples of all groups, in their order."""
    return [sample for group in engine.generate_all(list(groups)) for sample in group.samples]


def full_forward(model: Any, sample: Sample, temperature: float) -> np.ndarray:
    """Log-probs of the answer by one pass over the whole sequence, as the trainer computes them."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids.astype(np.int64))[:, None])[:, 0].numpy()


def tokens_of(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


class EngineContract:
    draws_like_us = True

    def test_greedy_answers_equal_those_of_generate(self, engine: BaseRollout, model: Any, tokenizer: Any) -> None:
        params = SamplingParams(12, temperature=0.0)
        for sample in written(engine, [group_of(tokenizer, text, params) for text in TEXTS]):
            ids = torch.from_numpy(sample.prompt_ids.astype(np.int64))[None]
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
            assert np.abs(sample.log_probs - full_forward(model, sample, 1.0)).max() < CLOSE

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
    def test_log_probs_equal_a_full_forward(
        self, engine: BaseRollout, model: Any, tokenizer: Any, temperature: float
    ) -> None:
        params = SamplingParams(12, temperature, num_answers=2)
        for sample in written(engine, [group_of(tokenizer, text, params, seed=3) for text in TEXTS]):
            assert np.abs(sample.log_probs - full_forward(model, sample, temperature)).max() < CLOSE

    def test_log_probs_of_given_sequences_equal_a_full_forward(self, engine: BaseRollout, model: Any) -> None:
        random = np.random.default_rng(0)
        sequences = [random.integers(0, model.config.vocab_size, size).astype(np.int32) for size in (2, 9, 9, 30)]
        for ids, found in zip(sequences, run(engine.log_probs(sequences)), strict=True):
            nothing = np.zeros(len(ids) - 1)
            mask, versions = nothing.astype(np.bool_), nothing.astype(np.int32)
            as_answer = Sample(Prompt("p", text="?"), ids[:1], ids[1:], nothing, mask, versions, "", "stop")  # type: ignore[arg-type]
            assert np.abs(found - full_forward(model, as_answer, 1.0)).max() < CLOSE

    def test_answers_do_not_depend_on_the_rest_of_the_batch(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(10, num_answers=3)

        def groups() -> list[PromptGroup]:
            return [group_of(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]

        together = written(engine, groups())
        alone = {group.seed: written(engine, [group]) for group in reversed(groups())}
        assert tokens_of(together) == [tokens for seed in range(len(TEXTS)) for tokens in tokens_of(alone[seed])]

    def test_answers_come_in_order_differ_and_obey_their_own_parameters(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        short, long = SamplingParams(2, num_answers=2), SamplingParams(20, num_answers=3)
        samples = written(engine, [group_of(tokenizer, "1+2=", short), group_of(tokenizer, "7", long, seed=1)])
        assert [s.prompt.id for s in samples] == ["1+2="] * 2 + ["7"] * 3
        assert all(len(s.token_ids) <= 2 for s in samples[:2])
        assert len({tuple(s.token_ids.tolist()) for s in samples[2:]}) == 3

    def test_top_k_and_top_p_narrow_the_choice(self, engine: BaseRollout, tokenizer: Any) -> None:
        greedy = SamplingParams(8, temperature=0.0)
        (expected,) = written(engine, [group_of(tokenizer, "7", greedy)])
        for narrow in (SamplingParams(8, top_k=1), SamplingParams(8, top_p=1e-6)):
            (sample,) = written(engine, [group_of(tokenizer, "7", narrow, seed=4)])
            assert sample.token_ids.tolist() == expected.token_ids.tolist()

    def test_an_answer_ends_with_the_end_of_text_token_or_at_its_length(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        samples = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(30, num_answers=20))])
        assert {s.finish_reason for s in samples} == {"stop", "length"}
        for sample in samples:
            ends = sample.token_ids == tokenizer.eos_token_id
            assert ends.sum() == (sample.finish_reason == "stop")
            assert ends[:-1].sum() == 0
            assert len(sample.token_ids) == 30 or sample.finish_reason == "stop"
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)

    def test_it_stops_at_tokens_and_texts_that_stay_in_the_answer(self, engine: BaseRollout, tokenizer: Any) -> None:
        plain = SamplingParams(30, num_answers=4, ignore_eos=True)
        free = written(engine, [group_of(tokenizer, "1+2=", plain)])
        assert {s.finish_reason for s in free} == {"length"}
        assert {len(s.token_ids) for s in free} == {30}
        token = int(free[0].token_ids[7])
        stopped = written(engine, [group_of(tokenizer, "1+2=", replace(plain, stop_token_ids=(token,)))])
        for sample, whole in zip(stopped, free, strict=True):
            at = np.flatnonzero(whole.token_ids == token)
            length = int(at[0]) + 1 if len(at) else 30
            assert sample.token_ids.tolist() == whole.token_ids[:length].tolist()
            assert sample.finish_reason == ("stop" if len(at) else "length")
        text = free[1].text[3:6]
        stopped = written(engine, [group_of(tokenizer, "1+2=", replace(plain, stop=("no such text", text)))])
        assert stopped[1].text.endswith(text)
        assert stopped[1].finish_reason == "stop"
        assert free[1].token_ids.tolist()[: len(stopped[1].token_ids)] == stopped[1].token_ids.tolist()

    def test_seeds_decide(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(10, num_answers=2)
        first = written(engine, [group_of(tokenizer, "1+2=", params, seed=8)])
        again = written(engine, [group_of(tokenizer, "1+2=", params, seed=8)])
        other = written(engine, [group_of(tokenizer, "1+2=", params, seed=9)])
        assert tokens_of(first) == tokens_of(again) != tokens_of(other)

    def test_what_does_not_fit_the_model_is_refused_before_anything_is_written(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        long = group_of(tokenizer, "1" * 100, SamplingParams(10_000))
        short = group_of(tokenizer, "7", SamplingParams(2))
        with pytest.raises(RolloutError, match=r"has 100 tokens, .*max_new_tokens=10000.*room for \d+"):
            written(engine, [short, long])
        assert not short.samples

    def test_groups_come_as_they_are_finished(self, engine: BaseRollout, tokenizer: Any) -> None:
        groups = [group_of(tokenizer, "7", SamplingParams(num, ignore_eos=True), seed=num) for num in (50, 1)]

        async def generated() -> list[list[PromptGroup]]:
            return [some async for some in engine.generate(groups)]

        came = run(generated())
        assert came in ([[groups[1]], [groups[0]]], [[groups[0]], [groups[1]]])  # engines may batch by parameters
        assert [len(group.trajectories[0].last.token_ids) for group in groups] == [50, 1]

    def test_an_aborted_answer_is_continued_as_if_it_had_not_been(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(40, num_answers=2, ignore_eos=True)

        def groups() -> list[PromptGroup]:
            return [group_of(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]

        whole = written(engine, groups())
        begun = groups()
        self._abort(engine, begun)
        parts = [group.trajectories[i].last for group in begun for i in range(2)]
        assert any(sample.finish_reason == "abort" for sample in parts)
        ended = written(engine, begun)
        for sample, part in zip(ended, parts, strict=True):
            assert sample.token_ids[: len(part.token_ids)].tolist() == part.token_ids.tolist()
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == len(sample.versions) == 40
        self._same(ended, whole)

    def _abort(self, engine: BaseRollout, groups: list[PromptGroup]) -> None:
        """Begin with the groups and abort all once some tokens are there."""
        num_seen = 0

        def hear(tokens: list[int], log_probs: list[float]) -> None:
            nonlocal num_seen
            assert len(tokens) == len(log_probs)
            num_seen += len(tokens)
            if num_seen >= 20:
                engine.abort()

        sequences = sequences_of(groups)
        for sequence in sequences:
            sequence.on_tokens = hear
        samples = iter(run(engine.collect_samples(sequences)))
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.add(next(samples))

    def _same(self, samples: list[Sample], others: list[Sample]) -> None:
        if self.draws_like_us:
            assert tokens_of(samples) == tokens_of(others)
            assert max(np.abs(a.log_probs - b.log_probs).max() for a, b in zip(samples, others, strict=True)) < CLOSE

    def test_what_is_aborted_for_somebody_else_is_continued_after_it(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(40, num_answers=2, ignore_eos=True)

        def groups() -> list[PromptGroup]:
            return [group_of(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]

        async def paused() -> list[Sample]:
            begun = asyncio.Event()
            sequences = sequences_of(groups())
            sequences[0].on_tokens = lambda tokens, log_probs: begun.set()
            writing = asyncio.ensure_future(engine.collect_samples(sequences))
            await begun.wait()
            async with engine.exclusive(abort=True, timeout_s=60):
                assert not writing.done() and engine.num_running == 0
            return await writing

        self._same(run(paused()), written(engine, groups()))

    def test_leaving_early_aborts_the_rest(self, engine: BaseRollout, tokenizer: Any) -> None:
        async def left() -> None:
            long = SamplingParams(60, num_answers=4, ignore_eos=True)
            groups = [group_of(tokenizer, "7", long, seed=i) for i in range(40)]
            stream = engine.generate([group_of(tokenizer, "7", SamplingParams(1)), *groups])
            await anext(stream)
            await stream.aclose()
            assert engine.num_running == engine.num_waiting == 0
            async with engine.exclusive(timeout_s=1):
                pass

        run(left())

    def test_one_answer_is_aborted_and_others_come_while_some_are_under_way(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        params = SamplingParams(40, ignore_eos=True)
        (stays,) = sequences_of([group_of(tokenizer, "1+2=", params, seed=1)])
        (doomed,) = sequences_of([group_of(tokenizer, "7", params, seed=2)])
        (late,) = sequences_of([group_of(tokenizer, "7", params, seed=3)])

        async def answered() -> list[Sample]:
            begun = asyncio.Event()
            stays.on_tokens = lambda tokens, log_probs: begun.set()
            writing = asyncio.ensure_future(engine.collect_samples([doomed, stays]))
            await begun.wait()
            engine.abort([doomed])
            return [*await engine.collect_samples([late]), *await writing]

        samples = run(answered())
        assert [sample.finish_reason for sample in samples] == ["length", "abort", "length"]
        assert len(samples[1].token_ids) < 40
        (alone,) = written(engine, [group_of(tokenizer, "1+2=", params, seed=1)])
        assert samples[2].token_ids.tolist() == alone.token_ids.tolist()

    def test_new_weights_change_the_answers_and_the_version(
        self, engine: BaseRollout, tiny_model: Path, model: Any, tokenizer: Any
    ) -> None:
        other = load_model(str(tiny_model)).eval()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)

        def answer() -> Sample:
            (sample,) = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(8, temperature=0.0))])
            return sample

        before = answer()
        try:
            run(engine.update_weights(WeightUpdate(4, other.named_parameters(), shared=False)))
            after = answer()
            assert set(after.versions.tolist()) == {4}
            assert np.abs(after.log_probs - full_forward(other, after, 1.0)).max() < CLOSE
            assert not np.array_equal(after.log_probs, before.log_probs)
        finally:
            run(engine.update_weights(WeightUpdate(5, model.named_parameters(), shared=False)))
        assert answer().token_ids.tolist() == before.token_ids.tolist()

    def test_released_and_resumed_it_writes_the_same(self, engine: BaseRollout, tokenizer: Any) -> None:
        def answer() -> list[int]:
            (sample,) = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(8), seed=5)])
            return list(sample.token_ids.tolist())

        before = answer()
        assert engine.is_awake
        run(engine.release())
        assert not engine.is_awake
        with pytest.raises(AssertionError, match="resume"):
            answer()
        run(engine.resume())
        assert engine.is_awake and answer() == before
