"""What every case of `router` needs: workers and routers that are up, and the names of who takes part."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.harness import ContestantError
from bench.programs import Program, free_ports, is_listened_to, unpacked
from bench.router_client import PATH
from bench.router_contestants import OURS, ROUTERS, Setup, nginx_arguments
from bench.router_workers import Worker

START_S = 60.0
# A request to grade a long answer, or a short one's prompt, is about that long.
KILOBYTE = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """Who takes part, ours first, in how long a run."""

    names: Sequence[str]
    quick: bool
    folder: Path  # for configurations and logs
    arguments: Sequence[str] = ()  # of our router

    @property
    def peers(self) -> list[str]:
        return [name for name in self.names if name != OURS]


@dataclass(frozen=True, slots=True)
class Router:
    """A router that runs."""

    name: str
    port: int
    program: Program

    def wait(self) -> None:
        """Until it passes a request on and the answer back."""
        self.program.wait_until(lambda: _answers(self.port), START_S)


@dataclass(frozen=True, slots=True)
class Stage:
    """Starts programs for a case, all of which are gone at the end of its stack."""

    entry: Entry
    stack: ExitStack

    def open_router(
        self,
        name: str,
        workers: Sequence[int],
        *,
        lean: bool = False,
        response_timeout_s: float | None = None,
        more: Sequence[str] = (),
    ) -> Router:
        """Start one; the caller waits for it, so that several can start at the same time."""
        port = free_ports(1)[0]
        arguments = (*self.entry.arguments, *more) if name == OURS else ()
        launch = ROUTERS[name](Setup(self.entry.folder, port, workers, lean, response_timeout_s, arguments))
        program = Program(f"{name}-{port}", launch.command, self.entry.folder, launch.env)
        return Router(name, port, self.stack.enter_context(program))

    def open_light_workers(self, count: int) -> tuple[Program, list[int]]:
        """Workers that cost next to nothing, for when the router is to be the slowest: one nginx, several ports."""
        ports = free_ports(count)
        listens = "".join(f"listen 127.0.0.1:{port};" for port in ports)
        http_block = f"server {{ {listens} location / {{ return 200 '{light_answer()}'; }} }}"
        path, env = unpacked("nginx", "usr/sbin/nginx")
        arguments = nginx_arguments(self.entry.folder / f"workers-{ports[0]}", http_block)
        program = Program(f"workers-{ports[0]}", [path, *arguments], self.entry.folder, env)
        self.stack.enter_context(program)
        wait_for_ports(program, ports)
        return program, ports

    def open_workers(self, workers: Sequence[Worker]) -> Program:
        """Emulated ones, in one process."""
        program = Program(f"workers-{workers[0].port}", Worker.command(workers), self.entry.folder)
        return self.stack.enter_context(program)


def wait_for_ports(program: Program, ports: Sequence[int]) -> None:
    for port in ports:
        program.wait_until(lambda port=port: is_listened_to(port), START_S)


def light_answer() -> str:
    """A kilobyte that also satisfies whoever asks a worker about itself."""
    answer = {"id": "0", "worker": "light", "status": "ok", "model_path": "m", "object": "list", "data": [], "text": ""}
    answer["text"] = "x" * (KILOBYTE - len(json.dumps(answer)))
    return json.dumps(answer)


def light_request() -> str:
    request = {"model": "m", "max_tokens": 1, "prompt": ""}
    request["prompt"] = "x" * (KILOBYTE - len(json.dumps(request)))
    return json.dumps(request)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    body = json.dumps({"model": "m", "max_tokens": 1, "prompt": "0 0 ready?"})
    try:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        worker = json.loads(reply.read()).get("worker") if reply.status == 200 else None
    except (OSError, http.client.HTTPException):
        return False
    except ValueError as error:
        raise ContestantError(f"the router at port {port} changed a worker's answer: {error}") from None
    finally:
        connection.close()
    return worker is not None


def start_all(stage: Stage, workers: Sequence[int], *, lean: bool = False) -> list[Router]:
    """A router of each contestant in front of the same workers, all up."""
    routers = [stage.open_router(name, workers, lean=lean) for name in stage.entry.names]
    for router in routers:
        router.wait()
    return routers
