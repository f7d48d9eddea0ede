"""The learner on its own: what an update changes must not depend on how the work is divided."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.controller import (
    FusedWorker,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerGroup,
)
from practicum.errors import RolloutError, TrainingError, WeightsGone, WorkerError
from practicum.models import DTYPES, load_model, load_tokenizer
from practicum.replay import Recording, ReplaySettings
from practicum.train import ActorWorker, UpdateStats
from practicum.types import Sample, Score
from practicum.weights import TIGHTEST, Bound, ChannelSettings, Fingerprint, WeightReceiver, choose
from practicum.weights.fingerprint import make_sequences, measure
from tests.models import save_small
from tests.samples import make_sample, with_routes
from tests.train.actors import mini_batches, settings
from tests.train.test_model import tiny

BOUNDS = {"float32": TIGHTEST, "bfloat16": Bound(mean=0.05, largest=0.5)}
SAMPLES = [
    make_sample(2 + i % 3, 1 + i % 7, advantage=(-1.0) ** i * (0.5 + i % 2), seed=i, id=f"1/{i}/0") for i in range(13)
]

SCORED = [replace(sample, score=Score(1.0)) for sample in SAMPLES]
ROUTED = [with_routes(sample, 2, 2, 8) for sample in SCORED]


def updated(
    group: WorkerGroup[ActorWorker],
    folder: Path,
    budget: int,
    parts: int = 1,
    steps: int = 2,
    samples: Sequence[Sample] = SAMPLES,
) -> tuple[UpdateStats, dict[str, torch.Tensor]]:
    for step in range(1, steps + 1):
        batch = [replace(sample, id=f"{step}/{i}/0") for i, sample in enumerate(samples)]
        stats = group.map(ActorWorker.update, mini_batches(batch, group.world_size, budget, parts), step)
    folder.mkdir()
    group.execute_all(ActorWorker.save, str(folder))
    return UpdateStats.combined(stats), dict(load_model(str(folder / "model")).named_parameters())


def on_one_rank(
    model: Path,
    folder: Path,
    budget: int = 200,
    parts: int = 1,
    samples: Sequence[Sample] = SAMPLES,
    **changes: Any,
) -> tuple[UpdateStats, dict[str, torch.Tensor]]:
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(model, **changes)), name="actor")
    try:
        return updated(group, folder, budget, parts, samples=samples)
    finally:
        group.shutdown()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    assert first.keys() == second.keys()
    for name in first:
        # AdamW turns tiny gradients into full steps, so rounding shows in a few weights; the update itself is 2e-3.
        assert (first[name] - second[name]).abs().max() <= tolerance, name


def test_an_update_does_not_depend_on_the_micro_batches(tiny_model: Path, tmp_path: Path) -> None:
    one, weights = on_one_rank(tiny_model, tmp_path / "one", budget=200)
    many, same_weights = on_one_rank(tiny_model, tmp_path / "many", budget=12)
    assert_same(weights, same_weights)
    assert many.loss == pytest.approx(one.loss, rel=1e-4)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert many.num_tokens == one.num_tokens == sum(len(s.token_ids) for s in SAMPLES)
    before = dict(load_model(str(tiny_model)).named_parameters())
    assert max((weights[name] - before[name]).abs().max().item() for name in weights) > 1e-3


def test_nor_on_gradient_checkpointing(tiny_model: Path, tmp_path: Path) -> None:
    _, plain = on_one_rank(tiny_model, tmp_path / "plain")
    _, saving = on_one_rank(tiny_model, tmp_path / "saving", gradient_checkpointing=True)
    assert_same(plain, saving)


@pytest.mark.slow
def test_nor_on_the_number_of_ranks(tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    one, weights = on_one_rank(tiny_model, tmp_path / "one", budget=40, parts=2)
    with RayResourcePool([2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actors")
        try:
            two, same_weights = updated(group, tmp_path / "two", budget=40, parts=2)
        finally:
            group.shutdown()
    assert_same(weights, same_weights)
    assert two.num_tokens == one.num_tokens
    for field in ("loss", "entropy", "rollout_kl", "rollout_gap", "grad_norm"):
        assert getattr(two, field) == pytest.approx(getattr(one, field), rel=1e-4, abs=1e-5), field


# Router replay


def replayed(mode: str, folder: Path) -> dict[str, Any]:
    """What a learner is told and given for it."""
    if mode == "R3":
        return {"replay": ReplaySettings("R3", compare_every=1), "samples": ROUTED}
    return {"replay": ReplaySettings("R2", record_file=str(folder / "routes.rec"), compare_every=1), "samples": SCORED}


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replay_does_not_depend_on_how_the_work_is_divided(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for name, changes in {
        "one": {"budget": 200},
        "many": {"budget": 12},
        "saving": {"budget": 30, "gradient_checkpointing": True},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        found[name] = on_one_rank(tiny_model, folder / "run", parts=2, **replayed(mode, folder), **changes)
    for name in ("many", "saving"):
        assert_same(found["one"][1], found[name][1], tolerance=1e-4)  # after four updates
        assert found[name][0].loss == pytest.approx(found["one"][0].loss, rel=1e-3, abs=1e-5)
    stats = found["one"][0].replay
    assert stats is not None and list(stats.layers) == [0, 1]
    num_tokens = sum(item.num_tokens for item in SAMPLES)
    assert stats.num_rows == stats.num_recorded == num_tokens
    assert stats.num_known == num_tokens - (len(SAMPLES) if mode == "R3" else 0)
    assert (stats.num_compared > 0) == (mode == "R3")
    if mode == "R3":  # random experts: nearly every row is sent elsewhere
        assert all(share > 0.8 * stats.num_known for share in stats.differing)
        assert stats.kl_with != stats.kl_without


def test_experts_that_were_recorded_decide_what_is_learnt(tiny_model: Path, tmp_path: Path) -> None:
    _, plain = on_one_rank(tiny_model, tmp_path / "plain")
    _, forced = on_one_rank(tiny_model, tmp_path / "forced", samples=ROUTED, replay=ReplaySettings("R3"))
    assert max((plain[name] - forced[name]).abs().max().item() for name in plain) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_two_ranks_replay_as_one(mode: str, tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    told = replayed(mode, tmp_path / "one")
    one, weights = on_one_rank(tiny_model, tmp_path / "one" / "run", budget=40, parts=2, **told)
    told = replayed(mode, tmp_path / "two")
    samples = told.pop("samples")
    with RayResourcePool([2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, settings(tiny_model, **told)), name="actors")
        try:
            two, same_weights = updated(group, tmp_path / "two" / "run", budget=40, parts=2, samples=samples)
        finally:
            group.shutdown()
    assert_same(weights, same_weights, tolerance=1e-4)
    assert one.replay is not None and two.replay is not None
    for field in ("num_rows", "num_known", "num_recorded"):
        assert getattr(two.replay, field) == getattr(one.replay, field)
    if mode == "R2":
        recording = Recording(tmp_path / "two" / "routes.rec")
        assert len(recording) == 2 * len(SAMPLES)
        assert [sample.id for sample in recording.samples(2)] == [f"2/{i}/0" for i in range(len(SAMPLES))]


def test_several_updates_a_step_use_the_log_probs_from_before_it(tiny_model: Path, tmp_path: Path) -> None:
    stats, _ = on_one_rank(tiny_model, tmp_path / "run", parts=3, lr=2e-2)
    assert stats.clipped > 0
    single, _ = on_one_rank(tiny_model, tmp_path / "single", parts=1, lr=2e-2)
    assert single.clipped == 0


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "mamba"])
def test_families_of_every_kind_learn(family: str, tiny_model: Path, tmp_path: Path) -> None:
    """Learned positions; experts and attention sinks; no attention at all, and layers named inside one another."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "model")
    stats, weights = on_one_rank(tmp_path / "model", tmp_path / "saved", budget=40)
    assert 0 < stats.grad_norm < float("inf")
    assert any(not torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_a_gradient_that_is_no_number_changes_nothing(tiny_model: Path) -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actor")
    try:
        before = {name: tensor.clone() for name, tensor in group.execute_all(ActorWorker.publish, 0)[0].tensors}
        with pytest.raises(WorkerError, match="the gradient of update 1 is nan") as caught:
            group.map(ActorWorker.update, mini_batches([make_sample(advantage=float("nan"), id="1/0/0")], 1, 200))
        assert isinstance(caught.value.cause, TrainingError)
        after = dict(group.execute_all(ActorWorker.publish, 0)[0].tensors)
        assert all(torch.equal(before[name], after[name]) for name in before)
    finally:
        group.shutdown()


def test_a_start_that_fails_leaves_nothing_behind_in_this_process(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "tokenizer.json").unlink()
    roles = {
        "actor": RayClassWithInitArgs(ActorWorker, settings(tiny_model)),
        "second": RayClassWithInitArgs(ActorWorker, settings(broken)),
    }
    with pytest.raises(WorkerError):
        LocalWorkerGroup(RayClassWithInitArgs(FusedWorker, **roles), name="fused")
    LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actor").shutdown()


def test_good_answers_become_likelier(tiny_model: Path) -> None:
    samples = [make_sample(3, 4, advantage=1.0 if i < 4 else -1.0, seed=i, id=f"1/{i}/0") for i in range(8)]
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model, num_updates=100)), name="actor")
    try:
        first = group.map(ActorWorker.update, mini_batches(samples[:4], 1, 200))[0]
        for _ in range(5):
            group.map(ActorWorker.update, mini_batches(samples, 1, 200))
        # The learner's gap to the fixed "rollout" log-probs tells how its own have moved.
        good = group.map(ActorWorker.update, mini_batches(samples[:4], 1, 200))[0]
    finally:
        group.shutdown()
    assert good.rollout_kl < first.rollout_kl


