"""Scores kept on disk under what they were given for: the sample, the grader, its options and its version.

One small file a score, in 256 folders, put in place whole; several workers and machines may share the folder. Only
scores with status ok are kept: a failure is tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

from practicum.errors import RewardError
from practicum.types import Sample, Score

log = logging.getLogger("practicum.reward")


class ScoreCache:
    def __init__(self, folder: str | Path, version: str = "") -> None:
        """Open the folder. Scores kept under another `version` do not count."""
        self._folder = Path(folder)
        self._version = version
        self._has_complained = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RewardError(
                f"reward.cache.folder={str(folder)!r} cannot be made: {error.strerror or error}."
            ) from error

    def key(self, grader: str, sample: Sample) -> str:
        """Return the key of a score. `grader` is all that tells it from others: kind, options, version."""
        prompt = sample.prompt
        messages = None if prompt.messages is None else [[m.role, m.content] for m in prompt.messages]
        asked = [messages, prompt.text, prompt.answer, prompt.data_source, prompt.metadata]
        content = [self._version, grader, *asked, sample.text, sample.finish_reason]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode())
        digest.update(sample.token_ids.tobytes())
        return digest.hexdigest()

    def get(self, key: str) -> Score | None:
        """Return the score; None if there is none that can be read."""
        try:
            kept = json.loads(self._path(key).read_bytes())
            return Score(kept["value"], parts=kept["parts"], answer=kept.get("answer"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # half a file of a machine that went down, say: it is written anew

    def put(self, key: str, score: Score) -> None:
        """Keep a score. One that cannot be kept, on a full disk say, is still a score: the log says so once."""
        if score.status != "ok":
            return
        try:
            self._write(key, score)
        except OSError as error:
            if not self._has_complained:
                log.warning("scores cannot be kept in %s: %s", self._folder, error)
            self._has_complained = True

    def _write(self, key: str, score: Score) -> None:
        path = self._path(key)
        kept = {"value": score.value, "parts": dict(score.parts), "answer": score.answer}
        data = json.dumps(kept).encode()
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key[2:]


def fingerprint(folder: Path) -> str:
    """Hash a folder's files by name, size and time of change: a model is too large to be read for it."""
    states = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [[str(path.relative_to(folder)), state.st_size, state.st_mtime_ns] for path, state in states]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
