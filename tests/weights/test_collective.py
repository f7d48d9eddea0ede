from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist

from practicum.errors import RolloutError
from practicum.weights import ChannelSettings
from practicum.weights.collective import CollectiveSender
from tests.weights.sending import assert_same, copied, random_tensors


def make(timeout_s: float = 30.0, num_receivers: int = 1, bucket_bytes: int = 4096) -> CollectiveSender:
    return CollectiveSender(ChannelSettings(timeout_s, num_receivers, bucket_bytes=bucket_bytes))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_torchs_default_group_is_left_alone(threads: ThreadPoolExecutor) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sender = make()
        ticket = sender.invite(1)
        sending = threads.submit(sender.send, 1, random_tensors(1))
        assert_same(copied(ticket.read(30.0)), random_tensors(1))
        sending.result(30)
        own = torch.ones(3)
        dist.all_reduce(own)
        assert own.sum() == 3
    finally:
        dist.destroy_process_group()


def test_no_more_than_a_bucket_is_ahead_of_the_engine(threads: ThreadPoolExecutor) -> None:
    """The trainer gathers tensors as engines take them, and engines hold one bucket at a time."""
    num, size = 64, 1 << 20
    made: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(num):
            made.append(index)
            yield f"{index}", torch.full((size // 4,), float(index))

    sender = make(bucket_bytes=2 * size)
    ticket = sender.invite(1)
    sending = threads.submit(sender.send, 1, tensors())
    places = set()
    for index, (name, tensor) in enumerate(ticket.read(30.0)):
        if index == 0:
            time.sleep(0.3)  # it would be through by now
            assert len(made) < num // 2
        assert name == str(index) and (tensor == index).all()
        places.add(tensor.data_ptr())
    sending.result(30)
    assert len(made) == num and len(places) == 2


def test_nobody_comes(threads: ThreadPoolExecutor) -> None:
    sender = make(timeout_s=0.3, num_receivers=2)
    ticket = sender.invite(1)
    reading = threads.submit(lambda: copied(ticket.read(0.3)))
    with pytest.raises(RolloutError, match=r"version 1 .*'collective': only 1 of 2 receivers came within 0\.3 s"):
        sender.send(1, random_tensors(1))
    with pytest.raises(RolloutError, match="only 1 of 2"):
        reading.result(30)
    ticket = sender.invite(1, num_receivers=1)  # the other engine is no more
    reading = threads.submit(lambda: copied(ticket.read(30.0)))
    sender.send(1, random_tensors(1))
    assert_same(reading.result(30), random_tensors(1))


def test_the_trainer_never_sends() -> None:
    ticket = make().invite(1)
    with pytest.raises(RolloutError, match=r"not all was there after|the trainer"):
        copied(ticket.read(0.5))


def test_a_trainer_that_cannot_be_reached() -> None:
    ticket = replace(make().invite(1), port=1)
    with pytest.raises(RolloutError, match=r"the trainer at 127\.0\.0\.1:1 cannot be reached"):
        copied(ticket.read(1.0))


def test_an_engine_that_gives_up_is_heard_of_and_the_next_version_arrives(threads: ThreadPoolExecutor) -> None:
    sender = make()
    ticket = sender.invite(1)
    sending = threads.submit(sender.send, 1, random_tensors(1))
    reading = ticket.read(30.0)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match="a receiver is gone or gave up"):
        sending.result(20)
    ticket = sender.invite(2)
    sending = threads.submit(sender.send, 2, random_tensors(2))
    assert_same(copied(ticket.read(30.0)), random_tensors(2))
    sending.result(30)


def test_one_engine_too_many(threads: ThreadPoolExecutor) -> None:
    sender = make()
    ticket = sender.invite(1)
    sending = threads.submit(sender.send, 1, random_tensors(1))
    reading = ticket.read(30.0)
    first = dict([next(reading)])
    with pytest.raises(RolloutError, match="all 1 receivers that were invited had come"):
        copied(ticket.read(30.0))
    assert_same(first | copied(reading), random_tensors(1))
    sending.result(30)
    with pytest.raises(RolloutError, match="cannot be reached"):
        copied(ticket.read(30.0))


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_one_address_and_only_while_a_version_is_on_its_way(threads: ThreadPoolExecutor) -> None:
    before = listening()
    sender = make()
    assert listening() == before
    ticket = sender.invite(1)
    assert listening() - before == {("127.0.0.1", ticket.port)}
    sending = threads.submit(sender.send, 1, random_tensors(1))
    assert_same(copied(ticket.read(30.0)), random_tensors(1))
    sending.result(30)
    assert ("127.0.0.1", ticket.port) not in listening()


def test_an_engine_that_takes_too_long(threads: ThreadPoolExecutor) -> None:
    sender = make(timeout_s=1.0, bucket_bytes=1 << 20)
    ticket = sender.invite(1)
    large = ((f"{i}", torch.zeros(1 << 20)) for i in range(64))
    sending = threads.submit(sender.send, 1, large)
    reading = ticket.read(30.0)
    next(reading)
    with pytest.raises(RolloutError, match="not all was there after 1 s"):
        sending.result(20)
    with pytest.raises(RolloutError, match="the trainer or another receiver is gone or gave up"):
        copied(reading)


def test_sending_without_an_invitation_is_refused() -> None:
    with pytest.raises(RolloutError, match="call invite first"):
        make().send(1, random_tensors(1))


def test_what_is_called_off_is_not_waited_for(threads: ThreadPoolExecutor) -> None:
    sender = make(num_receivers=2)
    ticket = sender.invite(1)
    reading = threads.submit(lambda: copied(ticket.read(60.0)))
    sending = threads.submit(sender.send, 1, random_tensors(1))
    ticket.call_off()
    for waiting in (reading, sending):
        with pytest.raises(RolloutError, match="it was called off"):
            waiting.result(30)
    ticket = sender.invite(1, num_receivers=1)  # another invitation is another matter
    reading = threads.submit(lambda: copied(ticket.read(30.0)))
    sender.send(1, random_tensors(1))
    assert_same(reading.result(30), random_tensors(1))
    sender.close()
    ticket.call_off()  # nobody is there any more
