"""`replay`: router replay: exactness, effect, cost, and what records take.

    exact    replay chooses what was recorded and changes nothing else, family by family and over ranks  replay_exact.py
    effect   how far trainer and rollout are apart in bfloat16, with replay and without                  replay_exact.py
    cost     what replay adds to the rollout and to the update                                           replay_cost.py
    size     bytes that records take, against plain arrays and the bound; how fast they are coded
    memory   what a large batch in flight takes as it travels
    file     recordings cut off, or with a wrong bit: what can be read, and is any of it wrong?

Routes are random (all combinations alike) or skewed: the i-th expert in popularity is wanted as 1/i (Zipf), in each
layer with an order of its own. The bound is that of random ones, log2 C(E, k) bits a layer; skewed ones may take less.
"""

from __future__ import annotations

import math
import pickle
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench import replay_cost, replay_exact
from bench.harness import Options, Outcome, Row
from practicum.errors import ReplayError
from practicum.replay import Recording, RecordingHeader, RouteWriter, coded
from practicum.replay.codec import decode_routes, encode_routes
from practicum.replay.combinations import Ids
from practicum.replay.records import RecordedSample
from practicum.types import Prompt, RoutedExperts, Sample, Score, route_dtype

SHAPES = [(8, 2, 32), (64, 8, 16), (128, 8, 48), (256, 8, 58), (512, 10, 48)]  # experts, k, layers
MEMORY = "memory, 1,024 samples of 16,384 tokens"
IN_FLIGHT, SAMPLE_TOKENS, IN_FLIGHT_SHAPE = 1024, 16384, (128, 8, 48)
KINDS, NUM_TIMED = ("random", "Zipf"), 5


def run(options: Options) -> Outcome:
    options.has_peer()  # knows none: ours is compared with itself
    cost = replay_cost.run(options)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small, and a second thread costs more than it brings
    try:
        rows = [*replay_exact.rows(options), *cost.rows]
        num_tokens = SAMPLE_TOKENS // 16 if options.quick else SAMPLE_TOKENS
        for shape in SHAPES:
            if options.wants(case := f"size {','.join(map(str, shape))}"):
                rows += size_rows(case, *shape, num_tokens)
        if options.wants(MEMORY):
            rows += memory_rows(num_tokens)
        for case, harm in (("file, cut off", cut_off), ("file, a bit flipped", flipped)):
            if options.wants(case):
                rows += damaged(case, harm, 50 if options.quick else 1000)
    finally:
        torch.set_num_threads(num_threads)
    return Outcome(rows, cost.environment)


# Sizes


def size_rows(case: str, num_experts: int, k: int, num_layers: int, num_tokens: int) -> list[Row]:
    found = []
    for kind in KINDS:
        experts = make_routes(num_tokens, num_layers, k, num_experts, skewed=kind == "Zipf")
        encoding, decoding = [], []
        for _ in range(NUM_TIMED):  # CPU seconds of this thread: one thread does all of it
            began = time.thread_time()
            code = encode_routes(experts, num_experts)
            between = time.thread_time()
            back = decode_routes(code, num_tokens, num_layers, k, num_experts)
            decoding.append(time.thread_time() - between)
            encoding.append(between - began)
        if not np.array_equal(back, experts):
            raise RuntimeError(f"routes of shape {experts.shape} come back different")
        plain = {
            "bound": num_layers * math.log2(math.comb(num_experts, k)) / 8,
            experts.dtype.name: num_layers * k * experts.itemsize,
            "int32": num_layers * k * 4,
        }
        size = len(code) / num_tokens
        found += [Row(case, f"bytes per token, {kind}", size, peer, name, "lower") for name, peer in plain.items()]
        for what, times in (("encode", encoding), ("decode", decoding)):
            rate = experts.nbytes / median(times) / 1e6
            found.append(Row(case, f"{what}, MB/s of {experts.dtype.name}, {kind}", rate))
    return found


def make_routes(num_tokens: int, num_layers: int, k: int, num_experts: int, skewed: bool) -> Ids:
    """Return routes [tokens, layers, k], ascending in each row."""
    dice = np.random.default_rng([num_experts, k, num_layers, skewed])
    routes = np.empty((num_tokens, num_layers, k), route_dtype(num_experts))
    for layer in range(num_layers):
        # The first k to come if each comes at its own rate: a draw without replacement by these weights.
        waits = dice.exponential(size=(num_tokens, num_experts))
        if skewed:
            waits *= dice.permutation(np.arange(1, num_experts + 1))
        routes[:, layer] = np.sort(np.argpartition(waits, k - 1)[:, :k])
    return routes


