"""Where detached groups are written down, so that another driver of the same cluster finds them by name.

A group is entered before its processes start, and again when they are there: whatever becomes of its driver, they can
be found and ended.
"""

from __future__ import annotations

import pickle
import time
from contextlib import ExitStack
from dataclasses import dataclass

import ray
from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from practicum.controller.crew import NAMESPACE, Crew, CrewPlan, actor_name, is_taken, wait_until_free
from practicum.errors import ResourceError, WorkerDied

_PREFIX = "group/"
_LET_GO_S = 20.0


@dataclass(frozen=True, slots=True)
class Entry:
    """`crew` is None while it is being started, which it is until `start_by` at the latest."""

    plan: CrewPlan
    start_by: float  # in seconds since the epoch, which drivers on several machines roughly share
    crew: Crew | None = None


def start(plan: CrewPlan) -> Crew:
    """Start a detached group under a name that no other has."""
    _clear_away_if_abandoned(plan.name)
    if is_taken(plan.name):
        raise ResourceError(f"a detached group {plan.name!r} runs already: attach to it, or shut it down first")
    entry = Entry(plan, time.time() + plan.start_timeout_s)
    _write(entry)
    with ExitStack() as undo:
        undo.callback(_internal_kv_del, _PREFIX + plan.name, namespace=NAMESPACE)
        crew = plan.start()
        undo.callback(crew.end)
        _write(Entry(plan, entry.start_by, crew))
        undo.pop_all()
    return crew


def end(crew: Crew) -> None:
    """End a group, unless the name meanwhile stands for workers that another driver has started."""
    name = crew.plan.name
    entry = _read(name)
    if entry is not None and (entry.crew is None or entry.crew.id != crew.id):
        raise WorkerDied(
            f"detached group {name!r} was started anew by another driver: attach to it again",
            group=name,
            ranks=range(len(crew.hosts)),
        )
    crew.end()
    wait_until_free(name, time.monotonic() + _LET_GO_S)
    _internal_kv_del(_PREFIX + name, namespace=NAMESPACE)


def find(name: str) -> Crew:
    entry = _read(name)
    if entry is not None and not is_taken(name):
        raise ResourceError(f"detached group {name!r} was started in this cluster, but its workers are gone")
    if entry is None:
        keys = _internal_kv_list(_PREFIX, namespace=NAMESPACE)
        known = ", ".join(sorted(key.decode().removeprefix(_PREFIX) for key in keys)) or "none"
        raise ResourceError(f"no detached group {name!r} runs in this cluster; those written down: {known}")
    if entry.crew is None:
        raise ResourceError(f"detached group {name!r} is not ready: its start has not ended, or was cut off")
    found = entry.crew
    return Crew.found(found.plan, found.hosts, found.seats, found.id)


def _clear_away_if_abandoned(name: str) -> None:
    """End what a driver left behind that was killed while it started the group."""
    entry = _read(name)
    if entry is None or entry.crew is not None or time.time() < entry.start_by:
        return
    for rank in range(entry.plan.pool.world_size):
        try:
            ray.kill(ray.get_actor(actor_name(name, rank), namespace=NAMESPACE))
        except ValueError:  # it did not get that far
            continue
    wait_until_free(name, time.monotonic() + _LET_GO_S)
    entry.plan.pool.release()


def _write(entry: Entry) -> None:
    _internal_kv_put(_PREFIX + entry.plan.name, cloudpickle.dumps(entry), namespace=NAMESPACE)


def _read(name: str) -> Entry | None:
    record = _internal_kv_get(_PREFIX + name, namespace=NAMESPACE)
    entry: Entry | None = None if record is None else pickle.loads(record)
    return entry
