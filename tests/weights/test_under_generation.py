"""New weights arrive while an engine writes: every token says which it was written with, and tells the truth."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model, load_tokenizer
from practicum.rollout.hf import HFRollout
from practicum.rollout.runner import EngineRunner, Order
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams
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
    """Keeps a few requests under way at all times."""

    def __init__(self, runner: EngineRunner, tokenizer: Any) -> None:
        self.samples: list[Sample] = []
        self.failures: list[Exception] = []
        self.news = threading.Condition()
        self._runner = runner
        self._tokenizer = tokenizer
        self._num_asked = 0
        self.num_open = 0
        self.is_over = False
        self._in_the_midst = False

    def ask(self) -> None:
        with self.news:
            self._num_asked += 1
            seed = self._num_asked
            self.num_open += PARAMS.num_answers
        text = f"{seed % 10}+{seed % 7}="
        ids = np.array(self._tokenizer(text)["input_ids"], np.int32)
        request = RolloutRequest(Prompt(f"{seed}", text=text), ids, PARAMS, seed)
        self._runner.submit(Order(request, self._on_sample, self.failures.append, self._on_tokens))

    def _on_sample(self, answer: int, sample: Sample) -> None:
        with self.news:
            self.samples.append(sample)
            self.num_open -= 1
            self.news.notify_all()
            goes_on = answer == 0 and not self.is_over
        if goes_on:
            self.ask()

    def _on_tokens(self, answer: int, tokens: list[int], log_probs: list[float]) -> None:
        with self.news:
            self._in_the_midst = True
            self.news.notify_all()

    def wait(self) -> None:
        """Until enough is written, and more is being written."""
        with self.news:
            enough = len(self.samples) + ENOUGH
            assert self.news.wait_for(lambda: len(self.samples) >= enough or self.failures, DEADLINE_S)
            self._in_the_midst = False
            assert self.news.wait_for(lambda: self._in_the_midst or self.failures, DEADLINE_S)

    def finish(self) -> None:
        with self.news:
            self.is_over = True
            assert self.news.wait_for(lambda: not self.num_open or self.failures, DEADLINE_S)


def written(channel: str, *, is_partial: bool, model: Path, weights: Path, folder: Path) -> list[Sample]:
    engine = HFRollout(str(model), device=torch.device("cpu"), dtype=torch.float32, max_batch=4)
    engine.resume()
    receiver = WeightReceiver(DEADLINE_S)
    runner = EngineRunner(engine, is_partial=is_partial)
    crowd = Crowd(runner, load_tokenizer(str(model)))
    try:
        with TrainerProcess(channel, ChannelSettings(DEADLINE_S, folder=str(folder))) as trainer:
            for _ in range(4):
                crowd.ask()
            for version in VERSIONS:
                crowd.wait()
                update, sending = trainer.pass_on(receiver, version, scaled, str(weights), version)
                runner.between(lambda update=update: engine.update_weights(update), DEADLINE_S)
                sending.result(DEADLINE_S)
            crowd.wait()
            crowd.finish()
    finally:
        runner.close()
    assert not crowd.failures
    return crowd.samples


def assert_told_the_truth(samples: list[Sample], model: Path, weights: Path) -> None:
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
    samples = written(channel, is_partial=False, model=tiny_model, weights=weights, folder=tmp_path)
    assert all(len(set(sample.versions.tolist())) == 1 for sample in samples)
    assert {int(sample.versions[0]) for sample in samples} == {0, *VERSIONS}
    assert_told_the_truth(samples, tiny_model, weights)


@pytest.mark.parametrize("channel", REMOTE)
def test_partial_answers_go_on_with_the_new_version(
    channel: str, tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    samples = written(channel, is_partial=True, model=tiny_model, weights=weights, folder=tmp_path)
    assert all((np.diff(sample.versions) >= 0).all() for sample in samples)
    assert all(len(sample.token_ids) == PARAMS.max_new_tokens for sample in samples)
    mixed = [sample for sample in samples if len(set(sample.versions.tolist())) > 1]
    assert mixed
    assert_told_the_truth([*mixed, *samples], tiny_model, weights)
