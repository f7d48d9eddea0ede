"""Starting and leaving Ray: embedded on this machine for the run, or joined by address."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from practicum.errors import ResourceError


@contextmanager
def ray_cluster(address: str | None = None) -> Iterator[None]:
    """Ray for the time of a `with` block. Processes started here end with it; a Ray that was already up stays up."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The first failure of a call is raised to the caller; the same failure on other ranks need not be printed as well.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # An actor without an accelerator keeps the driver's view of the devices instead of a changed environment.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"join the Ray cluster at {address!r}" if address else "start Ray on this machine"
        raise ResourceError(f"could not {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
