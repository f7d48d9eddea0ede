from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import torch

from practicum.data import pack
from practicum.train.batch import MiniBatch, by_id, model_inputs, on_device, totals_of
from practicum.types import Sample
from tests.samples import make_sample


def conversation(number: int) -> Sample:
    """One whose middle token is not the model's own."""
    item = make_sample(2, 3, seed=number, id=f"1/{number}/0")
    mask = np.array([True, False, True])
    log_probs = np.where(mask, item.log_probs, np.nan).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return replace(item, loss_mask=mask, log_probs=log_probs, versions=versions)


def test_totals_count_learnt_tokens_and_answers_that_have_any() -> None:
    totals = totals_of([conversation(0), make_sample(2, 5)], max_tokens=9)
    assert (totals.num_tokens, totals.num_sequences, totals.max_tokens) == (7, 2, 9)


def test_a_mini_batch_travels_with_all_that_its_samples_know() -> None:
    item = replace(conversation(3), reference_log_probs=np.ones(3, np.float32), values=np.zeros(3, np.float32))
    there = pickle.loads(pickle.dumps(MiniBatch([[item], []], totals_of([item], 4), 7)))
    (again,), none = there.micro_batches
    assert not none and there.totals == totals_of([item], 4) and there.step_size == 7
    assert again.id == "1/3/0" and again.returns is None
    assert (again.reference_log_probs == 1).all() and (again.values == 0).all()


def test_what_is_found_for_tokens_comes_back_to_their_samples() -> None:
    samples = [conversation(4), make_sample(1, 2, id="1/9/0")]
    micro = pack(samples)
    found = by_id(samples, micro, torch.tensor([0.0, 2.0, 10.0, 11.0]))
    assert found["1/4/0"][[0, 2]].tolist() == [0.0, 2.0] and np.isnan(found["1/4/0"][1])
    assert found["1/9/0"].tolist() == [10.0, 11.0]
    assert by_id([], pack([]), torch.empty(0)) == {}


def test_inputs_are_tensors_and_nothing_stays_nothing() -> None:
    micro, cpu = pack([conversation(0)]), torch.device("cpu")
    ids, positions, at, targets = model_inputs(micro, cpu)
    assert ids.shape == positions.shape == (1, 5)
    assert len(at) == len(targets) == 2
    assert on_device(micro.values, cpu) is None
