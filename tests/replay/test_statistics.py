from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from practicum.errors import ReplayError
from practicum.replay.format import RecordingHeader
from practicum.replay.records import RecordedSample
from practicum.replay.statistics import balance, difference, statistics, verify
from practicum.replay.store import Recording, rank_path
from practicum.types import RoutedExperts
from tests.replay.recordings import HEADER, make_batch, make_record, write


def with_experts(record: RecordedSample, token: int, place: int, experts: list[int]) -> RecordedSample:
    changed = record.routes.experts.copy()
    changed[token, place] = experts
    return replace(record, routes=replace(record.routes, experts=changed))


def test_a_survey_counts_what_stands(tmp_path: Path) -> None:
    records = make_batch(1, 10)
    path = write(tmp_path / "routes", records)
    write(path, records[:3])  # again, as after a resume
    with Recording(path) as recording:
        found = statistics(recording)
    assert (found.num_steps, found.num_samples, found.num_replaced) == (1, 10, 3)
    assert (found.num_tokens, found.num_unknown) == (80, 10)
    assert found.num_bytes == path.stat().st_size and found.num_lost_bytes == 0
    expected = np.zeros((3, 8), np.int64)
    for record in records:
        for token in record.routes.experts[record.routes.known]:
            for place, experts in enumerate(token):
                expected[place, experts] += 1
    assert np.array_equal(found.load, expected)


def test_sizes_stand_beside_the_bound(tmp_path: Path) -> None:
    header = RecordingHeader("moe", tuple(range(4)), 64, 8, "t")
    path = write(tmp_path / "routes", make_batch(1, 8, prompt=100, answer=400, header=header), header, 1 << 14)
    with Recording(path) as recording:
        size = statistics(recording).size
    assert (size.int32, size.array) == (128.0, 32.0)
    assert size.bound == pytest.approx(4 * math.log2(math.comb(64, 8)) / 8)
    assert size.bound * 0.99 < size.routes < size.bound * 1.05
    assert size.routes < size.everything < size.routes + 20


def test_balance_tells_the_busiest_the_entropy_and_the_dead() -> None:
    even = balance(np.array([5, 5, 5, 5]))
    assert (even.imbalance, even.num_dead) == (1.0, 0) and even.entropy == pytest.approx(1)
    uneven = balance(np.array([10, 10, 0, 0]))
    assert (uneven.imbalance, uneven.num_dead) == (2.0, 2) and uneven.entropy == pytest.approx(0.5)
    assert balance(np.array([0, 0])).num_dead == 2 and balance(np.array([7])).entropy == 1.0


def test_a_difference_tells_where_and_how_much(tmp_path: Path) -> None:
    records = make_batch(1, 4)
    original = with_experts(with_experts(records[1], 2, 1, [0, 1]), 4, 0, [2, 3])
    changed = with_experts(with_experts(records[1], 2, 1, [0, 7]), 4, 0, [5, 6])
    one = write(tmp_path / "one", [records[0], original, records[2]])
    other = write(tmp_path / "other", [changed, records[0], records[3]])
    with Recording(one) as a, Recording(other) as b:
        found = difference(a, b)
    assert (found.only_in_first, found.only_in_second, found.num_common) == (["1-2"], ["1-3"], 2)
    assert found.num_tokens == 14 and found.with_other_tokens == []
    assert found.differing.tolist() == [1, 1, 0] and found.differing_experts.tolist() == [2, 1, 0]
    (start,) = found.first
    assert (start.id, start.position, start.layer) == ("1-1", 2, 2)  # the second of layers 1, 2 and 5


def test_experts_are_compared_as_long_as_the_tokens_are_the_same(tmp_path: Path) -> None:
    record = make_record("a", prompt=3, answer=5)
    tokens = record.sample.token_ids.copy()
    tokens[2] += 1
    sample = replace(record.sample, token_ids=tokens)
    other = replace(record, sample=sample)
    with Recording(write(tmp_path / "a", [record])) as a, Recording(write(tmp_path / "b", [other])) as b:
        found = difference(a, b)
    assert found.with_other_tokens == ["a"] and found.num_tokens == 5


def test_what_is_not_known_in_both_is_not_compared(tmp_path: Path) -> None:
    record = make_record("a")
    routes = record.routes
    known = routes.known & (np.arange(len(routes)) > 2)
    fewer = replace(record, routes=RoutedExperts(np.flip(routes.experts, 0), routes.layers, known, routes.num_experts))
    with Recording(write(tmp_path / "a", [record])) as a, Recording(write(tmp_path / "b", [fewer])) as b:
        found = difference(a, b)
    assert found.num_tokens == known.sum() and all(start.position > 2 for start in found.first)


def test_recordings_of_different_models_are_not_compared(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [])
    other = write(tmp_path / "other", [], replace(HEADER, model="olmoe-5"))
    complaint = "one and .*other cannot be compared: .* model qwen3_moe-1f2e3d4c, not olmoe-5"
    with Recording(one) as a, Recording(other) as b, pytest.raises(ReplayError, match=complaint):
        difference(a, b)


def test_verify_tells_what_is_whole_and_what_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "routes", make_batch(1, 20))
    (verdict,) = verify(path)
    assert verdict.is_whole and (verdict.num_chunks, verdict.num_samples, verdict.unfinished) == (4, 20, 0)
    with Recording(path) as recording:
        chunks = recording.files[0].chunks
    data = bytearray(path.read_bytes())
    data[chunks[0].payload_offset + 5] ^= 1
    data[chunks[2].head.offset + 1] ^= 1
    path.write_bytes(data[:-9])
    (verdict,) = verify(path)
    assert not verdict.is_whole and (verdict.num_chunks, verdict.num_samples) == (1, 5)
    damaged, lost = verdict.problems
    assert damaged.offset == chunks[0].head.offset and damaged.reason.startswith("chunk 0 (5 samples, 1-0 to 1-4): ")
    assert (lost.offset, lost.size) == (chunks[2].head.offset, chunks[2].head.size)
    assert verdict.unfinished == chunks[3].head.size - 9


def test_verify_never_calls_a_file_with_a_flipped_bit_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "routes", make_batch(1, 8))
    whole = path.read_bytes()
    for bit in np.random.default_rng(0).choice(len(whole) * 8, 200, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        (verdict,) = verify(path)
        assert not verdict.is_whole and verdict.num_samples < 8


def test_verify_looks_at_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    for rank in range(2):
        write(path, make_batch(rank, 2), replace(HEADER, rank=rank, num_ranks=3))
    verdicts = list(verify(path))
    assert [verdict.path for verdict in verdicts] == [rank_path(path, rank) for rank in range(3)]
    assert [verdict.is_whole for verdict in verdicts] == [True, True, False]
    assert "No such file" in verdicts[2].problems[0].reason
