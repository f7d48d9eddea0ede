"""A router in this process, in one of its own, and how both end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from practicum.controller import RayResourcePool, ray_cluster
from practicum.errors import RouterError
from practicum.reward.router import Router, RouterControl, RouterHandle, RouterSettings
from practicum.reward.router.server import RouterServer
from tests.reward.router.client import LOCAL, Client, request
from tests.reward.router.fakes import Exchange, FakeWorker, echo_target

StartWorker = Callable[..., FakeWorker]

STARTS: dict[str, Callable[[Router], RouterHandle]] = {
    "thread": lambda router: router.start(),
    "process": lambda router: router.start_process(),
}


def slowly(seconds: float) -> Callable[[Exchange], None]:
    def handler(exchange: Exchange) -> None:
        exchange.read_body()
        time.sleep(seconds)
        echo_target(exchange)

    return handler


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_it_serves_as_soon_as_it_is_started(start: Callable[[Router], RouterHandle], start_worker: StartWorker) -> None:
    worker = start_worker()
    with start(Router([worker.url])) as router:
        assert router.workers()[0]["state"] == "up"
        with Client(router.url) as client:
            assert client.get(b"/x").data == b"/x"


def test_an_event_loop_is_free_while_it_starts_a_process_and_can_end_the_start() -> None:
    async def main() -> None:
        before = set(psutil.Process().children())
        starting = asyncio.create_task(Router().start_process_async())
        while not (started := set(psutil.Process().children()) - before):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not any(process.is_running() for process in started)
        router = await Router().start_process_async()
        assert await asyncio.to_thread(router.workers) == []
        await asyncio.to_thread(router.stop)

    asyncio.run(main())


@pytest.mark.usefixtures("many_descriptors")
def test_a_process_with_many_open_files_starts_one_too() -> None:
    with Router().start_process() as router:
        assert router.workers() == []


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_stopping_drains(start: Callable[[Router], RouterHandle], start_worker: StartWorker) -> None:
    worker = start_worker(slowly(0.5))
    router = start(Router([worker.url]))
    with Client(router.url) as busy, Client(router.url) as idle:
        busy.send(request(target=b"/under-way"))
        worker.wait_for(lambda worker: bool(worker.requests), "the request")
        stopping = threading.Thread(target=router.stop)
        stopping.start()
        assert idle.is_closed()
        response = busy.response()
        assert response.data == b"/under-way" and b"connection: close" in response.head.raw
        stopping.join(10.0)
    with pytest.raises(ConnectionRefusedError):
        Client(router.url)
    router.stop()  # again, for nothing


def test_draining_has_a_deadline(start_worker: StartWorker) -> None:
    worker = start_worker(slowly(3.0))
    router = Router([worker.url], drain_timeout_s=0.3).start()
    with Client(router.url) as client:
        client.send(request(target=b"/too-long"))
        worker.wait_for(lambda worker: bool(worker.requests), "the request")
        start = time.monotonic()
        router.stop()
        assert time.monotonic() - start < 2.0
        assert client.is_closed()


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_a_port_in_use_is_an_error_that_names_it(start: Callable[[Router], RouterHandle]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RouterError, match=f"port {port}.*in use"):
            start(Router(port=port))
        with pytest.raises(RouterError, match=f"port {port}.*in use"):
            start(Router(admin_port=port))


def test_what_a_process_prints_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "router.log"
    url = "http://127.0.0.1:1"  # nobody is there
    with Router([url]).start_process(log=log):
        pass
    assert url in log.read_text()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'OSError: no more memory' >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(RouterError, match=rf"exit code 3 before it was ready.*{log}(?s:.*)OSError: no more memory"):
        Router().start_process(log=log)
    assert url in log.read_text()


def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    program = "from practicum.reward.router import Router; import time; r = Router().start_process()\n"
    program += "print(r.pid, r.port, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, port = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_drains_when_told_to_stop(number: signal.Signals, start_worker: StartWorker) -> None:
    worker = start_worker(slowly(0.4))
    command = [sys.executable, "-m", "practicum", "router", "--worker", worker.url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("router ready at http://127.0.0.1:")
    with Client(line.split()[-1]) as client:
        client.send(request(target=b"/under-way"))
        worker.wait_for(lambda worker: bool(worker.requests), "the request")
        os.kill(process.pid, number)
        assert client.response().data == b"/under-way"
    output, log = process.communicate(timeout=10.0)
    assert (process.returncode, output) == (0, "")
    assert f"worker {worker.url} is up" in log and "Traceback" not in log


def test_a_worker_that_is_not_there_is_reported_and_the_router_starts(start_worker: StartWorker) -> None:
    worker = start_worker()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Router([gone, worker.url]).start() as router:
        states = {state["url"]: (state["state"], state["reason"]) for state in router.workers()}
        assert states[gone][0] == "ejected" and "refused" in states[gone][1]
        with Client(router.url) as client:
            assert client.get(b"/x").data == b"/x"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"workers": ["http://a:1", "http://a:1/"]}, "worker http://a:1/ is named twice"),
        ({"workers": ["a:1"]}, "worker 'a:1' is not a URL"),
        ({"workers": ["http://a:1/v1"]}, "only scheme, host and port"),
        ({"policy": "best"}, "the policies are: expected_finish, least_requests"),
        ({"port": 70000}, "port=70000"),
        ({"port": True}, "port=True: is neither true nor false"),
        ({"workers": "http://a:1"}, "give a list of URLs"),
        ({"workers": ["http://[::1]:1", "http://[0:0::1]:1"]}, "named twice"),
        ({"probe_path": "health"}, "must begin with /"),
        ({"token": "a b"}, "visible ASCII"),
        ({"colour": 1}, "'colour' is not known"),
    ],
)
def test_settings_that_cannot_be_used_are_errors(settings: dict[str, object], told: str) -> None:
    with pytest.raises(RouterError, match=re.escape(told)):
        Router(**settings)  # type: ignore[arg-type]


def start(settings: RouterSettings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from practicum.reward.router.launch import main; main()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(settings.model_dump_json() + "\n")
    child.stdin.flush()
    return child


def first_line(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line: dict[str, Any] = json.loads(child.stdout.readline())
    return line


def test_it_tells_its_address_and_ends_with_its_input() -> None:
    child = start(RouterSettings(admin_port=0))
    told = first_line(child)
    with Client(told["admin_url"]) as client:
        assert client.ask(request(target=b"/workers", host=LOCAL)).status == 200
    child.communicate(timeout=10.0)
    assert child.returncode == 0


def test_it_tells_what_went_wrong() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = start(RouterSettings(port=taken.getsockname()[1]))
        assert "in use" in first_line(child)["error"]
        child.communicate(timeout=10.0)


def test_a_control_drives_a_router_by_its_address(
    start_worker: Callable[..., FakeWorker], start_router: Callable[..., Any]
) -> None:
    first, second = start_worker(), start_worker()
    router = start_router(first)
    control = RouterControl(f"{router.url}/router/")
    control.add(second.url, version=7)
    assert [worker["url"] for worker in control.workers()] == [first.url, second.url]
    assert control.workers()[1]["version"] == 7
    control.remove(first.url)
    assert [worker["url"] for worker in control.workers()] == [second.url]
    assert "practicum_router_waiting 0.0" in control.metrics()


def test_errors_of_the_router_are_raised_with_its_words() -> None:
    with Router().start() as router:
        with pytest.raises(RouterError, match="worker http://a:1 is not here; the workers are: none"):
            router.drain("http://a:1")
        router.add("http://127.0.0.1:9")
        with pytest.raises(RouterError, match="already"):
            router.add("http://127.0.0.1:9")


def test_a_wrong_token_is_an_error() -> None:
    with Router(token="right").start() as router, pytest.raises(RouterError, match="Authorization: Bearer"):
        RouterControl(router.admin_url, "wrong").workers()


def test_a_router_that_is_not_there_is_an_error() -> None:
    with Router().start() as router:
        url = router.admin_url
    with pytest.raises(RouterError, match="does not answer"):
        RouterControl(url).workers()


def test_an_address_that_is_no_control_plane_is_an_error(start_worker: Callable[..., FakeWorker]) -> None:
    with (
        Router([start_worker().url]).start() as router,
        pytest.raises(RouterError, match="not a router's control plane"),
    ):
        RouterControl(router.url).workers()


def test_it_runs_in_any_event_loop(start_worker: Callable[..., FakeWorker]) -> None:
    worker = start_worker()

    async def serve() -> bytes:
        server = RouterServer(RouterSettings(workers=(worker.url,)))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        await server.stop()
        return answer

    assert asyncio.run(serve()).endswith(b"\r\n\r\n/x")


def test_a_worker_that_does_not_answer_its_first_probe_holds_up_nothing() -> None:
    async def serve() -> float:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        server = RouterServer(RouterSettings(workers=(f"http://127.0.0.1:{port}",), probe_timeout_s=0.2))
        start = time.monotonic()
        await server.start()
        seconds = time.monotonic() - start
        await server.stop()
        silent.close()
        return seconds

    assert asyncio.run(serve()) < 1.0


def test_an_admin_port_in_use_leaves_nothing_open() -> None:
    async def serve() -> None:
        first = RouterServer(RouterSettings())
        await first.start()
        second = RouterServer(RouterSettings(admin_port=first.port))
        with pytest.raises(RouterError, match=f"port {first.port}"):
            await second.start()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", second.port)
        await first.stop()

    asyncio.run(serve())


def test_addresses() -> None:
    async def serve(**settings: object) -> tuple[str, str]:
        server = RouterServer(RouterSettings(**settings))  # type: ignore[arg-type]
        await server.start()
        await server.stop()
        return server.url, server.admin_url

    url, admin_url = asyncio.run(serve(host="0.0.0.0"))
    assert url.startswith("http://127.0.0.1:") and admin_url == f"{url}/router"
    url, admin_url = asyncio.run(serve(admin_port=0))
    assert admin_url.startswith("http://127.0.0.1:") and admin_url != url and "/router" not in admin_url


@pytest.mark.slow
def test_an_actor_serves_and_ends(start_worker: Callable[..., FakeWorker]) -> None:
    worker = start_worker()
    with ray_cluster():
        with Router([worker.url]).start_actor() as router:
            with Client(router.url) as client:
                assert client.get(b"/x").data == b"/x"
            assert router.workers()[0]["requests"] == 1
            with pytest.raises(RouterError, match="Bearer"):  # it has a token, since callers come from anywhere
                RouterControl(router.admin_url).workers()
        with pytest.raises(OSError):
            Client(router.url)
        with (
            RayResourcePool([1]) as pool,
            Router([worker.url]).start_actor(pool) as router,
            Client(router.url) as client,
        ):
            assert client.get(b"/pool").data == b"/pool"
