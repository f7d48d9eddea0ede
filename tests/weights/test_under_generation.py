"""New weights arrive while an engine writes: every token says which it was written with, and tells the truth."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model, load_tokenizer
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.hf import HFRollout
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import ChannelSettings, WeightReceiver
from tests.weights.sending import DEADLINE_S, REMOTE, TrainerProcess, scaled

VERSIONS = (1, 2)
PARAMS = SamplingParams(16, num_answers=2, ignore_eos=True)
ENOUGH = 4  # samples written between two versions, so that each version has some


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a file that the trainer's process reads without a model's code."""
    path = tmp_path_factory.mktemp("weights") / "version-0.pt"
    torch.save({name: own.detach() for name, own in load_model(str(tiny_model)).named_parameters()}, path)
    return path


class Crowd:
    """Keeps four requests under way at all times."""

    def __init__(self, engine: HFRollout, tokenizer: Any) -> None:
        self.samples: list[Sample] = []
        self.is_over = False
        self._engine = engine
        self._tokenizer = tokenizer
        self._num_asked = 0
        self._in_the_midst = asyncio.Event()

    async def ask(self) -> None:
        while not self.is_over:
            self._num_asked += 1
            seed = self._num_asked
            text = f"{seed % 10}+{seed % 7}="
            group = PromptGroup(
                f"{seed}",
                Prompt(f"{seed}", text=text),
                np.array(self._tokenizer(text)["input_ids"], np.int32),
                PARAMS,
                seed,
            )
            async with self._engine.generating():
                sequences = [Sequence.of(group, own, self._on_tokens) for own in group.trajectories]
                self.samples += await self._engine.collect_samples(sequences)

    def _on_tokens(self, tokens: list[int], log_probs: list[float]) -> None:
        self._in_the_midst.set()

    async def wait(self) -> None:
        """Until enough is written, and more is being written."""
        enough = len(self.samples) + ENOUGH
        async with asyncio.timeout(DEADLINE_S):
            while len(self.samples) < enough:
                await asyncio.sleep(0.005)
            self._in_the_midst.clear()
            await self._in_the_midst.wait()


async def written(channel: str, *, is_partial: bool, model: Path, weights: Path, folder: Path) -> list[Sample]:
    engine = HFRollout(str(model), device=torch.device("cpu"), dtype=torch.float32, max_batch=4)
    await engine.resume()
    receiver = WeightReceiver(DEADLINE_S)
    crowd = Crowd(engine, load_tokenizer(str(model)))
    try:
        with TrainerProcess(channel, ChannelSettings(DEADLINE_S, folder=str(folder))) as trainer:
            asking = [asyncio.create_task(crowd.ask()) for _ in range(4)]
            for version in VERSIONS:
                await crowd.wait()
                update, sending = await asyncio.to_thread(
                    trainer.pass_on, receiver, version, scaled, str(weights), version
                )
                async with engine.exclusive(abort=is_partial, timeout_s=DEADLINE_S):
                    await engine.update_weights(update)
                await asyncio.wrap_future(sending)
            await crowd.wait()
            crowd.is_over = True
            await asyncio.gather(*asking)
    finally:
        await engine.close()
    return crowd.samples


def assert_log_probs_are_of_their_versions(samples: list[Sample], model: Path, weights: Path) -> None:
    """The log-prob of each token is that of the weights it says it was written with."""
    models = {version: load_model(str(model)).eval() for version in (0, *VERSIONS)}
    for version, own in models.items():
        own.load_state_dict(dict(scaled(str(weights), version)), strict=False)
    for sample in samples[:: max(1, len(samples) // 24)]:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))[None]
        for version in set(sample.versions.tolist()):
            with torch.no_grad():
                logits = models[version](input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            found = logits.log_softmax(-1).gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0].numpy()
            at = sample.versions == version
            assert np.abs(found - sample.log_probs)[at].max() < 1e-4


@pytest.mark.parametrize("channel", REMOTE)
def test_no_answer_mixes_versions(channel: str, tiny_model: Path, weights: Path, tmp_path: Path) -> None:
    samples = asyncio.run(written(channel, is_partial=False, model=tiny_model, weights=weights, folder=tmp_path))
    assert all(len(set(sample.versions.tolist())) == 1 for sample in samples)
    assert {int(sample.versions[0]) for sample in samples} == {0, *VERSIONS}
    assert_log_probs_are_of_their_versions(samples, tiny_model, weights)


@pytest.mark.parametrize("channel", REMOTE)
def test_partial_answers_continue_with_the_new_version(
    channel: str, tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    samples = asyncio.run(written(channel, is_partial=True, model=tiny_model, weights=weights, folder=tmp_path))
    assert all((np.diff(sample.versions) >= 0).all() for sample in samples)
    assert all(len(sample.token_ids) == PARAMS.max_new_tokens for sample in samples)
    mixed = [sample for sample in samples if len(set(sample.versions.tolist())) > 1]
    assert mixed
    assert_log_probs_are_of_their_versions([*mixed, *samples], tiny_model, weights)
