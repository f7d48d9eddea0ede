"""What would keep replicas from starting, found out before anything is started: questions that cost little.

They are asked on this machine. What cannot be known from here, such as what a cluster has free, is left to the start.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from practicum.config import RolloutConfig
from practicum.errors import RolloutError

_ASK_S = 5.0
_SHUT = (401, 403)


def engine_problems(config: RolloutConfig, *, runs_here: bool) -> list[str]:
    """Of the engine, by itself; empty where it should start. `runs_here`: its processes are on this machine."""
    if config.engine == "vllm" and runs_here:
        from practicum.rollout.vllm.engine import check_installed

        try:
            check_installed(config.vllm.python, in_process=config.vllm.in_process)
        except RolloutError as error:
            return [str(error)]
    if config.engine == "openai":
        return _server_problems(config)
    return []


def room_problems(config: RolloutConfig, *, num_places: int, num_free: int | None, unit: str) -> list[str]:
    """Of the places for its replicas. `num_places` are the trainer's; `num_free` is how many a `unit` (GPU or CPU) are
    left beside them, None: not known."""
    if config.placement == "hybrid" or config.engine == "openai":
        return []
    wanted = 1 if config.replicas == "auto" else config.replicas
    if config.placement == "colocated":
        if wanted <= num_places:
            return []
        places = f"the trainer has room for {num_places} beside it, one a worker (trainer.num_workers)"
        return [f"rollout.replicas={wanted}, but {places}: lower rollout.replicas, or leave it at auto."]
    each = config.vllm.tensor_parallel if config.engine == "vllm" and unit == "GPU" else 1
    if num_free is None or wanted * each <= num_free:
        return []
    need = f"{wanted * each} {unit}{'s' if wanted * each > 1 else ''}"
    of = "" if each == 1 else f" ({wanted} replicas of {each})"
    return [
        f"rollout.placement=standalone needs {need}{of} beside the trainer's, and this machine has {max(0, num_free)}: "
        "lower rollout.replicas or trainer.num_workers, or use rollout.placement=colocated."
    ]


def _server_problems(config: RolloutConfig) -> list[str]:
    from practicum.rollout.openai import api_key, server_address

    try:
        servers = [server_address(server) for server in config.openai.servers]
        key = api_key(config.openai.api_key_env)
    except RolloutError as error:
        return [str(error)]
    with ThreadPoolExecutor(len(servers)) as threads:
        found = threads.map(lambda server: _problem_of(server, key), servers)
    return [problem for problem in found if problem]


def _problem_of(server: str, key: str | None) -> str:
    """Whoever answers at all is there; whether it can be used is found out when it is asked to write."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{server}/v1/models", headers=headers), timeout=_ASK_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _SHUT:
                return (
                    f"server {server} wants another token ({error.code}): set rollout.openai.api_key_env to the name "
                    "of the environment variable that holds it."
                )
            return f"server {server} is in trouble: it answered {error.code}." if error.code >= 500 else ""
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"server {server} does not answer ({reason}): start it, or take it out of rollout.openai.servers."
