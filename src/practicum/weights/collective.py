"""The channel between machines: the trainer broadcasts to all engines at once, bucket by bucket.

    sender     invite ─▶ ticket; then send waits until all have come, and broadcasts
    receiver   comes with the ticket, gets its rank in the order of coming, takes part

    each bucket: two numbers (bytes of its table and of its tensors) ─ table ─ tensors end to end; the last is empty

The place to meet is a store of torch's, which has no secret: it listens at one address of the trainer's machine, and
only from an invitation until that version is with all who were invited. What arrives is compared with the trainer's
log-probs before an engine may write with it.

Every version has a group of its own, beside torch's default one and apart from it: engines may come, go and be
restarted between two versions, and one that fails spoils only the version it failed with. Making one takes milliseconds
with gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from practicum.errors import ResourceError
from practicum.weights.channel import (
    ChannelSettings,
    Deadline,
    Sender,
    Tensors,
    Ticket,
    as_bytes,
    describe,
    not_arrived,
    rebuilt,
)

_ALIGNMENT = 16  # of each tensor in its bucket, so that any dtype can be viewed there
_POLL_S = 0.0002
# A group gives up by itself, so much later than those that wait for it. NCCL's takes the whole process with it.
_GLOO_GRACE_S, _NCCL_GRACE_S = 0.3, 600.0
_CALL_OFF_S = 10.0
_BACKLOG = 2048  # ranks that may come at once
_NEARLY_S = 0.1  # gloo counts in milliseconds, and rounds down


@dataclass(frozen=True, slots=True)
class CollectiveTicket(Ticket):
    channel: ClassVar[str] = "collective"
    host: str
    port: int
    number: int  # of the invitation: a version that is sent again has another
    num_receivers: int
    backend: str

    def read(self, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        deadline = Deadline(timeout_s)
        try:
            store = self._store(timeout_s)
            rank = store.add(self.key("arrivals"), 1)
            if rank == self.num_receivers:
                store.set(self.key("over"), "")
        except RuntimeError as error:
            raise self.failure(
                f"the trainer at {self.host}:{self.port} cannot be reached ({_first_line(error)}). Is it alive, is "
                "that its address as this machine knows it, and has it not sent this version to all it invited?"
            ) from error
        if rank > self.num_receivers:
            raise self.failure(
                f"all {self.num_receivers} receivers that were invited had come already. Invite one more."
            )
        _wait_for_all(store, self, deadline)
        with _Group(store, rank, self, deadline) as group:
            for table, memory in group.buckets():
                yield from rebuilt(memory, table)
            group.meet()

    def call_off(self) -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone too, so no receiver waits
            self._store(_CALL_OFF_S).set(self.key("over"), "")

    def key(self, name: str) -> str:
        """Return the name under which the trainer's store keeps something about this invitation."""
        return f"{name}-{self.number}"

    def _store(self, timeout_s: float) -> Any:
        timeout = datetime.timedelta(seconds=timeout_s)
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)


class CollectiveSender(Sender):
    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._store: Any = None  # while there is an invitation
        self._invited: CollectiveTicket | None = None
        self._num_invitations = 0

    def invite(self, version: int, num_receivers: int | None = None) -> CollectiveTicket:
        num = self.settings.num_receivers if num_receivers is None else num_receivers
        self._num_invitations += 1
        if self._store is None:
            self._store = open_store(self.settings.host, self.settings.timeout_s)
        place = (self.settings.host, self._store.port, self._num_invitations)
        self._invited = CollectiveTicket(version, *place, num, self.settings.backend)
        return self._invited

    def _send(self, version: int, tensors: Tensors) -> CollectiveTicket:
        ticket, self._invited = self._invited, None
        if ticket is None or ticket.version != version:
            raise not_arrived(
                "collective", version, "nobody was invited to it: call invite first, and send the ticket round."
            )
        deadline = Deadline(self.settings.timeout_s)
        _wait_for_all(self._store, ticket, deadline)
        with _Group(self._store, 0, ticket, deadline) as group:
            for table, memory in _buckets(tensors, self.settings.bucket_bytes, group.device):
                group.send(table, memory)
            group.end()
            group.meet()
        self.close()
        return ticket

    def close(self) -> None:
        self._store = None


