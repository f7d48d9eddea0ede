"""Learning what a reward function looks like without importing its file here: that may hang, exit or crash."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import wait

from practicum.errors import RewardError
from practicum.reward.graders.function import FunctionShape, load_function, source_of

_IMPORT_S = 120.0
_STOP_S = 5.0


def probe_function(spec: str, timeout_s: float = _IMPORT_S) -> FunctionShape:
    """Return the signature of `path/to/file.py:name` or `package.module:name`, found out in a process that is thrown
    away.

    Raises RewardError if there is no such function, or it cannot be called with a sample.
    """
    try:
        changed_ns = os.stat(spec.rpartition(":")[0]).st_mtime_ns
    except (OSError, ValueError):
        changed_ns = 0
    return _probed(spec, changed_ns, os.getcwd(), timeout_s)


@functools.lru_cache(maxsize=64)
def _probed(spec: str, changed_ns: int, folder: str, timeout_s: float) -> FunctionShape:
    """Ask once for each state of the file."""
    told, telling = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "practicum.reward.graders.probe", spec, str(telling)],
            pass_fds=[telling],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    finally:
        os.close(telling)
    try:
        words = _read(told, time.monotonic() + timeout_s)
        if words is None:
            raise RewardError(f"reward.function={spec!r}: importing its file took longer than {timeout_s:g} s.")
        if not words:
            code = process.wait(_STOP_S)
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            raise RewardError(f"reward.function={spec!r}: the process that imported its file ended with {how}.")
    finally:
        os.close(told)
        process.kill()
        process.wait()
    found = json.loads(words)
    if "error" in found:
        raise RewardError(found["error"])
    return FunctionShape(**found)


def _read(fd: int, deadline: float) -> bytes | None:
    """Read until the other side closes it; None if that takes too long."""
    words = b""
    while wait([fd], max(0.0, deadline - time.monotonic())):  # select refuses descriptors from 1024 on
        data = os.read(fd, 1 << 16)
        if not data:
            return words
        words += data
    return None


def main() -> None:
    spec, telling = sys.argv[1], int(sys.argv[2])
    try:
        function = load_function(spec)
        found = {**function.shape.model_dump(), "source": source_of(function.function)}
    except RewardError as error:
        found = {"error": str(error)}
    os.write(telling, json.dumps(found).encode())
    os._exit(0)  # whatever threads the file has started


if __name__ == "__main__":
    main()
