"""Where a router runs: in this process, in one of its own, or on a Ray cluster. It is the same router everywhere.

`Router` starts it. A `RouterHandle` is what a program holds of a started one: its address, its control plane, and how
to stop it.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import uvloop

from practicum.errors import RouterError
from practicum.processes.log import excerpt
from practicum.reward.router.server import RouterServer
from practicum.reward.router.settings import RouterSettings

if TYPE_CHECKING:
    from practicum.controller import RayResourcePool

# How long a router may take to end, beyond the time for draining.
STOP_S = 5.0
# How long a call to the control plane may take.
TIMEOUT_S = 10.0


class Router:
    """A router as described by `RouterSettings`. Nothing runs before one of these is called:

    - `run()`: here, until a signal stops the process
    - `start()`: in this process, on a thread of its own
    - `start_process()`: in a child process, which ends with this one at the latest
    - `start_actor()`: as an actor of a Ray cluster
    """

    def __init__(self, workers: Sequence[str] = (), **settings: Any) -> None:
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise RouterError(f"workers={workers!r}: give a list of URLs, one for each worker.")
        self.settings = RouterSettings.make(workers=tuple(workers), **settings)

    def run(self, on_ready: Callable[[RouterServer], None] = lambda server: None) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends it at once."""
        serve_until_stopped(self.settings, on_ready)

    def start(self) -> RouterHandle:
        return RouterThread(self.settings)

    def start_process(self, timeout_s: float = 60.0, *, log: Path | None = None) -> RouterProcess:
        """Start it in a child process. What it prints is appended to the file `log`; None: it goes where ours goes."""
        process = RouterProcess(self.settings, log)
        process.wait_until_ready(timeout_s)
        return process

    async def start_process_async(self, timeout_s: float = 60.0, *, log: Path | None = None) -> RouterProcess:
        """Do what `start_process` does without blocking the event loop. Being cancelled ends the process."""
        process = RouterProcess(self.settings, log)
        try:
            await asyncio.to_thread(process.wait_until_ready, timeout_s)
        except asyncio.CancelledError:
            process._kill()  # which also ends the wait
            raise
        return process

    def start_actor(self, pool: RayResourcePool | None = None) -> RouterHandle:
        """Start it on the first place of a pool, or on a node of Ray's choice. A loopback `host` becomes the node's
        address, since callers come from other nodes."""
        from practicum.reward.router.actor import RouterOnRay

        return RouterOnRay(self.settings, pool)


