"""Where detached groups are written down, so that another driver of the same cluster finds them by name."""

from __future__ import annotations

import pickle
import time

import ray
from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from practicum.controller.crew import NAMESPACE, Crew, actor_name
from practicum.errors import ResourceError

_PREFIX = "group/"


def enter(crew: Crew) -> None:
    _internal_kv_put(_PREFIX + crew.name, cloudpickle.dumps(crew), namespace=NAMESPACE)


def strike_out(crew: Crew, timeout_s: float = 10.0) -> None:
    """Forget the group, and wait until Ray has given its name free."""
    _internal_kv_del(_PREFIX + crew.name, namespace=NAMESPACE)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and is_taken(crew.name):
        time.sleep(0.02)


def is_taken(name: str) -> bool:
    try:
        ray.get_actor(actor_name(name, 0), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def find(name: str) -> Crew:
    record = _internal_kv_get(_PREFIX + name, namespace=NAMESPACE)
    if record is None or not is_taken(name):
        keys = _internal_kv_list(_PREFIX, namespace=NAMESPACE)
        known = ", ".join(sorted(key.decode().removeprefix(_PREFIX) for key in keys)) or "none"
        raise ResourceError(f"no detached group {name!r} runs in this cluster; those written down: {known}")
    crew: Crew = pickle.loads(record)
    return crew
