"""Every channel into every receiver: what has arrived is what was sent, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from practicum.adapters import LoneAdapters, LoraSettings, adapters_alone, add_adapters, merged_weights
from practicum.models import load_model
from practicum.rollout.engine.cpu.runner import CpuRunner
from practicum.rollout.engine.merge import AdapterMerger
from practicum.rollout.engine.model import EngineModel
from practicum.rollout.remote.engine import RemoteRollout
from practicum.weights import CHANNELS, ChannelSettings, WeightReceiver, WeightUpdate, open_sender
from practicum.weights.channel import Tensors
from tests.rollout.asking import run
from tests.weights.sending import DEADLINE_S, assert_same, copied

VERSIONS = range(1, 5)
BUCKETS = (512, 6000)  # each holds a few tensors, or none of the larger ones
LORA = LoraSettings(4, 6)


class FolderServer(RemoteRollout):
    """A server that is told of folders, and reads each at once."""

    _address = _name = None  # type: ignore[assignment]

    def __init__(self, path: Path, adapters: LoneAdapters | None = None) -> None:
        super().__init__(cast(Any, None), model_path=str(path), max_batch=1, adapters=adapters)
        self.is_awake = True
        self.weights: dict[str, Tensor] = {}

    async def _load(self, folder: str, version: int) -> None:
        if self._adapters is None:
            self.weights = copied(load_model(folder).named_parameters())
        else:
            self.weights = load_file(Path(folder) / "adapter_model.safetensors")


FolderServer.__abstractmethods__ = frozenset()


@dataclass
class Learner:
    """The weights that a trainer has, anew with each version, and what receivers make of them."""

    path: Path
    lora: bool = False
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = load_model(str(self.path))
        if self.lora:
            add_adapters(self.model, LORA, seed=0)

    def learn(self, version: int) -> None:
        random = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if not self.lora or ".lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=random))

    def sent(self) -> Iterator[tuple[str, Tensor]]:
        if self.lora:
            return adapters_alone(self.model, torch.Tensor.detach)
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


def sorted_copy(tensors: Tensors) -> dict[str, Tensor]:
    return dict(sorted(copied(tensors).items()))


Taken = Callable[[WeightUpdate], Tensors]


def engine(kind: type[EngineModel]) -> Callable[[Path], Taken]:
    def open_engine(path: Path) -> Taken:
        options: Any = {"max_batch": 2, "cache_gb": 0.01} if kind is CpuRunner else {}
        model = kind(str(path), device=torch.device("cpu"), dtype=torch.float32, **options)

        def take(update: WeightUpdate) -> Tensors:
            model.load_weights(update)
            return model.module.named_parameters()

        return take

    return open_engine


def folder(path: Path) -> Taken:
    server = FolderServer(path)

    def take(update: WeightUpdate) -> Tensors:
        run(server.update_weights(update))
        return server.weights.items()

    return take


RECEIVERS = {"hf": engine(EngineModel), "native": engine(CpuRunner), "folder": folder}


def exchange(channel: str, bucket_bytes: int, tmp_path: Path, learner: Learner, take: Taken) -> Iterator[Tensors]:
    """Send version after version, and yield what each became at the receiver."""
    settings = ChannelSettings(DEADLINE_S, bucket_bytes=bucket_bytes, folder=str(tmp_path / "w"), file_bytes=20_000)
    sender, receiver = open_sender(channel, settings), WeightReceiver(DEADLINE_S, is_whole=not learner.lora)
    with ThreadPoolExecutor(1) as thread:
        for version in VERSIONS:
            learner.learn(version)
            invited = sender.invite(version)
            sending = thread.submit(sender.send, version, learner.sent())
            found = take(receiver.receive(invited or sending.result(DEADLINE_S)))
            assert sending.result(DEADLINE_S).version == receiver.version == version
            yield found
    sender.close()


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("receiver", RECEIVERS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_whole_weights_arrive(channel: str, receiver: str, bucket_bytes: int, tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(tiny_model)
    for found in exchange(channel, bucket_bytes, tmp_path, learner, RECEIVERS[receiver](tiny_model)):
        assert_same(sorted_copy(found), sorted_copy(learner.sent()).items())


@pytest.mark.parametrize("channel", CHANNELS)
def test_adapters_arrive_in_folders(channel: str, tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(tiny_model, lora=True)
    server = FolderServer(tiny_model, LoneAdapters(str(tiny_model), LORA))

    def take(update: WeightUpdate) -> Tensors:
        run(server.update_weights(update))
        return server.weights.items()

    for found in exchange(channel, 512, tmp_path, learner, take):
        assert_same(sorted_copy(found), sorted_copy(learner.sent()).items())


@pytest.mark.parametrize("channel", CHANNELS)
def test_adapters_are_merged_as_they_arrive(channel: str, tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(tiny_model, lora=True)
    merger = AdapterMerger(LoneAdapters(str(tiny_model), LORA), torch.device("cpu"), torch.float32)
    for found in exchange(
        channel, 512, tmp_path, learner, lambda update: copied(merger.merged(update).tensors).items()
    ):
        merged = dict(merged_weights(learner.model, torch.Tensor.detach))
        assert found
        for name, tensor in found:
            assert torch.equal(tensor, merged[name]), name