def test_a_restored_learner_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    packed = RayClassWithInitArgs(ActorWorker, settings(tiny_model))
    group = LocalWorkerGroup(packed, name="actor")
    updated(group, tmp_path / "saved", budget=40)
    stats, weights = updated(group, tmp_path / "straight", budget=40)
    group.shutdown()
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tmp_path / "saved" / "model")), name="restored")
    group.execute_all(ActorWorker.load, str(tmp_path / "saved"))
    again, same_weights = updated(group, tmp_path / "resumed", budget=40)
    group.shutdown()
    assert again == stats
    assert_same(weights, same_weights, tolerance=0.0)


def alone(model: Any, sequences: Sequence[Any]) -> list[np.ndarray]:
    """Log-probs by one plain pass over each sequence."""
    found = []
    for ids in sequences:
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_sent_in_the_engines_dtype_and_log_probs_prove_them(dtype: str, tiny_model: Path) -> None:
    changes = {"temperature": 0.7, "compute_dtype": dtype}  # the temperature is for samples only
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model, **changes)), name="actor")
    fingerprint = Fingerprint(18, BOUNDS[dtype])
    try:
        group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
        (expected,) = group.execute_all(ActorWorker.log_probs, fingerprint.sequences)
        group.execute_all(
            ActorWorker.open_channel, choose(group.execute_all(ActorWorker.place)[0], []), ChannelSettings()
        )
        (invited,), (ticket,) = group.execute_all(ActorWorker.invite, 1), group.execute_all(ActorWorker.send, 1, dtype)
        assert invited is None
        engine = load_model(str(tiny_model), DTYPES[dtype]).eval()
        taken = {name: tensor.clone() for name, tensor in WeightReceiver().receive(ticket).tensors}
        assert {tensor.dtype for tensor in taken.values()} == {DTYPES[dtype]}
        with pytest.raises(RolloutError, match="is not the model"):
            fingerprint.compare("stale", 1, expected, alone(load_model(str(tiny_model)).eval(), fingerprint.sequences))
        parameters = dict(engine.named_parameters())
        assert parameters.keys() == taken.keys()
        for name, parameter in parameters.items():
            parameter.data.copy_(taken[name])
        fingerprint.compare("engine", 1, expected, alone(engine, fingerprint.sequences))
    finally:
        group.shutdown()


