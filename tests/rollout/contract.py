"""The contract of src/practicum/rollout/base.py as tests that every engine passes: derive from `EngineContract`.

A subclass gives the fixture `engine`: resumed, holding the model of `tiny_model`, of float32. Engines that draw tokens
by themselves and not as `sampling.draw` does say so with `draws_like_us = False`. `model` and `tokenizer` are in
conftest.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import RolloutError
from practicum.models import load_model
from practicum.rollout.base import BaseRollout
from practicum.rollout.inbox import Inbox, Ticket
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams
from practicum.weights import WeightUpdate

TEXTS = ["1+2=", "<user>10+20=<bot>", "7", "99+99="]
CLOSE = 2e-5
"""How far log-probs may be from those of a full forward pass, in float32."""


def request(tokenizer: Any, text: str, params: SamplingParams, seed: int = 0) -> RolloutRequest:
    return RolloutRequest(Prompt(text, text=text), np.array(tokenizer(text)["input_ids"], np.int32), params, seed)


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
        for sample in engine.generate([request(tokenizer, text, params) for text in TEXTS]):
            ids = torch.from_numpy(sample.prompt_ids.astype(np.int64))[None]
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
            assert np.abs(sample.log_probs - full_forward(model, sample, 1.0)).max() < CLOSE

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
    def test_log_probs_equal_a_full_forward(
        self, engine: BaseRollout, model: Any, tokenizer: Any, temperature: float
    ) -> None:
        params = SamplingParams(12, temperature, num_answers=2)
        for sample in engine.generate([request(tokenizer, text, params, seed=3) for text in TEXTS]):
            assert np.abs(sample.log_probs - full_forward(model, sample, temperature)).max() < CLOSE

    def test_log_probs_of_given_sequences_equal_a_full_forward(self, engine: BaseRollout, model: Any) -> None:
        random = np.random.default_rng(0)
        sequences = [random.integers(0, model.config.vocab_size, size).astype(np.int32) for size in (2, 9, 9, 30)]
        for ids, found in zip(sequences, engine.log_probs(sequences), strict=True):
            nothing = np.zeros(len(ids) - 1)
            mask, versions = nothing.astype(np.bool_), nothing.astype(np.int32)
            as_answer = Sample(Prompt("p", text="?"), ids[:1], ids[1:], nothing, mask, versions, "", "stop")  # type: ignore[arg-type]
            assert np.abs(found - full_forward(model, as_answer, 1.0)).max() < CLOSE

    def test_answers_do_not_depend_on_the_rest_of_the_batch(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(10, num_answers=3)
        requests = [request(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]
        together = engine.generate(requests)
        alone = {one.seed: engine.generate([one]) for one in reversed(requests)}
        assert tokens_of(together) == [tokens for seed in range(len(TEXTS)) for tokens in tokens_of(alone[seed])]

    def test_answers_come_in_order_differ_and_obey_their_own_parameters(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        short, long = SamplingParams(2, num_answers=2), SamplingParams(20, num_answers=3)
        samples = engine.generate([request(tokenizer, "1+2=", short), request(tokenizer, "7", long, seed=1)])
        assert [s.prompt.id for s in samples] == ["1+2="] * 2 + ["7"] * 3
        assert all(len(s.token_ids) <= 2 for s in samples[:2])
        assert len({tuple(s.token_ids.tolist()) for s in samples[2:]}) == 3

    def test_top_k_and_top_p_narrow_the_choice(self, engine: BaseRollout, tokenizer: Any) -> None:
        greedy = SamplingParams(8, temperature=0.0)
        (expected,) = engine.generate([request(tokenizer, "7", greedy)])
        for narrow in (SamplingParams(8, top_k=1), SamplingParams(8, top_p=1e-6)):
            (sample,) = engine.generate([request(tokenizer, "7", narrow, seed=4)])
            assert sample.token_ids.tolist() == expected.token_ids.tolist()

    def test_an_answer_ends_with_the_end_of_text_token_or_at_its_length(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        samples = engine.generate([request(tokenizer, "1+2=", SamplingParams(30, num_answers=20))])
        assert {s.finish_reason for s in samples} == {"stop", "length"}
        for sample in samples:
            ends = sample.token_ids == tokenizer.eos_token_id
            assert ends.sum() == (sample.finish_reason == "stop")
            assert ends[:-1].sum() == 0
            assert len(sample.token_ids) == 30 or sample.finish_reason == "stop"
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)

    def test_it_stops_at_tokens_and_texts_that_stay_in_the_answer(self, engine: BaseRollout, tokenizer: Any) -> None:
        plain = SamplingParams(30, num_answers=4, ignore_eos=True)
        free = engine.generate([request(tokenizer, "1+2=", plain)])
        assert {s.finish_reason for s in free} == {"length"}
        assert {len(s.token_ids) for s in free} == {30}
        token = int(free[0].token_ids[7])
        stopped = engine.generate([request(tokenizer, "1+2=", replace(plain, stop_token_ids=(token,)))])
        for sample, whole in zip(stopped, free, strict=True):
            at = np.flatnonzero(whole.token_ids == token)
            length = int(at[0]) + 1 if len(at) else 30
            assert sample.token_ids.tolist() == whole.token_ids[:length].tolist()
            assert sample.finish_reason == ("stop" if len(at) else "length")
        text = free[1].text[3:6]
        stopped = engine.generate([request(tokenizer, "1+2=", replace(plain, stop=("no such text", text)))])
        assert stopped[1].text.endswith(text)
        assert stopped[1].finish_reason == "stop"
        assert free[1].token_ids.tolist()[: len(stopped[1].token_ids)] == stopped[1].token_ids.tolist()

    def test_seeds_decide(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(10, num_answers=2)
        first = engine.generate([request(tokenizer, "1+2=", params, seed=8)])
        again = engine.generate([request(tokenizer, "1+2=", params, seed=8)])
        other = engine.generate([request(tokenizer, "1+2=", params, seed=9)])
        assert tokens_of(first) == tokens_of(again) != tokens_of(other)

    def test_what_does_not_fit_the_model_is_refused_before_anything_is_written(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        long = request(tokenizer, "1" * 100, SamplingParams(10_000))
        with pytest.raises(RolloutError, match=r"has 100 tokens, .*max_new_tokens=10000.*room for \d+"):
            engine.generate([request(tokenizer, "7", SamplingParams(2)), long])

    def test_a_broken_off_answer_is_gone_on_with_as_if_it_had_not_been(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        params = SamplingParams(40, num_answers=2, ignore_eos=True)
        asked = [request(tokenizer, text, params, seed=i) for i, text in enumerate(TEXTS)]
        whole = engine.generate(asked)
        parts = self._broken_off(engine, asked)
        assert len(parts) == len(whole)
        assert any(sample.finish_reason == "abort" for sample in parts)
        again = [
            asked[i // 2].going_on(i % 2, sample) for i, sample in enumerate(parts) if sample.finish_reason == "abort"
        ]
        rest = iter(engine.generate(again))
        ended = [next(rest) if sample.finish_reason == "abort" else sample for sample in parts]
        for sample, part in zip(ended, parts, strict=True):
            assert sample.token_ids[: len(part.token_ids)].tolist() == part.token_ids.tolist()
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == len(sample.versions) == 40
        if self.draws_like_us:
            assert tokens_of(ended) == tokens_of(whole)
            assert max(np.abs(a.log_probs - b.log_probs).max() for a, b in zip(ended, whole, strict=True)) < CLOSE

    def _broken_off(self, engine: BaseRollout, asked: list[RolloutRequest]) -> list[Sample]:
        """Once some tokens are there. What it returns comes within seconds."""
        inbox, found = Inbox(), {}
        seen: list[int] = []

        def heard(answer: int, tokens: list[int], log_probs: list[float]) -> None:
            assert len(tokens) == len(log_probs)
            seen.extend(tokens)
            if len(seen) >= 20:
                inbox.abort()

        for index, one in enumerate(asked):

            def told(answer: int, sample: Sample, first: int = index * one.params.num_answers) -> None:
                found[first + answer] = sample

            assert inbox.put(Ticket(one, told, heard))
        engine.write(inbox)
        return [found[index] for index in range(len(found))]

    def test_aborting_from_another_thread_makes_generate_return(self, engine: BaseRollout, tokenizer: Any) -> None:
        params = SamplingParams(60, num_answers=4, ignore_eos=True)
        asked = [request(tokenizer, "7", params, seed=i) for i in range(40)]
        engine.abort()  # nothing is under way
        found: list[Sample] = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate(asked)))
        thread.start()
        deadline = time.monotonic() + 30
        while thread.is_alive() and time.monotonic() < deadline:
            engine.abort()
            time.sleep(0.01)
        thread.join(1)
        assert len(found) == 160
        assert any(sample.finish_reason == "abort" for sample in found)

    def test_one_request_is_cancelled_and_others_come_while_some_are_under_way(
        self, engine: BaseRollout, tokenizer: Any
    ) -> None:
        params = SamplingParams(40, ignore_eos=True)
        inbox, found = Inbox(), {}
        seen: list[int] = []
        late = Ticket(request(tokenizer, "7", params, seed=3), lambda _, sample: found.update(late=sample))

        def heard(answer: int, tokens: list[int], log_probs: list[float]) -> None:
            if not seen:
                seen.extend(tokens)
                inbox.cancel(doomed)
                assert inbox.put(late)
                inbox.close()

        asked = request(tokenizer, "1+2=", params, seed=1)
        stays = Ticket(asked, lambda _, sample: found.update(stays=sample), heard)
        doomed = Ticket(request(tokenizer, "7", params, seed=2), lambda _, sample: found.update(doomed=sample))
        assert inbox.put(doomed) and inbox.put(stays)
        engine.write(inbox)
        assert {name: sample.finish_reason for name, sample in found.items()} == {
            "stays": "length",
            "doomed": "abort",
            "late": "length",
        }
        assert len(found["doomed"].token_ids) < 40
        assert found["stays"].token_ids.tolist() == engine.generate([asked])[0].token_ids.tolist()

    def test_new_weights_change_the_answers_and_the_version(
        self, engine: BaseRollout, tiny_model: Path, model: Any, tokenizer: Any
    ) -> None:
        other = load_model(str(tiny_model)).eval()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        asked = [request(tokenizer, "1+2=", SamplingParams(8, temperature=0.0))]
        (before,) = engine.generate(asked)
        try:
            engine.update_weights(WeightUpdate(4, other.named_parameters(), shared=False))
            (after,) = engine.generate(asked)
            assert set(after.versions.tolist()) == {4}
            assert np.abs(after.log_probs - full_forward(other, after, 1.0)).max() < CLOSE
            assert not np.array_equal(after.log_probs, before.log_probs)
        finally:
            engine.update_weights(WeightUpdate(5, model.named_parameters(), shared=False))
        assert engine.generate(asked)[0].token_ids.tolist() == before.token_ids.tolist()

    def test_released_and_resumed_it_writes_the_same(self, engine: BaseRollout, tokenizer: Any) -> None:
        asked = [request(tokenizer, "1+2=", SamplingParams(8), seed=5)]
        (before,) = engine.generate(asked)
        engine.release()
        with pytest.raises(AssertionError, match="resume"):
            engine.generate(asked)
        engine.resume()
        assert engine.generate(asked)[0].token_ids.tolist() == before.token_ids.tolist()
