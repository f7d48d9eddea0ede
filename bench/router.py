"""`router`: our reward router against verl's naive one, the Rust routers of SGLang and vLLM, nginx and haproxy.

Here is how each router is started: as lean as it can be where speed is measured, with the retries, health checks and
time limits that it has where faults are. The cases are in router_load.py and router_faults.py, the emulated workers and
the client in router_work.py.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.harness import ContestantError, Options, Outcome, Peer, Row
from bench.router_work import ABOUT, PATH, Worker, fetch
from bench.turns import Program, free_ports, is_listened_to, unpacked

OURS = "practicum"
START_S = 60.0
KILOBYTE = 1024  # a request to grade a long answer, or a short one's prompt, is about that long
NGINX_RETRIES = "error timeout http_500 http_502 http_503 http_504 non_idempotent"


def run(options: Options) -> Outcome:
    """`--ours "--policy least_requests"` gives our router more arguments."""
    from bench import router_faults, router_load

    names = contestants(options)
    rows: list[Row] = []
    where: dict[str, Any] = {"our_arguments": list(options.ours), "uvloop": version("uvloop")}
    with tempfile.TemporaryDirectory(prefix="bench-router-") as folder:
        for cases, measure in (*router_load.CASES, *router_faults.CASES):
            wanted = [case for case in cases if options.wants(case)]
            if wanted:
                start = time.monotonic()
                with ExitStack() as stack:
                    outcome = measure(Stage(names, options.quick, Path(folder), stack, options.ours), wanted)
                rows += outcome.rows
                where |= outcome.environment
                print(f"{', '.join(wanted)}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return Outcome(rows, where)


def contestants(options: Options) -> list[str]:
    """Return ours, and all peers unless one or none was asked for."""
    peers = [name for name in ROUTERS if name != OURS]
    if not options.has_peer(peers):
        return [OURS]
    return [OURS, *([options.peer] if options.peer else peers)]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a router is started with."""

    folder: Path  # for files of its own
    port: int
    workers: Sequence[int]  # their ports on the loopback interface
    arguments: Sequence[str] = ()  # more of them, for ours
    lean: bool = False  # speed is all that counts
    response_timeout_s: float | None = None  # set where faults are measured: give up on a worker after that long

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.workers]


class Router(Program):
    """A router that has been started."""

    def __init__(self, name: str, setup: Setup) -> None:
        command, env = ROUTERS[name](setup)
        super().__init__(f"{name}-{setup.port}", command, setup.folder, env)  # its log needs a name of its own
        self.name, self.port = name, setup.port


@dataclass(frozen=True, slots=True)
class Stage:
    """Who takes part, ours first; starts programs for a case, all of which are gone at the end of its stack."""

    names: Sequence[str]
    quick: bool
    folder: Path  # for configurations and logs
    stack: ExitStack
    arguments: Sequence[str] = ()  # of our router

    def open_routers(self, wanted: Sequence[tuple[str, Sequence[int], Sequence[str]]], **how: Any) -> list[Router]:
        """Start routers side by side, each a name, its workers' ports and more arguments. Return them once they forward
        requests and responses."""
        routers = []
        for name, workers, more in wanted:
            setup = Setup(self.folder, free_ports(1)[0], workers, (*self.arguments, *more), **how)
            routers.append(self.stack.enter_context(Router(name, setup)))
        for router in routers:
            router.wait_until(partial(_responds, router.port), START_S)
        return routers

    def open_light_workers(self, count: int) -> tuple[Program, list[int]]:
        """Start workers that cost next to nothing, so that the router is the slowest: one nginx, several ports."""
        ports = free_ports(count)
        listens = "".join(f"listen 127.0.0.1:{port};" for port in ports)
        http_block = f"server {{ {listens} location / {{ return 200 '{LIGHT_RESPONSE}'; }} }}"
        name = f"workers-{ports[0]}"
        command, env = nginx_command(self.folder / name, http_block)
        program = self.stack.enter_context(Program(name, command, self.folder, env))
        program.wait_until(partial(_listen, ports), START_S)
        return program, ports

    def open_workers(self, teams: Sequence[Sequence[Worker]]) -> list[Program]:
        """Start emulated workers, a process for each team, and wait for them."""
        programs = [
            self.stack.enter_context(Program(f"workers-{team[0].port}", Worker.command(team), self.folder))
            for team in teams
        ]
        for program, team in zip(programs, teams, strict=True):
            program.wait_until(partial(_listen, [worker.port for worker in team]), START_S)
        return programs


def _listen(ports: Sequence[int]) -> bool:
    return all(map(is_listened_to, ports))


def padded(name: str, fields: Mapping[str, Any]) -> str:
    """Return a JSON object of a kilobyte, filled up with a field of this name."""
    return json.dumps({**fields, name: "x" * (KILOBYTE - len(json.dumps({**fields, name: ""})))})


