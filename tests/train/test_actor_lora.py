"""The learner with adapters: the same promises as without, and a reference that takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from practicum.adapters import LoraSettings
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerGroup
from practicum.errors import ModelError, WorkerError
from practicum.models import load_model
from practicum.train import ActorWorker, ReferenceWorker
from practicum.train import actor as actor_module
from practicum.weights import ChannelSettings, WeightReceiver
from practicum.weights.fingerprint import make_sequences
from tests.models import save_small
from tests.train.test_actor import (
    SAMPLES,
    SCORED,
    alone,
    assert_same,
    mini_batches,
    on_one_rank,
    replayed,
    settings,
    updated,
)
from tests.train.test_reference import reference

LORA = LoraSettings(4, 8)
LEARNS: dict[str, Any] = {"lora": LORA, "lr": 1e-2}


@contextmanager
def one_actor(model: Path, **changes: Any) -> Iterator[WorkerGroup[ActorWorker]]:
    packed = RayClassWithInitArgs(ActorWorker, settings(model, **{**LEARNS, **changes}))
    group = LocalWorkerGroup(packed, name="actor")
    try:
        yield group
    finally:
        group.shutdown()


def assert_engine_agrees(group: WorkerGroup[ActorWorker], model: Path, version: int) -> None:
    """A plain model with the published weights tells the trainer's log-probs."""
    sequences = make_sequences(18)
    engine = load_model(str(model)).eval()
    parameters = dict(engine.named_parameters())
    (update,) = group.execute_all(ActorWorker.publish, version)
    assert not update.shared
    for name, tensor in update.tensors:
        parameters.pop(name).data.copy_(tensor)
    assert not parameters
    (expected,) = group.execute_all(ActorWorker.log_probs, sequences)
    for own, other in zip(expected, alone(engine, sequences), strict=True):
        assert abs(own - other).max() < 2e-5


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_moe, tied", "mixtral", "deepseek_v3"])
def test_engines_get_merged_weights_and_nothing_drifts(family: str, tmp_path: Path) -> None:
    path = save_small(family, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in load_model(str(path)).named_parameters()}
    with one_actor(path) as group:
        for version in range(1, 6):
            group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
            assert_engine_agrees(group, path, version)
        changed = {
            name for name, t in group.execute_all(ActorWorker.publish, 6)[0].tensors if (t != before[name]).any()
        }
    assert changed and all(name.endswith("_proj.weight") or "_proj" in name for name in changed)


def test_however_often_weights_were_published_they_are_the_base_and_its_adapters(
    tiny_model: Path, tmp_path: Path
) -> None:
    with one_actor(tiny_model) as group:
        for version in range(4):
            group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
            published = {name: t.clone() for name, t in group.execute_all(ActorWorker.publish, version)[0].tensors}
        group.execute_all(ActorWorker.save, str(tmp_path))
    assert_same(published, dict(load_model(str(tmp_path / "model")).named_parameters()), tolerance=0.0)


@pytest.mark.parametrize("channel", ["shm", "disk"])
def test_adapters_sent_alone_are_all_that_travels(tiny_model: Path, tmp_path: Path, channel: str) -> None:
    whole = sum(parameter.nbytes for parameter in load_model(str(tiny_model)).parameters())
    with one_actor(tiny_model, sends_adapters=True) as group:
        group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200))
        group.execute_all(ActorWorker.open_channel, channel, ChannelSettings(folder=str(tmp_path / "weights")))
        (ticket,) = group.execute_all(ActorWorker.send, 1, "bfloat16")
        received = WeightReceiver().receive(ticket)
        sent = {name: tensor.clone() for name, tensor in received.tensors}
        group.execute_all(ActorWorker.save, str(tmp_path))
    saved = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert_same(saved, sent, tolerance=0.0)
    assert sum(tensor.nbytes for tensor in sent.values()) < whole / 10


def test_an_update_does_not_depend_on_how_the_work_is_divided(tiny_model: Path, tmp_path: Path) -> None:
    one, weights = on_one_rank(tiny_model, tmp_path / "one", budget=200, lora=LORA)
    for name, changes in {"many": {"budget": 12}, "saving": {"gradient_checkpointing": True}}.items():
        other, same_weights = on_one_rank(tiny_model, tmp_path / name, lora=LORA, **changes)
        assert_same(weights, same_weights, tolerance=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    before = dict(load_model(str(tiny_model)).named_parameters())
    assert max((weights[name] - before[name]).abs().max().item() for name in weights) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "R3"])
