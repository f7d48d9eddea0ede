"""`file`: a recording cut off at random bytes, and one with a flipped bit: what can be read, and is any of it wrong?"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.harness import Options, Row
from practicum.errors import ReplayError
from practicum.replay.format import RecordingHeader
from practicum.replay.records import RecordedSample
from practicum.replay.store import Recording, RouteWriter
from practicum.types import Prompt, RoutedExperts, Sample, Score, TrainingSample

HEADER = RecordingHeader("bench-moe", tuple(range(16)), 64, 8, "bench-tokenizer")
NUM_SAMPLES = 24
CHUNK_TOKENS = 120  # some three samples
CUT_OFF, FLIPPED = "file, cut off", "file, a bit flipped"
NUM_FILES, NUM_FILES_QUICK = 1000, 50


@dataclass(slots=True)
class Damage:
    """What came of opening a damaged file so many times, and asking it for every sample."""

    num_files: int = 0
    num_refused: int = 0  # files that could not be opened: the damage is in the header
    num_rows: int = 0  # token-layers that were given out
    num_refused_samples: int = 0  # missing, or a ReplayError
    num_wrong_rows: int = 0  # given out though they are not what was recorded
    num_crashes: int = 0  # any exception but a ReplayError
    num_lost_needlessly: int = 0  # samples not given out though the damage is not in their chunk

    @property
    def readable_share(self) -> float:
        """Of the samples of all files."""
        num_lost = self.num_refused_samples + (self.num_refused + self.num_crashes) * NUM_SAMPLES
        return 1 - num_lost / (self.num_files * NUM_SAMPLES)

    def rows(self, case: str) -> list[Row]:
        return [
            Row(case, f"crashes, of {self.num_files:,} files", self.num_crashes, better="lower"),
            Row(case, f"wrong rows, of {self.num_rows:,} given out", self.num_wrong_rows, better="lower"),
            Row(case, "samples lost though the damage is elsewhere", self.num_lost_needlessly, better="lower"),
            Row(case, "share of samples still readable", self.readable_share),
        ]


def rows(options: Options) -> list[Row]:
    num = NUM_FILES_QUICK if options.quick else NUM_FILES
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        for case, suffer in ((CUT_OFF, cut_off), (FLIPPED, flipped)):
            if options.wants(case):
                found += suffer(num, Path(folder)).rows(case)
    return found


def cut_off(num_files: int, folder: Path, seed: int = 0) -> Damage:
    """The file ends at random bytes."""

    def damaged(whole: bytes, dice: random.Random) -> tuple[bytes, int, int]:
        at = dice.randrange(len(whole))
        return whole[:at], at, len(whole)

    return _damage(damaged, num_files, folder, seed)


def flipped(num_files: int, folder: Path, seed: int = 0) -> Damage:
    """One bit is another."""

    def damaged(whole: bytes, dice: random.Random) -> tuple[bytes, int, int]:
        data, at = bytearray(whole), dice.randrange(len(whole))
        data[at] ^= 1 << dice.randrange(8)
        return bytes(data), at, at + 1

    return _damage(damaged, num_files, folder, seed)


def _damage(
    damaged: Callable[[bytes, random.Random], tuple[bytes, int, int]], num_files: int, folder: Path, seed: int
) -> Damage:
    """`damaged` gives a file's bytes, and where the damage begins and ends."""
    records = {record.id: record for record in _records()}
    path = folder / "recording"
    with RouteWriter(path, HEADER, CHUNK_TOKENS) as writer:
        writer.append(records.values())
    whole = path.read_bytes()
    with Recording(path) as recording:
        chunks = recording.files[0].chunks
    spans = {entry.id: (c.head.offset, c.head.offset + c.head.size) for c in chunks for entry in c.samples}
    dice, found = random.Random(seed), Damage(num_files)
    for _ in range(num_files):
        data, start, end = damaged(whole, dice)
        path.write_bytes(data)
        got: dict[str, RecordedSample] = {}
        try:
            with Recording(path) as recording:
                for id in records:
                    try:
                        got[id] = recording.sample(id)
                    except ReplayError:
                        found.num_refused_samples += 1
        except ReplayError:
            found.num_refused += 1
            continue
        except Exception:
            found.num_crashes += 1
            continue
        for id, record in records.items():
            if id in got:
                found.num_rows += len(record.routes) * len(HEADER.layers)
                found.num_wrong_rows += _num_wrong(record, got[id])
            elif not (spans[id][0] < end and start < spans[id][1]):
                found.num_lost_needlessly += 1
    os.unlink(path)
    return found


def _num_wrong(record: RecordedSample, got: RecordedSample) -> int:
    """Token-layers; all of a sample when anything else of it is not as it was."""
    rows = len(record.routes) * len(HEADER.layers)
    one, other = record.training.sample, got.training.sample
    arrays = ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions")
    same = all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in arrays)
    same = same and record.training.advantages.tobytes() == got.training.advantages.tobytes()
    if not same or one.text != other.text or not np.array_equal(record.routes.known, got.routes.known):
        return rows
    unlike = (record.routes.experts != got.routes.experts).any(-1) & record.routes.known[:, None]
    return int(unlike.sum())


def _records() -> Iterator[RecordedSample]:
    dice = np.random.default_rng(0)
    for place in range(NUM_SAMPLES):
        prompt, answer = 12, int(dice.integers(10, 50))
        sample = Sample(
            prompt=Prompt(f"prompt-{place}", text=f"What is {place} + {place}?", answer=str(2 * place)),
            prompt_ids=dice.integers(0, 50_000, prompt).astype(np.int32),
            token_ids=dice.integers(0, 50_000, answer).astype(np.int32),
            log_probs=-dice.random(answer).astype(np.float32),
            loss_mask=np.ones(answer, np.bool_),
            versions=np.zeros(answer, np.int32),
            text=f"It is {2 * place}.",
            finish_reason="stop",
        )
        shape = (prompt + answer, len(HEADER.layers), HEADER.num_experts)
        experts = np.sort(np.argsort(dice.random(shape), axis=-1)[..., : HEADER.k], axis=-1).astype(HEADER.dtype)
        known = np.arange(shape[0]) < shape[0] - 1
        routes = RoutedExperts(experts, np.array(HEADER.layers, np.int32), known, HEADER.num_experts)
        training = TrainingSample(sample, np.full(answer, 0.5, np.float32))
        yield RecordedSample(f"sample-{place}", 1, place, training, Score(1.0), routes)
