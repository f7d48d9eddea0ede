"""A trainer in a process of its own, which sends what it is told to, and may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from practicum.weights import ChannelSettings, Ticket, WeightReceiver, open_sender
from practicum.weights.channel import Tensors

DEADLINE_S = 60.0
REMOTE = ("shm", "collective", "disk")  # those that leave a process

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.weights.sending"])  # torch is imported once


def random_tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Of all sorts: many dtypes, no elements, no dimensions, not contiguous, larger than a bucket."""
    random = torch.Generator().manual_seed(seed)
    yield "embedding", torch.randn(300, 17, generator=random)
    yield "large", torch.randn(257, 129, generator=random)
    yield "half", torch.randn(33, 3, generator=random).bfloat16()
    yield "transposed", torch.randn(31, 7, generator=random).T
    yield "none", torch.empty(0, 4)
    yield "scalar", torch.tensor(float(seed))
    yield "counts", torch.randint(-9, 9, (5,), generator=random)
    yield "mask", torch.rand(13, generator=random) > 0.5
    for layer in range(40):
        yield f"layers.{layer}.weight", torch.randn(11, 13, generator=random)


def killed_in_the_midst(seed: int) -> Iterator[tuple[str, Tensor]]:
    for index, item in enumerate(random_tensors(seed)):
        yield item
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)


def scaled(path: str, version: int) -> Iterator[tuple[str, Tensor]]:
    """The weights that version has in tests of generation; those of version 0 are in the file."""
    for name, tensor in torch.load(path).items():
        yield name, tensor * (1 + 0.1 * version)


class TrainerProcess:
    """`send` waits for nothing; its ticket comes with `result`."""

    def __init__(self, channel: str, settings: ChannelSettings) -> None:
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, channel, settings), daemon=True)
        self.process.start()
        theirs.close()
        self._caller = ThreadPoolExecutor(1)

    def invite(self, version: int) -> Ticket | None:
        return self._ask("invite", version).result(DEADLINE_S)

    def send(self, version: int, tensors: Callable[..., Tensors], *arguments: Any) -> Future[Any]:
        return self._ask("send", version, tensors, arguments)

    def pass_on(self, receiver: WeightReceiver, version: int, tensors: Callable[..., Tensors], *arguments: Any) -> Any:
        """All of it, in the order that suits every channel: the update, and what `send` will return."""
        invited = self.invite(version)
        sending = self.send(version, tensors, *arguments)
        return receiver.receive(invited or sending.result(DEADLINE_S)), sending

    def _ask(self, *order: Any) -> Future[Any]:
        return self._caller.submit(self._answer, order)

    def _answer(self, order: tuple[Any, ...]) -> Any:
        self._connection.send(order)
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._caller.shutdown()
        self._connection.close()


def _serve(connection: Connection, channel: str, settings: ChannelSettings) -> None:
    torch.set_num_threads(1)
    sender = open_sender(channel, settings)
    while True:
        kind, version, *rest = connection.recv()
        try:
            if kind == "invite":
                connection.send(sender.invite(version))
            else:
                tensors, arguments = rest
                connection.send(sender.send(version, tensors(*arguments)))
        except Exception as error:
            connection.send(error)


def assert_same(found: dict[str, Tensor], expected: Tensors) -> None:
    wanted = dict(expected)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}
