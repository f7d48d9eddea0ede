"""What holds for every channel, between real processes."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from practicum.errors import ConfigError, RolloutError
from practicum.weights import CHANNELS, ChannelSettings, Place, WeightReceiver, choose, open_sender
from tests.weights.sending import (
    DEADLINE_S,
    REMOTE,
    TrainerProcess,
    assert_same,
    copied,
    killed_in_the_midst,
    random_tensors,
)


def settings(tmp_path: Path, **changes: object) -> ChannelSettings:
    fields = {"timeout_s": DEADLINE_S, "bucket_bytes": 4096, "file_bytes": 20_000, "folder": str(tmp_path / "weights")}
    return ChannelSettings(**{**fields, **changes})  # type: ignore[arg-type]


def mapped_weights() -> list[str]:
    """What this process still holds of a sender's memory, which has no name and goes with those who hold it."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "practicum-weights" in line]


@pytest.mark.parametrize("channel", REMOTE)
def test_weights_arrive_bit_for_bit_version_after_version(channel: str, tmp_path: Path) -> None:
    receiver = WeightReceiver(DEADLINE_S)
    with TrainerProcess(channel, settings(tmp_path)) as trainer:
        for version in (1, 2, 5):
            update, sending = trainer.pass_on(receiver, version, random_tensors, version)
            assert update.version == version and not update.shared
            assert_same(copied(update.tensors), random_tensors(version))
            ticket = sending.result(DEADLINE_S)
            assert ticket.version == receiver.version == version and ticket.channel == channel
            assert len(pickle.dumps(ticket)) < 500
    assert not mapped_weights()


@pytest.mark.parametrize("channel", REMOTE)
def test_several_engines_take_the_same_version(channel: str, tmp_path: Path) -> None:
    receivers = [WeightReceiver(DEADLINE_S) for _ in range(3)]
    with TrainerProcess(channel, settings(tmp_path, num_receivers=3)) as trainer, ThreadPoolExecutor(3) as threads:
        for version in (1, 2):
            invited = trainer.invite(version)
            sending = trainer.send(version, random_tensors, version)
            ticket = invited or sending.result(DEADLINE_S)
            taken = threads.map(lambda receiver, ticket=ticket: copied(receiver.receive(ticket).tensors), receivers)
            for found in taken:
                assert_same(found, random_tensors(version))
            sending.result(DEADLINE_S)


@pytest.mark.parametrize("channel", REMOTE)
def test_an_older_version_is_refused_by_both_ends(channel: str, tmp_path: Path) -> None:
    receiver = WeightReceiver(DEADLINE_S)
    with TrainerProcess(channel, settings(tmp_path)) as trainer:
        update, sending = trainer.pass_on(receiver, 7, random_tensors, 7)
        copied(update.tensors)
        older = replace(sending.result(DEADLINE_S), version=6)
        with pytest.raises(RolloutError, match=rf"version 6 by channel '{channel}': this engine has version 7"):
            receiver.receive(older)
        trainer.invite(6)
        with pytest.raises(RolloutError, match="version 7 has been"):
            trainer.send(6, random_tensors, 6).result(DEADLINE_S)
        update, sending = trainer.pass_on(receiver, 7, random_tensors, 7)  # once more: an engine may ask again
        assert_same(copied(update.tensors), random_tensors(7))


@pytest.mark.parametrize("channel", REMOTE)
def test_a_trainer_killed_in_the_midst_is_an_error_in_time_and_leaves_nothing(channel: str, tmp_path: Path) -> None:
    receiver = WeightReceiver(timeout_s=5.0)
    with TrainerProcess(channel, settings(tmp_path)) as trainer:
        update, sending = trainer.pass_on(receiver, 1, random_tensors, 1)
        copied(update.tensors)
        ticket = sending.result(DEADLINE_S)
        invited = trainer.invite(2)
        sending = trainer.send(2, killed_in_the_midst, 2)
        began_s = time.monotonic()
        if channel == "disk":  # what was whole stays
            with pytest.raises(EOFError):
                sending.result(DEADLINE_S)
            assert_same(copied(receiver.receive(ticket).tensors), random_tensors(1))
        else:
            with pytest.raises(RolloutError, match=f"by channel '{channel}': .*gone"):
                if invited is None:
                    trainer.process.join(DEADLINE_S)
                copied(receiver.receive(invited or ticket).tensors)
        assert time.monotonic() - began_s < 30
        assert receiver.version == 1
    assert not mapped_weights()
    open_sender(channel, settings(tmp_path)).close()  # the next one tidies up
    if channel == "disk":
        assert os.listdir(tmp_path / "weights") == ["version-000001"]


def test_in_one_process_they_are_the_trainers_own() -> None:
    own = copied(random_tensors(1))
    sender, receiver = open_sender("shared", ChannelSettings()), WeightReceiver()
    update = receiver.receive(sender.send(3, own.items()))
    assert update.shared
    assert all(tensor is own[name] for name, tensor in update.tensors)
    assert receiver.version == 3


def test_one_that_was_broken_off_does_not_count(tmp_path: Path) -> None:
    sender, receiver = open_sender("shm", settings(tmp_path)), WeightReceiver()
    ticket = sender.send(4, random_tensors(4))
    name, first = next(iter(receiver.receive(ticket).tensors))
    assert name == "embedding" and mapped_weights()
    del first
    assert not mapped_weights()
    assert receiver.version == -1
    assert_same(copied(receiver.receive(ticket).tensors), random_tensors(4))
    assert receiver.version == 4
    sender.close()


@pytest.mark.parametrize("channel", ["shared", "shm", "disk"])
def test_an_update_without_a_tensor_is_an_error(channel: str, tmp_path: Path) -> None:
    sender = open_sender(channel, settings(tmp_path))
    with pytest.raises(RolloutError, match="not one tensor"):
        copied(WeightReceiver().receive(sender.send(1, [])).tensors)
    sender.close()


def test_an_unknown_channel_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no weight channel 'pigeon'; there are shared, shm, collective, disk"):
        open_sender("pigeon", ChannelSettings())


def test_the_shortest_way_is_chosen_by_placement() -> None:
    here = Place.here()
    beside, elsewhere = Place(here.machine, here.pid + 1), Place("another", here.pid)
    assert choose(here, [here, here]) == "shared"
    assert choose(here, [here, beside]) == "shm"
    assert choose(here, [beside, elsewhere]) == choose(here, [elsewhere]) == "collective"
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(Place.here).result() == here
    assert all(name in CHANNELS for name in ("shared", "shm", "collective"))


def test_tensors_keep_their_dtype(tmp_path: Path) -> None:
    sender = open_sender("shm", settings(tmp_path))
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(2).half()}
    found = copied(WeightReceiver().receive(sender.send(1, tensors.items())).tensors)
    assert [tensor.dtype for tensor in found.values()] == [torch.bfloat16, torch.float16]
    sender.close()