def test_a_version_can_be_sent_again_until_something_is_learnt(tiny_model: Path) -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actor")
    try:
        group.execute_all(ActorWorker.open_channel, "shm", ChannelSettings())
        for _ in range(2):
            assert group.execute_all(ActorWorker.send, 1)[0] is not None
        group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
        for call in (ActorWorker.invite, ActorWorker.send):
            with pytest.raises(WorkerError, match="there have been 1 updates since") as refused:
                group.execute_all(call, 1)
            assert isinstance(refused.value.cause, WeightsGone)
        assert group.execute_all(ActorWorker.send, 2)[0] is not None
    finally:
        group.shutdown()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_moe, tied", "mixtral", "deepseek_v3"])
def test_names_are_those_of_an_engines_model_and_a_version_on_disk_is_a_model(family: str, tmp_path: Path) -> None:
    model = save_small(family, tmp_path / "model")
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(model)), name="actor")
    try:
        group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
        group.execute_all(ActorWorker.open_channel, "disk", ChannelSettings(folder=str(tmp_path / "weights")))
        (ticket,) = group.execute_all(ActorWorker.send, 1)
        (expected,) = group.execute_all(ActorWorker.log_probs, make_sequences(18))
    finally:
        group.shutdown()
    engine, served = load_model(str(model)).eval(), load_model(ticket.path).eval()
    parameters = dict(engine.named_parameters())
    for name, tensor in WeightReceiver().receive(ticket).tensors:
        parameters.pop(name).data.copy_(tensor)
    assert not parameters
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, engine.state_dict()[name]), name
    load_tokenizer(ticket.path)
    gap = measure(expected, alone(served, make_sequences(18)))
    assert gap is not None and gap.is_within(BOUNDS["float32"])