def open_store(host: str, timeout_s: float, port: int = 0) -> TCPStore:
    """Return a store that listens at this address only: left to itself, torch listens at all of the machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ResourceError(
            f"cannot listen at {host}, port {port}: {error}. Is it an address of this machine?"
        ) from None
    port = listener.getsockname()[1]
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


class _Group:
    """The sender and all receivers of one version. Left early, it breaks the connections: the others hear of it."""

    def __init__(self, store: Any, rank: int, ticket: CollectiveTicket, deadline: Deadline) -> None:
        self._ticket = ticket
        self._deadline = deadline
        self._is_sender = rank == 0
        is_nccl = ticket.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        own = PrefixStore(f"version-{ticket.number}", store)
        timeout_s = deadline.left_s + (_NCCL_GRACE_S if is_nccl else _GLOO_GRACE_S)
        with self._failures():
            make, options = _nccl() if is_nccl else _gloo(ticket, timeout_s)
            options._timeout = datetime.timedelta(seconds=timeout_s)
            self._group = make(own, rank, ticket.num_receivers + 1, options)

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already
                self._group.abort()
        del self._group

    def send(self, table: list[Any], memory: Tensor) -> None:
        described = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([len(described), len(memory)], device=self.device))
        self._broadcast(described)
        if len(memory):
            self._broadcast(memory)

    def end(self) -> None:
        self._broadcast(torch.zeros(2, dtype=torch.int64, device=self.device))

    def buckets(self) -> Iterator[tuple[list[Any], Tensor]]:
        """Yield the tables and the memory of the buckets: each in that of the one before, where it fits."""
        size = torch.zeros(2, dtype=torch.int64, device=self.device)
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        while True:
            self._broadcast(size)
            num_described, num_bytes = size.tolist()
            if not num_described:
                return
            described = memory.new_empty(num_described)
            self._broadcast(described)
            if len(memory) < num_bytes:
                memory = memory.new_empty(num_bytes)
            if num_bytes:
                self._broadcast(memory[:num_bytes])
            yield json.loads(bytes(described.cpu().numpy())), memory

    def meet(self) -> None:
        """Wait until all are here."""
        self._wait(lambda: self._group.allreduce([torch.zeros(1, device=self.device)]))

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(lambda: self._group.broadcast([tensor], self._options))

    def _wait(self, begin: Any) -> None:
        with self._failures():
            work = begin()
            if self.device.type == "cpu":
                work.wait(datetime.timedelta(seconds=max(self._deadline.left_s, 1e-3)))
                return
            while not work.is_completed():  # to wait for a kernel would have no end where the others are gone
                if self._deadline.is_over:
                    raise RuntimeError("Operation timed out")
                time.sleep(_POLL_S)
            work.wait()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = f"{'a receiver' if self._is_sender else 'the trainer or another receiver'} is gone or gave up"
            if self._deadline.left_s < _NEARLY_S:
                why = f"not all was there after {self._deadline.timeout_s:g} s"
            raise self._ticket.failure(
                f"{why} ({_first_line(error)}). Weights that arrived in part must not be used: invite those who are "
                "left, and send again."
            ) from error


def _gloo(ticket: CollectiveTicket, timeout_s: float) -> tuple[Any, Any]:
    options: Any = cast(Any, dist.ProcessGroupGloo)._Options()
    # The address by which this machine reaches the trainer's; its host name may stand for another, or for itself only.
    with socket.create_connection((ticket.host, ticket.port), timeout_s) as connection:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=connection.getsockname()[0])]
    return dist.ProcessGroupGloo, options


def _nccl() -> tuple[Any, Any]:
    return dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options()


def _wait_for_all(store: Any, ticket: CollectiveTicket, deadline: Deadline) -> None:
    """Wait until all invited receivers have come: the last of them puts that into the store, as does `call_off`."""
    try:
        if store.add(ticket.key("arrivals"), 0) < ticket.num_receivers:
            with contextlib.suppress(dist.DistStoreError):  # the deadline
                store.wait([ticket.key("over")], datetime.timedelta(seconds=max(deadline.left_s, 1e-3)))
        if (num := store.add(ticket.key("arrivals"), 0)) >= ticket.num_receivers:
            return
        if store.check([ticket.key("over")]):
            raise ticket.failure("it was called off, since one of those invited is gone.")
    except RuntimeError as error:
        raise ticket.failure(f"the trainer is gone ({_first_line(error)}).") from error
    raise ticket.failure(
        f"only {num} of {ticket.num_receivers} receivers came within {deadline.timeout_s:g} s. Look after the "
        "engines, then invite those that are there and send again."
    )


def _buckets(tensors: Tensors, num_bytes: int, device: torch.device) -> Iterator[tuple[list[Any], Tensor]]:
    """Yield tables and the memory they describe, always the same; large tensors go as they are, one by one."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    table: list[Any] = []
    end = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if table and end + size > num_bytes:
            yield table, memory[:end]
            table, end = [], 0
        if size > num_bytes:
            yield [[*describe(name, tensor), 0]], as_bytes(tensor.to(device).contiguous())
            continue
        table.append([*describe(name, tensor), end])
        next(rebuilt(memory, table[-1:]))[1].copy_(tensor)
        end = min(num_bytes, -(-(end + size) // _ALIGNMENT) * _ALIGNMENT)
    if table:
        yield table, memory[:end]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
