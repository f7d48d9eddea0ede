"""What the device is told of sequences, and what comes back from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import TrainingError
from practicum.replay.hooks import RouterShape
from practicum.rollout.engine.cuda.device_state import DeviceState, InFlight
from practicum.rollout.engine.cuda.graphs import graph_size, num_splits
from practicum.rollout.engine.scheduler import Scheduler
from practicum.rollout.engine.sequence import Sequence
from practicum.types import Prompt, SamplingParams
from tests.rollout.engine.cuda.device import DEVICE, emulate_cuda

SIZE = 64


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_cuda(monkeypatch)


def sequences(num_prompt: int, num: int) -> list[Sequence]:
    params = SamplingParams(500, num_answers=num, top_k=3_000_000_000)
    prompt_ids = np.ones(num_prompt, np.int32)
    return [Sequence(Prompt("p", text="?"), prompt_ids, params, 2**64 - 1, number) for number in range(num)]


def scheduler(num_blocks: int = 8) -> Scheduler:
    own = Scheduler(max_batch=4, block_size=SIZE, prefill_tokens=10_000, grow_blocks=4)
    own.reset(num_blocks)
    return own


def test_the_device_knows_the_blocks_and_parameters_of_each_sequence() -> None:
    state, own = DeviceState(4, 16, DEVICE), scheduler()
    own.add(sequences(2 * SIZE + 3, 3))
    (group,) = own.admit()
    state.begin(group)
    for number, sequence in enumerate(group):
        assert state.tables[sequence.slot, :3].tolist() == sequence.blocks
        assert state.positions[sequence.slot] == 2 * SIZE + 2
        assert state.num_prompts[sequence.slot] == 2 * SIZE + 3
        assert state.seeds[sequence.slot] == -1  # the same bits
        assert state.numbers[sequence.slot] == number
        assert state.top_ks[sequence.slot] == 2**31 - 1


def test_tables_grow_with_their_sequences_and_begin_anew_in_a_slot_that_is_taken_again() -> None:
    state, own = DeviceState(4, 16, DEVICE), scheduler()
    (first,), (second,) = sequences(SIZE - 1, 1), sequences(3 * SIZE - 1, 1)
    own.add([first, second])
    state.begin([sequence for group in own.admit() for sequence in group])
    first.num_launched = second.num_launched = 2
    grown = own.grow([first, second])
    assert grown == [first, second]
    state.extend(grown)
    assert len(first.blocks) > 1
    for sequence in (first, second):
        assert state.tables[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks
    slot = second.slot
    own.remove([second])
    (third,) = sequences(SIZE + 1, 1)
    own.add([third])
    own.admit()
    assert third.slot == slot
    state.begin([third])
    assert state.tables[slot, :2].tolist() == third.blocks


def test_launches_are_collected_in_their_order() -> None:
    in_flight, own = InFlight(8, None, DEVICE), sequences(5, 3)
    for number in range(2):
        in_flight.tokens[:3] = torch.tensor([1, 2, 3]) + 10 * number
        in_flight.log_probs[:3] = -0.5 - number
        if number:
            in_flight.log_probs[1] = float("nan")  # whoever has ended does not count
        in_flight.add(own, None)
    assert len(in_flight) == 2
    assert in_flight.collect() == [(own[0], 1, -0.5), (own[1], 2, -0.5), (own[2], 3, -0.5)]
    own[1].finish_reason = "stop"
    assert [(sequence.number, token) for sequence, token, _ in in_flight.collect()] == [(0, 11), (1, 12), (2, 13)]
    assert len(in_flight) == 0


def test_log_probs_that_are_nan_are_reported() -> None:
    in_flight, own = InFlight(8, None, DEVICE), sequences(5, 2)
    in_flight.log_probs[1] = float("nan")
    in_flight.add(own, None)
    with pytest.raises(TrainingError, match="no longer numbers"):
        in_flight.collect()


def test_routes_of_what_is_read_again_are_kept_once() -> None:
    shape = RouterShape(layers=np.array([0, 1], np.int32), num_experts=8, k=2)
    in_flight, own = InFlight(8, shape, DEVICE), sequences(5, 2)

    def read(num_tokens: int) -> Any:
        return torch.arange(num_tokens * 4, dtype=torch.uint8, device=DEVICE).view(num_tokens, 2, 2)

    in_flight.add(own, read(5), [(0, 5), (0, 5)])
    assert in_flight.routes is not None
    in_flight.routes[:2] = 7
    in_flight.add(own, in_flight.routes[:2])
    in_flight.add(own[:1], read(7), [(0, 7)])
    for _ in range(3):
        in_flight.collect()
    in_flight.gather_routes()
    for sequence, num in zip(own, (7, 6), strict=True):
        routes = np.concatenate(sequence.routes)
        assert len(routes) == sequence.num_routed == num
        assert np.array_equal(routes[:5].ravel(), np.arange(20))
        assert (routes[5] == 7).all()


def test_routes_of_steps_go_to_their_sequences_but_for_those_that_have_ended() -> None:
    shape = RouterShape(layers=np.array([0], np.int32), num_experts=8, k=2)
    in_flight, own = InFlight(8, shape, DEVICE), sequences(5, 2)
    in_flight.add(own, torch.zeros(5, 1, 2, dtype=torch.uint8, device=DEVICE), [(0, 5), (0, 5)])
    in_flight.collect()
    for step in range(150):
        in_flight.add(own, torch.tensor([[[step % 5, 7]], [[step % 3, 6]]], dtype=torch.uint8, device=DEVICE))
        in_flight.collect()
        assert len(in_flight._steps) <= 64  # what has ended is not kept for long
    own[1].finish_reason = "stop"
    in_flight.gather_routes()
    in_flight.add(own, torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.uint8, device=DEVICE))
    in_flight.collect()
    in_flight.gather_routes()
    first, second = (np.concatenate(sequence.routes)[5:, 0].tolist() for sequence in own)
    assert first == [[step % 5, 7] for step in range(150)] + [[1, 2]]
    assert second == [[step % 3, 6] for step in range(150)]


@given(st.integers(1, 3000))
def test_the_size_of_a_graph_holds_its_rows_with_little_padding(num_rows: int) -> None:
    assert num_rows <= graph_size(num_rows) < max(2 * num_rows, num_rows + 2)


def test_contexts_are_split_only_where_processors_have_nothing_to_do() -> None:
    assert num_splits(num_programs=2048, num_tiles=500, num_processors=132) == 1
    assert num_splits(num_programs=8, num_tiles=6, num_processors=132) == 4  # no more than there are tiles
    assert num_splits(num_programs=8, num_tiles=1000, num_processors=132) == 32
    assert num_splits(num_programs=256, num_tiles=128, num_processors=132) == 4
