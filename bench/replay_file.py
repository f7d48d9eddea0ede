"""`file`: a recording cut off anywhere, and one with a wrong bit anywhere. What can be read must be right.

A tiny model writes the samples; the recording is that of a run of some steps, in small chunks, so that there is
something left to read beside the damage.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.harness import Options, Row
from bench.replay_models import save_family
from bench.replay_work import routes_of, to_learn_from, write_samples
from practicum.errors import ReplayError
from practicum.models import load_model, load_tokenizer
from practicum.replay import Recording, RouteWriter, recording_header
from practicum.replay.records import RecordedSample
from practicum.rollout.native import NativeRollout
from practicum.types import Score

CUT, FLIPPED = "file, cut off", "file, a bit flipped"
NUM_STEPS, SAMPLES_PER_STEP, CHUNK_TOKENS = 4, 8, 80
NUM_DAMAGES, NUM_DAMAGES_QUICK = 1000, 50
_ARRAYS = ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions")


@dataclass(slots=True)
class Damage:
    """What became of a recording that was damaged many times, each time another way."""

    num: int = 0
    crashes: int = 0  # any error but one that says that the recording is spoilt
    wrong: int = 0  # samples that were returned, but not as they were written
    readable: int = 0  # samples returned as they were written
    left: float = 0.0  # sum of the shares of bytes that were left as they were

    def rows(self, case: str, num_samples: int) -> list[Row]:
        return [
            Row(case, f"crashes, of {self.num}", self.crashes, better="lower"),
            Row(case, "samples returned wrong", self.wrong, better="lower"),
            Row(
                case, "share of samples still readable", self.readable / num_samples / self.num,
                self.left / self.num, "share of bytes left",
            ),
        ]  # fmt: skip


def rows(options: Options) -> list[Row]:
    kinds = {CUT: cuts, FLIPPED: flips}
    if not any(map(options.wants, kinds)):
        return []
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        path = Path(name) / "routes.rec"
        records = record(path, Path(name) / "model")
        whole = path.read_bytes()
        for case, damaged in kinds.items():
            if options.wants(case):
                num = NUM_DAMAGES_QUICK if options.quick else NUM_DAMAGES
                found += suffered(path, whole, records, damaged, num).rows(case, len(records))
    return found


def record(path: Path, folder: Path) -> dict[str, RecordedSample]:
    """What was written there, by id."""
    save_family("qwen3_moe", folder)
    engine = NativeRollout(str(folder), device=torch.device("cpu"), dtype=torch.float32, max_batch=64, keep_routes=True)
    engine.resume()
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    records: dict[str, RecordedSample] = {}
    with RouteWriter(path, recording_header(model, tokenizer, 0, 1), CHUNK_TOKENS) as writer:
        for step in range(1, NUM_STEPS + 1):
            samples = write_samples(engine, SAMPLES_PER_STEP, (3, 8), 8, 16, seed=step)
            made = [
                RecordedSample(item.id, item.step, item.place, item, Score(1.0), own)
                for item, own in zip(to_learn_from(samples, step), routes_of(samples), strict=True)
            ]
            writer.append(made)
            records |= {one.id: one for one in made}
    engine.close()
    return records


def cuts(whole: bytes, dice: random.Random) -> Iterator[tuple[bytes, int]]:
    """Damaged bytes without end, and how many of them are as they were."""
    while True:
        length = dice.randrange(len(whole))
        yield whole[:length], length


def flips(whole: bytes, dice: random.Random) -> Iterator[tuple[bytes, int]]:
    while True:
        bit = dice.randrange(8 * len(whole))
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        yield bytes(spoilt), len(whole) - 1


def suffered(
    path: Path,
    whole: bytes,
    records: Mapping[str, RecordedSample],
    damaged: Callable[[bytes, random.Random], Iterator[tuple[bytes, int]]],
    num: int,
) -> Damage:
    found = Damage()
    dice = random.Random(0)
    for _, (data, left) in zip(range(num), damaged(whole, dice), strict=False):
        path.write_bytes(data)
        found.num += 1
        found.left += left / len(whole)
        try:
            read(path, records, found)
        except Exception as error:  # whatever it is, it should not be
            print(f"{type(error).__name__}: {error}", flush=True)
            found.crashes += 1
    return found


def read(path: Path, records: Mapping[str, RecordedSample], found: Damage) -> None:
    """All that can be had of it."""
    try:
        recording = Recording(path)
    except ReplayError:
        return
    with recording:
        for id in recording.ids:
            try:
                sample = recording.sample(id)
            except ReplayError:
                continue
            if id in records and same(sample, records[id]):
                found.readable += 1
            else:
                found.wrong += 1


def same(one: RecordedSample, other: RecordedSample) -> bool:
    """To the last bit."""
    pairs = [(getattr(one.training.sample, name), getattr(other.training.sample, name)) for name in _ARRAYS]
    pairs += [(one.training.advantages, other.training.advantages), (one.routes.known, other.routes.known)]
    known = other.routes.known
    return (
        (one.id, one.step, one.place, one.score) == (other.id, other.step, other.place, other.score)
        and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)
        and np.array_equal(one.routes.experts[known], other.routes.experts[known])
        and np.array_equal(one.routes.layers, other.routes.layers)
    )
