from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from practicum.errors import RolloutError
from practicum.weights import ChannelSettings
from practicum.weights.shm import ShmSender
from tests.weights.sending import assert_same, copied, random_tensors


@pytest.fixture
def sender() -> Iterator[ShmSender]:
    sender = ShmSender(ChannelSettings())
    yield sender
    sender.close()


def test_what_is_being_read_never_changes(sender: ShmSender) -> None:
    first = sender.send(1, random_tensors(1))
    kept = dict(first.read(1.0))  # views, not copies
    second = sender.send(2, random_tensors(2))
    assert_same(kept, random_tensors(1))
    assert_same(copied(second.read(1.0)), random_tensors(2))


def test_the_same_memory_is_filled_again_when_nobody_reads_it(sender: ShmSender) -> None:
    places = set()
    for version in range(4):
        ticket = sender.send(version, random_tensors(version))
        places.add(os.stat(f"/proc/{ticket.pid}/fd/{ticket.fd}").st_ino)
        assert_same(copied(ticket.read(1.0)), random_tensors(version))
    assert len(places) == 1


def test_a_smaller_version_after_a_larger_one(sender: ShmSender) -> None:
    sender.send(1, random_tensors(1))
    few = {"only": torch.arange(5)}
    assert_same(copied(sender.send(2, few.items()).read(1.0)), few.items())


def test_readers_cannot_harm_each_other(sender: ShmSender) -> None:
    ticket = sender.send(1, random_tensors(1))
    for _, tensor in ticket.read(1.0):
        tensor.zero_()
    assert_same(copied(ticket.read(1.0)), random_tensors(1))


def test_a_version_that_was_overwritten_is_gone(sender: ShmSender) -> None:
    first = sender.send(1, random_tensors(1))
    sender.send(2, random_tensors(2))
    with pytest.raises(RolloutError, match=r"version 1 by channel 'shm': .*version 2 is there.*send its weights again"):
        copied(first.read(1.0))


def test_one_that_failed_half_way_is_not_taken_for_whole(sender: ShmSender) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(random_tensors(1))[:5]
        raise RuntimeError("no more")

    ticket = sender.send(1, random_tensors(1))
    with pytest.raises(RuntimeError, match="no more"):
        sender.send(2, failing())
    for version in (1, 2):
        with pytest.raises(RolloutError, match="nothing whole is there"):
            copied(replace(ticket, version=version).read(1.0))
    assert_same(copied(sender.send(2, random_tensors(2)).read(1.0)), random_tensors(2))


def test_a_sender_that_is_gone_or_never_was(sender: ShmSender) -> None:
    ticket = sender.send(1, random_tensors(1))
    with pytest.raises(RolloutError, match="nothing whole is there"):  # its number went to another process
        copied(replace(ticket, sender=b"x" * 16).read(1.0))
    sender.close()
    with pytest.raises(RolloutError, match=rf"process {os.getpid()} that sent them is gone"):
        copied(ticket.read(1.0))


def test_a_sender_that_never_ends_its_writing_is_not_waited_for_beyond_the_deadline(sender: ShmSender) -> None:
    ticket = sender.send(1, random_tensors(1))
    fcntl.flock(ticket.fd, fcntl.LOCK_EX)
    with pytest.raises(RolloutError, match=r"was still writing a later one after 0\.05 s"):
        copied(ticket.read(0.05))
