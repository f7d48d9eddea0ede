from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.data import pack, plan_micro_batches
from practicum.data.packing import fill_rows
from tests.samples import make_sample

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 4), st.integers(40, 200))
def test_every_sample_is_planned_once_within_the_budget(lengths: list[int], num_ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget)
    assert len(plan) == num_ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1  # collectives pair up
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    for micro in (micro for rank in plan for micro in rank):
        rows = fill_rows([lengths[i] for i in micro])
        assert len(rows) * max((lengths[i] for i in micro), default=0) <= budget


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    lengths = list(np.random.default_rng(0).integers(10, 100, 200))
    plan = plan_micro_batches([int(n) for n in lengths], 4, 1000)
    tokens = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    assert max(tokens) <= 1.05 * min(tokens)


def test_a_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 11 tokens does not fit in a micro-batch of 10"):
        plan_micro_batches([3, 11], 1, 10)


@given(LENGTHS)
def test_rows_are_never_wider_than_the_longest_sequence(lengths: list[int]) -> None:
    rows = fill_rows(lengths)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= max(lengths) for row in rows)
    assert len(rows) <= max(1, 2 * sum(lengths) // max(lengths) + 1)  # no two rows would fit into one


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=20))
def test_packed_tokens_predict_what_the_samples_say(shapes: list[tuple[int, int]]) -> None:
    samples = [make_sample(p, a, advantage=float(i), seed=i) for i, (p, a) in enumerate(shapes)]
    packed = pack(samples)
    flat = packed.input_ids.reshape(-1)
    assert np.array_equal(flat[packed.predict_at + 1], packed.targets)
    assert np.array_equal(packed.targets, np.concatenate([s.token_ids for s in samples]))
    assert np.array_equal(packed.rollout_log_probs, np.concatenate([s.log_probs for s in samples]))
    assert np.array_equal(packed.advantages, np.concatenate([s.advantages for s in samples]))  # type: ignore[arg-type]
    # The position that predicts an answer's first token is the prompt's last.
    positions = packed.position_ids.reshape(-1)[packed.predict_at]
    assert np.array_equal(positions, np.concatenate([p - 1 + np.arange(a) for p, a in shapes]))
    # Positions restart where, and only where, another sample or the padding begins.
    assert np.all((np.diff(packed.position_ids, axis=1) == 1) | (packed.position_ids[:, 1:] == 0))


def test_masked_tokens_are_seen_but_not_learnt() -> None:
    sample = make_sample(2, 4)
    mask = np.array([True, False, False, True])
    packed = pack([replace(sample, loss_mask=mask)])
    assert packed.input_ids.shape == (1, 6)
    assert np.array_equal(packed.targets, sample.token_ids[mask])


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=20))
def test_each_sample_has_a_row_of_its_own_without_packing(shapes: list[tuple[int, int]]) -> None:
    samples = [make_sample(p, a, seed=i) for i, (p, a) in enumerate(shapes)]
    packed = pack(samples, packing=False)
    assert packed.input_ids.shape == (len(shapes), max(p + a for p, a in shapes))
    assert np.array_equal(packed.input_ids.reshape(-1)[packed.predict_at + 1], packed.targets)
    assert (np.diff(packed.position_ids, axis=1) == 1).all()  # nothing that looks like a second sample
    (rank,) = plan_micro_batches([p + a for p, a in shapes], 1, 40, packing=False)
    assert all(len(micro) * max(sum(shapes[i]) for i in micro) <= 40 for micro in rank)


def test_an_empty_micro_batch_is_one_token_with_nothing_learnt() -> None:
    packed = pack([])
    assert packed.input_ids.shape == (1, 1)
    assert packed.advantages is not None and packed.values is not None
    assert len(packed.targets) == len(packed.predict_at) == len(packed.advantages) == 0


def test_staleness_is_given_where_the_step_is_known() -> None:
    sample = replace(
        make_sample(2, 3), versions=np.array([1, 2, -1], np.int32), loss_mask=np.array([True, True, False])
    )
    assert pack([sample]).staleness is None
    packed = pack([sample], step=4)
    assert packed.staleness is not None and packed.staleness.tolist() == [2, 1]