class RouterControl:
    """The control plane from Python, such as at http://127.0.0.1:9000/router. Failed calls raise `RouterError`."""

    def __init__(self, admin_url: str, token: str | None = None) -> None:
        self.admin_url = admin_url.rstrip("/")
        self._token = token

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers and their live figures."""
        workers: list[dict[str, Any]] = self._call("GET", "/workers")
        return workers

    def add(self, url: str, version: int | None = None) -> None:
        """Add a worker. It gets requests once it has answered a probe."""
        self._call("POST", "/workers", url=url, **({} if version is None else {"version": version}))

    def remove(self, url: str) -> None:
        """Remove a worker. It finishes the requests that it has."""
        self._call("DELETE", "/workers", url=url)

    def drain(self, url: str) -> None:
        """Send a worker no new requests until `resume`. It stays in the list."""
        self._call("POST", "/drain", url=url)

    def pause(self, url: str = "all") -> None:
        """Send a worker no requests for a while: they wait if no other worker takes them."""
        self._call("POST", "/pause", url=url)

    def resume(self, url: str = "all") -> None:
        self._call("POST", "/resume", url=url)

    def set_version(self, url: str, version: int) -> None:
        """Tell the router which version of the weights this worker has."""
        self._call("POST", "/version", url=url, version=version)

    def want_version(self, version: int | None) -> None:
        """Send nothing to workers with older weights until they have this version. None: any will do."""
        self._call("POST", "/version", version=version)

    def metrics(self) -> str:
        return self._request("GET", "/metrics", None).decode()

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        data = self._request(method, path, json.dumps(fields).encode() if fields else None)
        try:
            return json.loads(data)
        except ValueError:
            raise RouterError(
                f"{self.admin_url} is not a router's control plane: that is at /router of its address, unless it has a "
                "port of its own."
            ) from None

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        parts = urlsplit(self.admin_url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request(method, f"{parts.path}{path}", body, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RouterError(f"the router at {self.admin_url} does not answer: {error}.") from None
        finally:
            connection.close()
        if response.status != 200:
            raise RouterError(f"{method} {self.admin_url}{path}: {_message(data)}")
        return data


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")


class RouterHandle(RouterControl, ABC):
    """A router that was started from here. Leaving its `with` block stops it."""

    def __init__(self, url: str, admin_url: str, token: str | None) -> None:
        super().__init__(admin_url, token)
        self.url = url
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0

    @abstractmethod
    def stop(self) -> None:
        """Finish what is under way, then end. Stopping twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class RouterThread(RouterHandle):
    """A router in this process, on a thread of its own."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._loop = uvloop.new_event_loop()
        self._server = RouterServer(settings)
        try:
            self._loop.run_until_complete(self._server.start())
        except RouterError:
            self._loop.close()
            raise
        super().__init__(self._server.url, self._server.admin_url, settings.token)
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-router", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)
        stopping.result(self._settings.drain_timeout_s + STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


class RouterProcess(RouterHandle):
    """A router in a child process. It drains and ends when its standard input closes, however this process ends."""

    def __init__(self, settings: RouterSettings, log: Path | None = None) -> None:
        """Start it. `wait_until_ready` comes before anything else."""
        self._settings = settings
        self._log, self._log_start = log, 0
        with ExitStack() as stack:
            printed = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                printed = stack.enter_context(log.open("ab"))
                self._log_start = printed.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from practicum.reward.router.launch import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which will close the input
            )
        assert self._process.stdin is not None
        self.pid = self._process.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Hand over the settings, and take in the address. If it fails, the process is ended."""
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended: the wait for its answer says how
                self._process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
                self._process.stdin.flush()
            ready = self._answer(timeout_s)
        except BaseException:
            self._kill()
            with suppress(BrokenPipeError):  # what it has not read is of no use any more
                self._process.stdin.close()
            raise
        super().__init__(ready["url"], ready["admin_url"], self._settings.token)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(self._settings.drain_timeout_s + STOP_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, str]:
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], timeout_s):  # select refuses descriptors from 1024 on
            raise self._failure(f"was not ready within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(STOP_S)
            raise self._failure(f"ended with exit code {code} before it was ready")
        ready: dict[str, str] = json.loads(line)
        if "error" in ready:
            raise RouterError(ready["error"])
        return ready

    def _failure(self, reason: str) -> RouterError:
        printed = ""
        if self._log is not None:
            printed = f" All that it printed is in {self._log}. {excerpt(self._log, self._log_start)}"
        return RouterError(f"the router's process (pid {self.pid}) {reason}.{printed}")


def serve_until_stopped(
    settings: RouterSettings, on_ready: Callable[[RouterServer], None], *, ends_with_stdin: bool = False
) -> None:
    """Serve in this process until a signal comes or, if so asked, until standard input is closed."""

    async def serve() -> None:
        stopping = asyncio.Event()
        server = RouterServer(settings)
        await server.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop_now_or_later, stopping)
        if ends_with_stdin:
            loop.add_reader(sys.stdin.fileno(), stopping.set)
        gc.collect()
        gc.freeze()  # what there is now stays: no need to look through it again and again
        on_ready(server)
        await stopping.wait()
        if ends_with_stdin:
            loop.remove_reader(sys.stdin.fileno())
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _stop_now_or_later(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        raise SystemExit(1)
    stopping.set()


def main() -> None:
    """Run the child of `Router.start_process`: settings come in as one line, the address goes out as one line."""
    settings = RouterSettings.model_validate_json(sys.stdin.buffer.readline())

    def report(**fields: str) -> None:
        print(json.dumps(fields), flush=True)

    try:
        serve_until_stopped(
            settings, lambda server: report(url=server.url, admin_url=server.admin_url), ends_with_stdin=True
        )
    except RouterError as error:
        report(error=str(error))