def memory_rows(num_tokens: int) -> list[Row]:
    """Measure one sample of that length, as the rest are alike."""
    num_experts, k, num_layers = IN_FLIGHT_SHAPE
    experts = make_routes(num_tokens, num_layers, k, num_experts, skewed=False)
    layers = np.arange(num_layers, dtype=np.int32)
    (travelling,) = coded([RoutedExperts(experts, layers, np.ones(num_tokens, np.bool_), num_experts)])
    whole = IN_FLIGHT * SAMPLE_TOKENS / num_tokens / 2**30
    ours = len(pickle.dumps(travelling, protocol=5)) * whole
    plain = {"uint8": experts.nbytes, "int32": 4 * experts.nbytes}
    return [Row(MEMORY, "GiB as they travel", ours, size * whole, name, "lower") for name, size in plain.items()]


# Damaged files

HEADER = RecordingHeader("bench-moe", tuple(range(16)), 64, 8, "bench-tokenizer")
NUM_SAMPLES, CHUNK_TOKENS = 24, 120  # of which some three samples make a chunk
Harmed = tuple[bytes, int, int]  # the file, and where the damage begins and ends


def cut_off(whole: bytes, dice: random.Random) -> Harmed:
    """Cut the file off at a random byte."""
    at = dice.randrange(len(whole))
    return whole[:at], at, len(whole)


def flipped(whole: bytes, dice: random.Random) -> Harmed:
    """Flip a random bit."""
    data, at = bytearray(whole), dice.randrange(len(whole))
    data[at] ^= 1 << dice.randrange(8)
    return bytes(data), at, at + 1


def damaged(case: str, harm: Callable[[bytes, random.Random], Harmed], num_files: int, seed: int = 0) -> list[Row]:
    """Open a damaged file so many times, and ask it for every sample."""
    records = {record.id: record for record in map(make_record, range(NUM_SAMPLES))}
    dice, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        path = Path(folder) / "recording"
        with RouteWriter(path, HEADER, CHUNK_TOKENS) as writer:
            writer.append(records.values())
        whole = path.read_bytes()
        with Recording(path) as recording:
            chunks = recording.files[0].chunks
        spans = {entry.id: (c.head.offset, c.head.offset + c.head.size) for c in chunks for entry in c.samples}
        for _ in range(num_files):
            data, start, end = harm(whole, dice)
            path.write_bytes(data)
            got: dict[str, RecordedSample] = {}
            try:
                with Recording(path) as recording:
                    for id in records:
                        try:
                            got[id] = recording.record(id)
                        except ReplayError:
                            counts["lost needlessly"] += end <= spans[id][0] or spans[id][1] <= start
            except ReplayError:
                continue  # the damage is in the header
            except Exception:
                counts["crashes"] += 1
                continue
            counts["read"] += len(got)
            counts["rows"] += sum(len(records[id].routes) for id in got) * len(HEADER.layers)
            counts["wrong rows"] += sum(num_wrong(records[id], record) for id, record in got.items())
    return [
        Row(case, f"crashes, of {num_files:,} files", counts["crashes"], better="lower"),
        Row(case, f"wrong rows, of {counts['rows']:,} given out", counts["wrong rows"], better="lower"),
        Row(case, "samples lost though the damage is elsewhere", counts["lost needlessly"], better="lower"),
        Row(case, "share of samples still readable", counts["read"] / (num_files * NUM_SAMPLES)),
    ]


def num_wrong(record: RecordedSample, got: RecordedSample) -> int:
    """Return the number of wrong token-layers; all of a sample when anything else of it is not as it was."""
    one, other = record.sample, got.sample
    arrays = ("prompt_ids", "token_ids", "log_probs", "loss_mask", "versions", "advantages")
    same = all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in arrays)
    if not same or one.text != other.text or not np.array_equal(record.routes.known, got.routes.known):
        return len(record.routes) * len(HEADER.layers)
    unlike = (record.routes.experts != got.routes.experts).any(-1) & record.routes.known[:, None]
    return int(unlike.sum())


def make_record(place: int) -> RecordedSample:
    dice = np.random.default_rng(place)
    prompt, answer = 12, int(dice.integers(10, 50))
    sample = Sample(
        prompt=Prompt(f"prompt-{place}", text=f"What is {place} + {place}?", answer=str(2 * place)),
        prompt_ids=dice.integers(0, 50_000, prompt).astype(np.int32),
        token_ids=dice.integers(0, 50_000, answer).astype(np.int32),
        log_probs=-dice.random(answer).astype(np.float32), loss_mask=np.ones(answer, np.bool_),
        versions=np.zeros(answer, np.int32), text=f"It is {2 * place}.", finish_reason="stop", id=f"sample-{place}",
        score=Score(1.0), advantages=np.full(answer, 0.5, np.float32),
    )  # fmt: skip
    shape = (prompt + answer, len(HEADER.layers), HEADER.num_experts)
    experts = np.sort(np.argsort(dice.random(shape), axis=-1)[..., : HEADER.k], axis=-1).astype(HEADER.dtype)
    known = np.arange(shape[0]) < shape[0] - 1
    routes = RoutedExperts(experts, np.array(HEADER.layers, np.int32), known, HEADER.num_experts)
    return RecordedSample(1, place, sample, routes)
