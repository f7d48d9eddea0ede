"""The `replay` benchmark, each case on little work: what it counts must be right. Times are not looked at."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import replay, replay_cost, replay_exact, replay_gpu
from bench.harness import Options, Outcome, Row, UsageError
from bench.models import VOCABULARY, write_enlarged, write_model
from bench.replay_exact import FAMILIES, Learner, moved_share
from bench.turns import Step, Tally
from bench.work import made_samples
from practicum.models import count_weights, load_config
from practicum.replay import RouteReplayer
from practicum.types import RoutedExperts
from tests.models import save_family
from tests.train.actors import mini_batches


def by_metric(rows: list[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


# Exact


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_is_exact(family: str, tmp_path: Path) -> None:
    found = by_metric(replay_exact.exact_rows("exact", Learner(save_family(family, tmp_path))))
    recorded = found["share of token-layers as recorded"]
    assert recorded.ours == found["share of gates with a gradient"].ours == 1.0
    assert recorded.peer is not None and recorded.peer < 0.9, "the weights were not changed enough to tell"
    assert found["gradient difference, checkpointed"].ours < 1e-5
    packed = found.get("gradient difference, packed")
    assert (packed is None) == (family == "gpt_oss")  # whose samples have rows of their own in training too
    assert packed is None or packed.ours < 1e-4


def test_layers_are_recomputed_and_with_other_experts_that_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouteReplayer, "checkpoint_contexts", lambda _: (nullcontext(), nullcontext()))
    learner = Learner(save_family("mixtral", tmp_path))
    with pytest.raises(CheckpointError):
        replay_exact.exact_rows("exact", learner)


def test_a_token_sent_elsewhere_would_be_seen() -> None:
    experts = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    one = RoutedExperts(experts, np.arange(2, dtype=np.int32), np.array([True, True, False]), 32)
    other = experts.copy()
    other[0, 1, 2] = 31
    other[2] = 0  # where nothing is known
    assert moved_share([one], [one]) == 0.0
    assert moved_share([one], [replace(one, experts=other)]) == 0.25


@pytest.mark.slow
def test_two_ranks_are_compared_with_one(tmp_path: Path, ray_session: None) -> None:
    rows = replay_exact.ranks_rows(tmp_path)
    assert [row.metric.partition(":")[0] for row in rows] == ["R2", "R2", "R3", "R3"]
    for row in rows:
        assert row.ours < 1e-3
        assert row.peer is None or 10 * row.ours < row.peer  # the update itself is far larger


def test_samples_are_dealt_out_once() -> None:
    samples = made_samples(replay_exact.LENGTHS)
    ranks = mini_batches(samples, num_ranks=2, budget=40, parts=2)
    ids = [sample.id for batches in ranks for batch in batches for micro in batch.micro_batches for sample in micro]
    assert sorted(ids) == sorted(sample.id for sample in samples)
    assert sum(batch.totals.num_tokens for batch in ranks[0]) == sum(answer for _, answer in replay_exact.LENGTHS)


# Effect


def test_the_effect_of_every_mode_is_measured(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 16}
    folder = write_enlarged(tmp_path, num_experts_per_tok=4, gates=0.1, experts=2.0, attention=2.0, **shape)
    rows = replay_exact.effect_rows("effect", folder, num_samples=8, prompt_tokens=(4, 12), new_tokens=8)
    found = by_metric(rows)
    moved = "share sent elsewhere than in the rollout"
    assert found[f"R3: {moved}"].peer > 0 and found[f"R3: {moved}"].ours == 0.0
    assert found[f"R2: {moved}"].ours == found[f"R2: {moved}"].peer  # its record is the trainer's own
    assert found["R3: KL(rollout | trainer)"].ratio > 1
    assert found["R2: share sent elsewhere than in the old pass"].ours == 0.0
    assert [row.metric.partition(":")[0] for row in rows] == ["R2", "R3", "R2", "R3", "R2", "R2"]
    assert {row.peer_name for row in rows} == {"disabled"}


def test_a_learner_changes_its_weights_by_what_it_has_learnt(tmp_path: Path) -> None:
    learner = Learner(save_family("qwen3_moe", tmp_path), dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    samples = made_samples(replay_exact.LENGTHS)
    gradients = learner.backward(samples, learner.forward(samples, learns=True)[0])
    learner.update(gradients, lr=1e-3, weight_decay=0.0)
    changes = [float((weight - before[name]).abs().max()) for name, weight in learner.weights.items()]
    assert max(changes) == pytest.approx(1e-3, rel=0.01)
    held = dict(learner.model.named_parameters())
    assert all(torch.equal(held[name], weight.bfloat16()) for name, weight in learner.weights.items())


# Cost


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> replay_cost.Job:
    folder = tmp_path_factory.mktemp("cost")
    write_model(folder / "model", mixture_of_experts=True)
    made = replay_cost.Job(str(folder), str(folder / "model"), 1, num_samples=4, prompt_tokens=4, new_tokens=3)
    made.make_samples()
    return made


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_every_side_does_its_work_in_its_mode(mode: str, job: replay_cost.Job) -> None:
    with replay_cost.open_side(job, mode) as take_step:
        for case in [case for case, modes in replay_cost.MODES.items() if mode in modes]:
            num_tokens = 4 * 3 if case == replay_cost.ROLLOUT else sum(s.num_tokens for s in job.read_samples())
            assert [take_step(case)["amount"] for _ in range(2)] == [num_tokens] * 2


def test_samples_travel_with_their_routes(job: replay_cost.Job) -> None:
    assert all(sample.routes is not None for sample in job.read_samples())
    assert replay_cost.Job.parse(job.dump()) == job
    assert job.vocabulary == VOCABULARY


def test_the_cost_is_that_of_a_step_against_disabled() -> None:
    tallies = {
        mode: Tally(steps=[Step(seconds, 100), Step(seconds, 100)], cpu_s=4 * seconds)
        for mode, seconds in {"disabled": 1.0, "R2": 2.0, "R3": 1.25}.items()
    }
    rows = replay_cost.case_rows(replay_cost.UPDATES, tallies)
    assert [(row.metric, row.ours, row.ratio) for row in rows] == [
        ("R2: s a step", 2.0, 0.5),
        ("R2: CPU s a step", 4.0, 0.5),
        ("R3: s a step", 1.25, 0.8),
        ("R3: CPU s a step", 2.5, 0.8),
    ]


# Size


def test_sizes_are_those_of_the_code_and_of_plain_arrays() -> None:
    rows = replay.size_rows("size 64,8,2", 64, 8, 2, num_tokens=256)
    sizes = {(row.metric, row.peer_name): row for row in rows if row.peer_name}
    for kind in replay.KINDS:
        metric = f"bytes per token, {kind}"
        assert sizes[metric, "uint8"].peer == 16 and sizes[metric, "int32"].peer == 64
        assert sizes[metric, "bound"].peer == pytest.approx(8.0109, abs=1e-4)  # 2 x log2 C(64, 8) / 8
        assert sizes[metric, "bound"].ours < 1.1 * 8.02
    assert sum("MB/s" in row.metric and row.ours > 0 for row in rows) == 4
    wide = replay.size_rows("size 512,10,1", 512, 10, 1, num_tokens=64)
    assert {row.peer_name for row in wide if row.peer_name} == {"bound", "uint16", "int32"}


def test_skewed_routes_are_skewed_in_every_layer_on_its_own() -> None:
    even, skewed = (replay.make_routes(2000, 2, 2, 8, skewed=skewed) for skewed in (False, True))
    assert (even[..., 0] < even[..., 1]).all() and (skewed[..., 0] < skewed[..., 1]).all()
    counts = [np.bincount(skewed[:, layer].ravel(), minlength=8) for layer in range(2)]
    assert all(np.sort(count)[-1] > 3 * np.sort(count)[0] for count in counts)
    assert np.ptp(np.bincount(even.ravel(), minlength=8)) < 300
    assert (np.argsort(counts[0]) != np.argsort(counts[1])).any()


def test_memory_is_that_of_the_whole_batch() -> None:
    rows = replay.memory_rows(num_tokens=64)
    assert [(row.peer_name, row.peer) for row in rows] == [("uint8", 6.0), ("int32", 24.0)]
    assert 3.7 < rows[0].ours < 5.0


# File


@pytest.mark.parametrize(("harm", "seed"), [(replay.cut_off, 3), (replay.flipped, 4)])
def test_what_is_read_of_damaged_files_is_right_and_all_there_is(harm: Any, seed: int) -> None:
    crashes, wrong, lost_elsewhere, readable = replay.damaged("file", harm, 60, seed)
    assert crashes.metric == "crashes, of 60 files"
    assert crashes.ours == wrong.ours == lost_elsewhere.ours == 0
    assert 0.3 < readable.ours < 1


def test_what_is_wrong_with_damaged_files_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "num_wrong", lambda *_: 2)
    monkeypatch.setattr(replay.Recording, "record", lambda *_: (_ for _ in ()).throw(KeyError("id")))
    crashes, *_ = replay.damaged("file", replay.flipped, 3)
    assert crashes.ours == 3
    monkeypatch.setattr(replay.Recording, "record", lambda _, id: replay.make_record(int(id.partition("-")[2])))
    _, wrong, _, readable = replay.damaged("file", lambda whole, _: (whole, 0, 0), 3)
    assert (wrong.ours, readable.ours) == (3 * replay.NUM_SAMPLES * 2, 1.0)


# The whole


def test_only_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(replay_exact, "ranks_rows", lambda _: done.append("FSDP2") or [])
    monkeypatch.setattr(replay_exact, "exact_rows", lambda *_: done.append("family") or [])
    monkeypatch.setattr(replay_exact, "effect_rows", lambda *_, **__: done.append("effect") or [])
    monkeypatch.setattr(replay_cost, "contests", lambda *_: done.append("cost") or {})
    monkeypatch.setattr(replay, "size_rows", lambda case, *_: done.append(case) or [])
    monkeypatch.setattr(replay, "damaged", lambda case, *_: done.append(case) or [])
    for case in ("exact olmoe", "FSDP2", "effect tiny", "size 8,2,32", "file, cut off"):
        replay.run(Options(quick=True, peer="none", case=case))
    assert done == ["family", "FSDP2", "effect", "size 8,2,32", "file, cut off"]
    assert replay.run(Options(case="nothing")) == Outcome([])
    with pytest.raises(UsageError, match="known: none"):
        replay.run(Options(peer="verl"))


def test_the_script_for_the_gpu_runs_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_gpu, "FAMILIES", ("qwen3_moe",))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(replay_gpu, "effect_rows", broken)
    monkeypatch.setattr(sys, "argv", ["replay_gpu", "--device", "cpu", "--small", "--out", str(tmp_path)])
    assert replay_gpu.main() == 1
    found = json.loads((tmp_path / "replay_gpu.json").read_text())
    assert found["environment"]["failed"] == {"effect": "RuntimeError: no memory"}  # the rest is there
    cases = [row["case"] for row in found["rows"]]
    assert list(dict.fromkeys(cases)) == [
        "exact qwen3_moe",
        "cost rollout",
        "cost update, 1 mini-batch",
        "cost update, 4 mini-batches",
    ]


def test_the_large_model_has_the_size_it_is_named_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.models.save_random", lambda _, family, __, **shape: shape | {"model_type": family})
    shape: Any = write_enlarged(tmp_path, **replay_gpu.LARGE["shape"])
    shape = {name: value for name, value in shape.items() if name not in ("change", "device")}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert 1.55e9 < count_weights(load_config(str(tmp_path)), classifier=False) < 1.65e9
