"""A slow reader slows the sender down; the router holds little of what is under way, however much that is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.reward.router.client import Client, request
from tests.reward.router.conftest import running_router
from tests.reward.router.fakes import Exchange, FakeWorker, plain

MIB = 1 << 20
BLOCK = bytes(range(256)) * 256  # 64 KiB
NUM_BLOCKS = 1600  # 100 MiB
SIZE = NUM_BLOCKS * len(BLOCK)


def kernel_limit(name: str) -> int:
    """Bytes up to which the kernel grows such a buffer of a socket."""
    return int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2])


# Beside the router's own half MiB: there is a sending and a receiving end on either side of it.
MAX_UNDER_WAY = kernel_limit("tcp_rmem") + 2 * kernel_limit("tcp_wmem") + 2 * MIB
assert MAX_UNDER_WAY < SIZE
MAX_GROWTH = 64 * MIB
SOCKET_BUFFER = 64 * 1024  # of the test's own ends


def checksum_of_all() -> int:
    checksum = 0
    for _ in range(NUM_BLOCKS):
        checksum = zlib.crc32(BLOCK, checksum)
    return checksum


class Sender:
    """Sends blocks, and counts them, so that a test can see whether it is held back."""

    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, sock: socket.socket, framing: str, piece: bytes = BLOCK) -> None:
        if framing == "chunked":
            piece = b"%x\r\n%s\r\n" % (len(piece), piece)
        sock.settimeout(20.0)
        for _ in range(NUM_BLOCKS):
            sock.sendall(piece)
            self.num_sent += 1
        if framing == "chunked":
            sock.sendall(b"0\r\n\r\n")

    def wait_until_stuck(self) -> int:
        """How many bytes were sent before nothing moved for a while."""
        deadline, before = time.monotonic() + 10.0, -1
        while before != self.num_sent or not self.num_sent:
            assert time.monotonic() < deadline, "the sender is never held back"
            before = self.num_sent
            time.sleep(0.25)
        return before * len(BLOCK)


class Sink:
    """Reads a body and remembers only its checksum and length."""

    def __init__(self, sock: socket.socket, begun: bytes = b"") -> None:
        self.sock, self.begun = sock, begun
        self.checksum = self.length = 0

    def read(self, count: int, slow: bool = False) -> None:
        self.sock.settimeout(20.0)
        pause_at = 4 * MIB
        self._note(self.begun)
        while self.length < count:
            data = self.sock.recv(1 << 18)
            if not data:
                return
            self._note(data)
            if slow and self.length > pause_at:
                pause_at += 4 * MIB
                time.sleep(0.02)

    def _note(self, data: bytes) -> None:
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += len(data)


def framing_field(framing: str) -> bytes:
    return b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: %d" % SIZE


def size_on_the_wire(framing: str) -> int:
    return SIZE + (NUM_BLOCKS * len(b"10000\r\n\r\n") + len(b"0\r\n\r\n") if framing == "chunked" else 0)


@pytest.fixture
def slow_pair() -> Iterator[tuple[FakeWorker, str]]:
    worker = FakeWorker(send_buffer=SOCKET_BUFFER, receive_buffer=SOCKET_BUFFER).start()
    with running_router(worker, response_timeout_s=20.0) as running:
        yield worker, running.url
    worker.close()
    assert worker.errors == []


@pytest.mark.parametrize("framing", ["length", "chunked", "until close"])
def test_a_client_that_does_not_read_stops_the_worker(slow_pair: tuple[FakeWorker, str], framing: str) -> None:
    worker, url = slow_pair
    sender = Sender()

    def flood(exchange: Exchange) -> None:
        exchange.read_body()
        field = b"X: 1" if framing == "until close" else framing_field(framing)
        exchange.send(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n")
        sender.send(exchange.reader.sock, framing)
        exchange.close()

    worker.handler = flood
    with Client(url, receive_buffer=SOCKET_BUFFER) as client:
        client.send(request(target=b"/flood"))
        assert sender.wait_until_stuck() < MAX_UNDER_WAY
        assert client.reader.head() is not None
        client.reader.exactly(8 * MIB)
        assert 8 * MIB < sender.wait_until_stuck() < 8 * MIB + MAX_UNDER_WAY


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_worker_that_does_not_read_stops_the_client(slow_pair: tuple[FakeWorker, str], framing: str) -> None:
    worker, url = slow_pair
    sender, read_on = Sender(), threading.Event()

    def dawdle(exchange: Exchange) -> None:
        assert read_on.wait(20.0)
        exchange.reader.exactly(4 * MIB)
        exchange.send(plain(b"enough"))
        exchange.close()

    worker.handler = dawdle
    with Client(url, receive_buffer=SOCKET_BUFFER) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        client.send(request(b"POST", b"/flood", [framing_field(framing)]))

        def flood() -> None:
            with contextlib.suppress(OSError):
                sender.send(client.sock, framing)

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        try:
            assert sender.wait_until_stuck() < MAX_UNDER_WAY
        finally:
            read_on.set()
            client.sock.shutdown(socket.SHUT_RDWR)
            thread.join(5.0)


def test_a_client_that_only_asks_is_stopped(slow_pair: tuple[FakeWorker, str]) -> None:
    """Requests without end, while the first of them is not answered yet."""
    worker, url = slow_pair
    sender, answer_now = Sender(), threading.Event()

    def hold(exchange: Exchange) -> None:
        assert answer_now.wait(20.0)
        exchange.close()

    worker.handler = hold
    piece = request(target=b"/" + b"x" * 1000) * 64
    with Client(url) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)

        def flood() -> None:
            with contextlib.suppress(OSError):
                sender.send(client.sock, "as it is", piece=piece)

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        try:
            assert sender.wait_until_stuck() < MAX_UNDER_WAY
        finally:
            answer_now.set()
            client.reset()
            thread.join(5.0)


@contextlib.contextmanager
def watched_growth(pid: int) -> Iterator[list[int]]:
    """The most memory a process has taken on beyond what it had at first, sampled; in a list of one."""
    process, growth, over = psutil.Process(pid), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not over.wait(0.01):
            growth[0] = max(growth[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield growth
    finally:
        over.set()
        thread.join(5.0)


@pytest.fixture(scope="module")
def process_pair() -> Iterator[tuple[FakeWorker, str, int]]:
    """A router in a process of its own, so that its memory is nobody else's."""
    from practicum.reward.router import Router

    worker = FakeWorker(send_buffer=SOCKET_BUFFER, receive_buffer=SOCKET_BUFFER).start()
    with Router(workers=[worker.url], port=0, response_timeout_s=20.0).start_process() as running:
        with Client(running.url) as client:  # what the first request allocates is not what a body costs
            assert client.is_kept()
        yield worker, running.url, running.pid
    worker.close()
    assert worker.errors == []


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_100_mib_down_to_a_slow_reader_in_little_memory(
    process_pair: tuple[FakeWorker, str, int], framing: str
) -> None:
    worker, url, pid = process_pair
    sender = Sender()

    def flood(exchange: Exchange) -> None:
        exchange.read_body()
        exchange.send(b"HTTP/1.1 200 OK\r\n" + framing_field(framing) + b"\r\n\r\n")
        sender.send(exchange.reader.sock, framing)
        exchange.close()

    worker.handler = flood
    with Client(url, receive_buffer=SOCKET_BUFFER) as client, watched_growth(pid) as growth:
        client.send(request(target=b"/flood"))
        assert client.reader.head() is not None
        time.sleep(0.3)  # a router that reads ahead has the time to
        sink = Sink(client.sock, client.reader.take(len(client.reader.buffer)))
        sink.read(size_on_the_wire(framing), slow=True)
    assert growth[0] < MAX_GROWTH, f"{growth[0] / MIB:.0f} MiB"
    assert sink.length == size_on_the_wire(framing)
    assert framing == "chunked" or sink.checksum == checksum_of_all()


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_100_mib_up_to_a_slow_reader_in_little_memory(process_pair: tuple[FakeWorker, str, int], framing: str) -> None:
    worker, url, pid = process_pair
    sinks: list[Sink] = []
    wire_size = size_on_the_wire(framing)

    def swallow(exchange: Exchange) -> None:
        time.sleep(0.3)
        sinks.append(Sink(exchange.reader.sock, exchange.reader.take(len(exchange.reader.buffer))))
        sinks[0].read(wire_size, slow=True)
        exchange.send(plain(b"%d" % sinks[0].length))
        exchange.close()

    worker.handler = swallow
    with Client(url) as client, watched_growth(pid) as growth:
        client.send(request(b"POST", b"/flood", [framing_field(framing)]))
        Sender().send(client.sock, framing)
        assert client.response().status == 200
    assert growth[0] < MAX_GROWTH, f"{growth[0] / MIB:.0f} MiB"
    assert sinks[0].length == wire_size
    assert framing == "chunked" or sinks[0].checksum == checksum_of_all()