def test_nor_on_the_number_of_ranks(mode: str, tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    told: dict[str, Any] = {} if mode == "disabled" else replayed(mode, tmp_path)
    samples = told.pop("samples", SAMPLES)
    one, weights = on_one_rank(tiny_model, tmp_path / "one", budget=40, parts=2, samples=samples, lora=LORA, **told)
    with RayResourcePool([2]) as pool:
        packed = RayClassWithInitArgs(ActorWorker, settings(tiny_model, lora=LORA, **told))
        group = RayWorkerGroup(pool, packed, name="actors")
        try:
            two, same_weights = updated(group, tmp_path / "two", budget=40, parts=2, samples=samples)
            said = group.map(ActorWorker.base_log_probs, mini_batches(SCORED, 2, 40))
            group.execute_all(ActorWorker.open_channel, "shm", ChannelSettings())
            ticket, _ = group.execute_all(ActorWorker.send, 1, "bfloat16")
            sent = {name: tensor.clone() for name, tensor in WeightReceiver().receive(ticket).tensors}
        finally:
            group.shutdown()
    assert_same(weights, same_weights, tolerance=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for name, parameter in same_weights.items():
        assert torch.equal(sent.pop(name), parameter.detach().bfloat16()), name
    assert not sent
    with reference(tiny_model) as other:
        (apart,) = other.map(ReferenceWorker.log_probs, mini_batches(SCORED, 1, 40))
    together = {id: array for rank in said for id, array in rank.items()}
    assert together.keys() == apart.keys()
    assert all(abs(together[id] - apart[id]).max() < 1e-5 for id in apart)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_is_the_model_without_adapters_and_no_second_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    with reference(tiny_model) as group:
        (expected,) = group.map(ReferenceWorker.log_probs, mini_batches(SCORED, 1, 40))
    loaded: list[str] = []
    monkeypatch.setattr(actor_module, "load_model", lambda path: loaded.append(path) or load_model(path))
    with one_actor(tiny_model, gradient_checkpointing=checkpointing) as group:
        for step in range(3):  # first before anything is learnt
            (said,) = group.map(ActorWorker.base_log_probs, mini_batches(SCORED, 1, 40))
            assert said.keys() == expected.keys()
            assert all(abs(said[id] - expected[id]).max() < 1e-6 for id in said)
            (stats,) = group.map(ActorWorker.update, mini_batches(SCORED, 1, 40), step + 1)
            assert stats.grad_norm > 0  # adapters learn after a look without them
    assert loaded == [str(tiny_model)]


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_experts_are_replayed_in_a_model_with_adapters(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for name, changes in {"one": {}, "saving": {"budget": 30, "gradient_checkpointing": True}}.items():
        folder = tmp_path / name
        folder.mkdir()
        told = replayed(mode, folder)
        found[name] = on_one_rank(tiny_model, folder / "run", parts=2, lora=LORA, **told, **changes)
    assert_same(found["one"][1], found["saving"][1], tolerance=1e-4)
    stats = found["one"][0].replay
    assert stats is not None and list(stats.layers) == [0, 1]
    num_tokens = sum(item.num_tokens for item in SAMPLES)
    assert stats.num_rows == num_tokens and stats.num_known > 0
    if mode == "R3":
        assert all(share > 0.8 * stats.num_known for share in stats.differing)


def test_a_restored_learner_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    with one_actor(tiny_model) as group:
        updated(group, tmp_path / "saved", budget=40)
        stats, weights = updated(group, tmp_path / "straight", budget=40)
    folder = tmp_path / "saved"
    with one_actor(tiny_model, adapters_path=str(folder / "model")) as group:
        group.execute_all(ActorWorker.load, str(folder))
        again, same_weights = updated(group, tmp_path / "resumed", budget=40)
    assert again == stats
    assert_same(weights, same_weights, tolerance=0.0)
    whole = sum(parameter.numel() * 4 for parameter in load_model(str(tiny_model)).parameters())
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < whole / 10
    assert (folder / "optimizer.pt").stat().st_size < whole / 5


def test_adapters_that_do_not_fit_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with one_actor(tiny_model) as group:
        updated(group, tmp_path / "saved", budget=40, steps=1)
    with (
        pytest.raises(WorkerError, match=r"not those of actor.lora") as refused,
        one_actor(tiny_model, lora=LoraSettings(4, 8, ("q_proj",)), adapters_path=str(tmp_path / "saved" / "model")),
    ):
        pass
    assert isinstance(refused.value.cause, ModelError)


def test_a_version_on_disk_is_a_plain_model(tiny_model: Path, tmp_path: Path) -> None:
    with one_actor(tiny_model) as group:
        _, learnt = updated(group, tmp_path / "saved", budget=40)
        group.execute_all(ActorWorker.open_channel, "disk", ChannelSettings(folder=str(tmp_path / "weights")))
        (ticket,) = group.execute_all(ActorWorker.send, 1)
        served = dict(load_model(ticket.path).named_parameters())
    assert_same(learnt, served, tolerance=0.0)
