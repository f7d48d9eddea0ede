"""A reward centre on Ray, and a stranger who knocks at every port that it listens at; prints what happened as JSON.

Run by test_strangers.py in a process of its own, and where it may in a network of its own, whose one interface stands
for the network between machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}

import psutil
import ray
from ray.cluster_utils import Cluster

from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.host import host_address
from practicum.controller.loop import run_sync
from practicum.reward import open_reward_centre
from practicum.reward.manager import RewardLoopManager
from practicum.types import PromptGroup, Score
from tests.models import save_classifier
from tests.reward.builders import groups_of, samples_of, scores_of
from tests.reward.fakes import FakeService

PER_NODE = {"num_cpus": 2, "object_store_memory": 80 * 1024 * 1024}
RAYS_OWN = ("gcs_server", "raylet", "ray/_private/", "ray/dashboard/", "ray/util/")
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/sleep", {}),
    ("POST", "/wake_up", {}),
    ("POST", "/update_weights", {"path": "/nowhere"}),
    ("POST", "/classify", {"input": "1+2=3"}),
    ("POST", "/v1/completions", {"prompt": "1+2=", "max_tokens": 1}),
    ("POST", "/log_probs", {"token_ids": [[1, 2]]}),
    ("POST", "/tokenize", {"prompt": "1"}),
    ("GET", "/v1/models", None),
    ("GET", "/router/workers", None),
    ("GET", "/router/metrics", None),
    ("POST", "/router/pause", {"url": "all"}),
    ("POST", "/router/version", {"version": 7}),
    ("POST", "/router/workers", {"url": "http://127.0.0.1:1"}),
    ("POST", "/score", {"text": "x"}),
]
# What the keeper of the limits would take for requests, and what a store of torch's would.
BYTES = [struct.pack("!BQQ", 1, number, 1) * 100 for number in (0, 7)] + [b"\x00\x3c\x85\xf7\xce", b""]


def listening() -> dict[tuple[str, int], psutil.Process | None]:
    found = {}
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr:
            with contextlib.suppress(psutil.NoSuchProcess):
                found[one.laddr.ip, one.laddr.port] = psutil.Process(one.pid) if one.pid else None
    return found


def is_rays(process: psutil.Process | None) -> bool:
    command = command_of(process)
    return any(name in command for name in RAYS_OWN) and not command.startswith("ray::")


def command_of(process: psutil.Process | None) -> str:
    with contextlib.suppress(psutil.Error):  # it has ended
        return "" if process is None else " ".join(process.cmdline())
    return ""


async def exchange(host: str, port: int, sent: bytes, timeout_s: float = 2.0) -> bytes:
    """What comes back until nothing more does."""
    reader, writer = await asyncio.open_connection(host, port)
    answered = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(timeout_s):
            writer.write(sent)
            while data := await reader.read(1 << 16):
                answered += data
    writer.close()
    return answered


async def knock(host: str, port: int) -> list[str]:
    """Return what was served, by what was asked."""
    served = []
    for method, path, fields in CALLS:
        body = b"" if fields is None else json.dumps(fields).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for extra in ("", "Authorization: Bearer \r\nX-Practicum-Token: \r\n"):
            sent = f"{head}{extra}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            answered = await exchange(host, port, sent)
            if answered.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.1 5")):
                served.append(f"{method} {path}: {answered[:80]!r}")
    for sent in BYTES:
        answered = await exchange(host, port, sent, 0.5)
        if answered and not answered.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"\x00\x00")):  # HTTP/2's greeting
            served.append(f"{sent[:20]!r}: {answered[:80]!r}")
    return served


async def graded(centre: RewardLoopManager) -> list[Any]:
    groups: list[PromptGroup] = groups_of([*samples_of("1+2=3", "4"), *samples_of("x", source="far")])
    await centre.grade(groups)
    scores: list[Score] = scores_of(groups)
    return [score.value if score.value is not None else score.reason for score in scores]


async def run(folder: Path, num_workers: int, old: set[tuple[str, int]]) -> dict[str, Any]:
    with (
        FakeService({"score": 0.25}) as service,
        open_controller("ray", num_workers=num_workers, use_gpu=False, max_colocate_count=3) as controller,
    ):
        config = RewardConfig.model_validate(
            {
                "grader": "classifier",
                "sources": {"far": [{"grader": "endpoint", "options": {"urls": [service.url + "/score"]}}]},
                "model": {"path": str(folder), "placement": "standalone", "replicas": 1},
                "limits": {"concurrency": 4},
            }
        )
        async with open_reward_centre(config, controller) as centre:
            models = centre.models
            assert models is not None
            before = await graded(centre)
            workers = models.router.workers()
            ports = {place: process for place, process in listening().items() if place not in old}
            ours = {place: process for place, process in ports.items() if not is_rays(process)}
            theirs = int(service.url.rpartition(":")[2])
            silent = [socket.create_connection(place) for place in ours for _ in range(3)]
            doors = [place for place in ours if place[1] != theirs]
            served = dict(zip(map(str, doors), await asyncio.gather(*(knock(*place) for place in doors)), strict=True))
            after = await graded(centre)
            for one in silent:
                one.close()
            commands = list(map(command_of, psutil.process_iter()))
            secret = getattr(controller, "secret", "no secret")
            states = ("url", "state", "version", "limit")
            return {
                "address": controller.address,
                "bound": {f"{host}:{port}": command_of(process)[:80] for (host, port), process in ours.items()},
                "servers": [models.url, *(worker["url"] for worker in workers)],
                "before": before,
                "after": after,
                "served": {door: found for door, found in served.items() if found},
                "unchanged": [[one[name] for name in states] for one in workers]
                == [[one[name] for name in states] for one in models.router.workers()],
                "told_on_a_command_line": any(secret in command for command in commands),
            }


def main() -> None:
    logging.disable(logging.CRITICAL)
    old = set(listening())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_classifier(Path(folder))
        num_nodes = int(sys.argv[1])
        if num_nodes > 1:
            cluster = Cluster(initialize_head=True, head_node_args=PER_NODE)
            stack.callback(cluster.shutdown)
            for _ in range(num_nodes - 1):
                cluster.add_node(**PER_NODE)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            stack.callback(ray.shutdown)
        facts = run_sync(run(Path(folder), num_nodes, old))
        print(json.dumps(facts | {"host_address": host_address()}))


if __name__ == "__main__":
    main()
