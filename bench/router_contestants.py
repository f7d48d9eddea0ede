"""The routers that are compared, and how each is started.

Everyone is told the same workers. Where speed is measured, a peer runs as lean as it can; where faults are, it gets the
retries, health checks and time limits that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import Peer, UsageError
from bench.programs import free_ports, unpacked

OURS = "practicum"
OUR_PROGRAM = Path(sys.executable).with_name("practicum")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a router is to be started with."""

    folder: Path  # for files of its own; its name is not taken
    port: int
    workers: Sequence[int]  # their ports on the loopback interface
    lean: bool = False  # speed is all that counts
    response_timeout_s: float | None = None  # set where faults are measured: give up on a worker after that long
    arguments: Sequence[str] = ()  # more of them, for ours

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.workers]


@dataclass(frozen=True, slots=True)
class Launch:
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def ours(setup: Setup) -> Launch:
    if not OUR_PROGRAM.exists():
        raise UsageError(f"{OUR_PROGRAM} is missing: run the benchmark with the project's own interpreter.")
    workers = [part for url in setup.urls for part in ("--worker", url)]
    timeout = [] if setup.response_timeout_s is None else ["--response-timeout", str(setup.response_timeout_s)]
    place = ["--host", "127.0.0.1", "--port", str(setup.port)]
    return Launch([str(OUR_PROGRAM), "router", *workers, *place, *timeout, *setup.arguments])


def naive(setup: Setup) -> Launch:
    """verl's. It has no time limit and no health checks; it retries refused connections after two seconds."""
    return Launch([Peer("verl").python, "-m", "bench.peers.verl_router", str(setup.port), *setup.urls])


def sglang_router(setup: Setup) -> Launch:
    return _rust_router("sglang_router", setup, "warn")


def vllm_router(setup: Setup) -> Launch:
    return _rust_router("vllm_router", setup, "warning")


def _rust_router(name: str, setup: Setup, log_level: str) -> Launch:
    """The two are cousins. Its default policy looks at the text, which costs: where speed counts it takes turns."""
    place = ["--host", "127.0.0.1", "--port", str(setup.port), "--prometheus-port", str(free_ports(1)[0])]
    policy = ["--policy", "round_robin"] if setup.lean else []
    timeout_s = setup.response_timeout_s
    timeout = [] if timeout_s is None else ["--request-timeout-secs", str(max(1, round(timeout_s)))]
    urls = ["--worker-urls", *setup.urls, "--log-level", log_level]
    return Launch([Peer(name).python, "-m", f"{name}.launch_router", *place, *policy, *timeout, *urls])


def nginx(setup: Setup) -> Launch:
    program, env = unpacked("nginx", "usr/sbin/nginx")
    servers = "\n".join(f"server 127.0.0.1:{port};" for port in setup.workers)
    timeout_s = setup.response_timeout_s
    # Requests to grade something may be sent twice, which nginx must be told.
    patience = "" if timeout_s is None else f"proxy_read_timeout {timeout_s:g}s; proxy_next_upstream {NGINX_RETRIES};"
    text = f"""
    upstream workers {{ least_conn; {servers} keepalive 128; }}
    server {{
      listen 127.0.0.1:{setup.port};
      location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; {patience} }}
    }}"""
    return Launch([program, *nginx_arguments(setup.folder / f"nginx-{setup.port}", text)], env)


NGINX_RETRIES = "error timeout http_500 http_502 http_503 http_504 non_idempotent"


def nginx_arguments(folder: Path, http: str) -> list[str]:
    """Writes a configuration with what stands in its `http` block into a folder of its own."""
    folder.mkdir()
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = f"""
    daemon off; worker_processes 1; pid {folder}/pid; error_log stderr error;
    events {{ worker_connections 4096; }}
    http {{
      access_log off; keepalive_requests 1000000000; keepalive_timeout 1h; default_type application/json; {temporary}
      {http}
    }}"""
    path = folder / "nginx.conf"
    path.write_text(text)
    return ["-p", str(folder), "-e", "stderr", "-c", str(path)]


def haproxy(setup: Setup) -> Launch:
    program, env = unpacked("haproxy", "usr/sbin/haproxy")
    checked = "" if setup.lean else " check"
    servers = "\n".join(f"  server w{i} 127.0.0.1:{port}{checked}" for i, port in enumerate(setup.workers))
    timeout_s = 60.0 if setup.response_timeout_s is None else setup.response_timeout_s
    checks = "" if setup.lean else "  option httpchk GET /health"
    retries = "" if setup.response_timeout_s is None else "  option redispatch 1\n  retry-on all-retryable-errors"
    text = f"""
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
{checks}
{retries}
{servers}
"""
    path = setup.folder / f"haproxy-{setup.port}.conf"
    path.write_text(text)
    return Launch([program, "-db", "-f", str(path)], env)


ROUTERS: dict[str, Callable[[Setup], Launch]] = {
    OURS: ours,
    "naive": naive,
    "sglang_router": sglang_router,
    "vllm_router": vllm_router,
    "nginx": nginx,
    "haproxy": haproxy,
}
