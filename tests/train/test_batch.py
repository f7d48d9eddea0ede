from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import torch

from practicum.data import pack
from practicum.train.batch import MiniBatch, by_place, model_inputs, on_device, totals_of
from practicum.types import TrainingSample
from tests.samples import make_training_sample


def talk(place: int) -> TrainingSample:
    """One whose middle token is not the model's own."""
    item = make_training_sample(2, 3, seed=place)
    mask = np.array([True, False, True])
    log_probs = np.where(mask, item.sample.log_probs, np.nan).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return replace(
        item, place=place, sample=replace(item.sample, loss_mask=mask, log_probs=log_probs, versions=versions)
    )


def test_totals_count_learnt_tokens_and_answers_that_have_any() -> None:
    totals = totals_of([talk(0), make_training_sample(2, 5)], max_tokens=9)
    assert (totals.num_tokens, totals.num_sequences, totals.max_tokens) == (7, 2, 9)


def test_a_mini_batch_travels_with_all_that_its_samples_know() -> None:
    item = replace(talk(3), reference_log_probs=np.ones(3, np.float32), values=np.zeros(3, np.float32))
    there = pickle.loads(pickle.dumps(MiniBatch([[item], []], totals_of([item], 4))))
    (again,), none = there.micro_batches
    assert not none and there.totals == totals_of([item], 4)
    assert again.place == 3 and again.returns is None
    assert (again.reference_log_probs == 1).all() and (again.values == 0).all()


def test_what_is_found_for_tokens_comes_back_to_their_samples() -> None:
    samples = [talk(4), replace(make_training_sample(1, 2), place=9)]
    micro = pack(samples)
    found = dict(by_place(samples, micro, torch.tensor([0.0, 2.0, 10.0, 11.0])))
    assert found[4][[0, 2]].tolist() == [0.0, 2.0] and np.isnan(found[4][1])
    assert found[9].tolist() == [10.0, 11.0]
    assert dict(by_place([], pack([]), torch.empty(0))) == {}


def test_inputs_are_tensors_and_nothing_stays_nothing() -> None:
    micro, cpu = pack([talk(0)]), torch.device("cpu")
    ids, positions, at, targets = model_inputs(micro, cpu)
    assert ids.shape == positions.shape == (1, 5)
    assert len(at) == len(targets) == 2
    assert on_device(micro.values, cpu) is None