@pytest.mark.slow
def test_several_ranks_send_and_tell_together(tiny_model: Path, ray_session: None) -> None:
    changes = {"compute_dtype": "bfloat16"}
    sequences = make_sequences(18)
    with RayResourcePool([2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, settings(tiny_model, **changes)), name="actors")
        try:
            group.execute_all(ActorWorker.open_channel, "shm", ChannelSettings())
            first, second = group.execute_all(ActorWorker.log_probs, sequences)
            ticket, nothing = group.execute_all(ActorWorker.send, 1)
            assert nothing is None
            sent = {name: tensor.clone() for name, tensor in WeightReceiver().receive(ticket).tensors}
            group.execute_all(ActorWorker.open_channel, "collective", ChannelSettings(timeout_s=0.5))
            group.execute_all(ActorWorker.invite, 2)
            with pytest.raises(
                WorkerError, match="only 0 of 1 receivers came"
            ):  # and the other rank is not left waiting
                group.execute_all(ActorWorker.send, 2)
            again, _ = group.execute_all(ActorWorker.log_probs, sequences)
        finally:
            group.shutdown()
    model = load_model(str(tiny_model))
    for name, parameter in model.named_parameters():  # whole, and in float32: not what was gathered to compute with
        assert torch.equal(sent.pop(name), parameter), name
    assert not sent
    for own, other, later in zip(first, second, again, strict=True):
        assert (own == other).all() and (own == later).all()
    gap = measure(first, alone(model.to(torch.bfloat16).eval(), sequences))
    assert gap is not None and gap.is_within(BOUNDS["bfloat16"])


def test_published_weights_are_the_learners_own_memory(tiny_model: Path) -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actor")
    try:
        (update,) = group.execute_all(ActorWorker.publish, 1)
        assert update.shared and update.version == 1
        tensors = dict(update.tensors)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
        assert any(not torch.equal(before[name], tensors[name]) for name in tensors)
    finally:
        group.shutdown()