LIGHT_REQUEST = padded("prompt", {"model": "m", "max_tokens": 1})
# It also satisfies peers that ask a worker about itself.
LIGHT_RESPONSE = padded("text", {"id": "0", "worker": "light", **json.loads(ABOUT)})


def _responds(port: int) -> bool:
    try:
        answer = fetch(port, PATH, json.dumps({"model": "m", "max_tokens": 1, "prompt": "0 0 ready?"}))
        return answer.get("worker") is not None
    except (OSError, http.client.HTTPException):
        return False
    except ValueError as error:
        raise ContestantError(f"the router at port {port} changed a worker's response: {error}") from None


# How each router is started: its command, and what to add to the environment

Launch = tuple[Sequence[str], Mapping[str, str]]


def ours(setup: Setup) -> Launch:
    workers = [part for url in setup.urls for part in ("--worker", url)]
    timeout = [] if setup.response_timeout_s is None else ["--response-timeout", str(setup.response_timeout_s)]
    place = ["--host", "127.0.0.1", "--port", str(setup.port)]
    return [sys.executable, "-m", "practicum", "router", *workers, *place, *timeout, *setup.arguments], {}


def naive(setup: Setup) -> Launch:
    """verl's. It has no time limit and no health checks; it retries refused connections after two seconds."""
    return [Peer("verl").python, "-m", "bench.peers.verl_router", str(setup.port), *setup.urls], {}


def rust_router(name: str, log_level: str, setup: Setup) -> Launch:
    """Two cousins. Their default policy looks at the text, which costs: where speed counts they use round robin."""
    place = ["--host", "127.0.0.1", "--port", str(setup.port), "--prometheus-port", str(free_ports(1)[0])]
    policy = ["--policy", "round_robin"] if setup.lean else []
    timeout_s = setup.response_timeout_s
    timeout = [] if timeout_s is None else ["--request-timeout-secs", str(max(1, round(timeout_s)))]
    urls = ["--worker-urls", *setup.urls, "--log-level", log_level]
    return [Peer(name).python, "-m", f"{name}.launch_router", *place, *policy, *timeout, *urls], {}


def nginx(setup: Setup) -> Launch:
    servers = "\n".join(f"server 127.0.0.1:{port};" for port in setup.workers)
    timeout_s = setup.response_timeout_s
    # Requests to grade something may be sent twice, which nginx has to know.
    retries = "" if timeout_s is None else f"proxy_read_timeout {timeout_s:g}s; proxy_next_upstream {NGINX_RETRIES};"
    text = f"""
    upstream workers {{ least_conn; {servers} keepalive 128; }}
    server {{
      listen 127.0.0.1:{setup.port};
      location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; {retries} }}
    }}"""
    return nginx_command(setup.folder / f"nginx-{setup.port}", text)


def nginx_command(folder: Path, http: str) -> Launch:
    """Write a configuration with this `http` block into a folder of its own."""
    program, env = unpacked("nginx", "usr/sbin/nginx")
    folder.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    path = folder / "nginx.conf"
    path.write_text(f"""
    daemon off; worker_processes 1; pid {folder}/pid; error_log stderr error;
    events {{ worker_connections 4096; }}
    http {{
      access_log off; keepalive_requests 1000000000; keepalive_timeout 1h; default_type application/json; {temporary}
      {http}
    }}""")
    return [program, "-p", str(folder), "-e", "stderr", "-c", str(path)], env


def haproxy(setup: Setup) -> Launch:
    program, env = unpacked("haproxy", "usr/sbin/haproxy")
    timeout_s = 60.0 if setup.response_timeout_s is None else setup.response_timeout_s
    lines = [] if setup.lean else ["option httpchk GET /health"]
    lines += [] if setup.response_timeout_s is None else ["option redispatch 1", "retry-on all-retryable-errors"]
    check = "" if setup.lean else " check"
    lines += [f"server w{i} 127.0.0.1:{port}{check}" for i, port in enumerate(setup.workers)]
    backend, path = "\n  ".join(lines), setup.folder / f"haproxy-{setup.port}.conf"
    path.write_text(f"""
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 1s
  timeout client 60s
  timeout server {1000 * timeout_s:.0f}ms
frontend front
  bind 127.0.0.1:{setup.port}
  default_backend workers
backend workers
  balance leastconn
  http-reuse always
  {backend}
""")
    return [program, "-db", "-f", str(path)], env


ROUTERS: dict[str, Callable[[Setup], Launch]] = {
    OURS: ours,
    "naive": naive,
    "sglang_router": partial(rust_router, "sglang_router", "warn"),
    "vllm_router": partial(rust_router, "vllm_router", "warning"),
    "nginx": nginx,
    "haproxy": haproxy,
}
