"""`size`: bytes that records take, random and skewed, against plain arrays and the bound; and how fast they are coded.
`memory`: what a large batch in flight takes as it travels.

Random: all combinations alike. Skewed: the i-th expert in popularity is wanted as 1/i (Zipf), each layer with an order
of its own. The bound is that of random ones, log2 C(E, k) bits a layer; skewed ones may stay below it.
"""

from __future__ import annotations

import math
import pickle
import time
from statistics import median

import numpy as np

from bench.harness import Options, Row
from practicum.replay import coded
from practicum.replay.codec import Ids, decode_routes, encode_routes
from practicum.types import RoutedExperts, route_dtype

SHAPES = [(8, 2, 32), (64, 8, 16), (128, 8, 48), (256, 8, 58), (512, 10, 48)]  # experts, k, layers
MEMORY = "memory, 1,024 samples of 16,384 tokens"
IN_FLIGHT, SAMPLE_TOKENS, IN_FLIGHT_SHAPE = 1024, 16384, (128, 8, 48)
BOUND = "bound"
KINDS = ("random", "Zipf")
NUM_TIMED = 5


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    for num_experts, k, num_layers in SHAPES:
        case = f"size {num_experts},{k},{num_layers}"
        if options.wants(case):
            found += size_rows(case, num_experts, k, num_layers, 1024 if options.quick else 16384)
    if options.wants(MEMORY):
        found += memory_rows(SAMPLE_TOKENS // 16 if options.quick else SAMPLE_TOKENS)
    return found


def size_rows(case: str, num_experts: int, k: int, num_layers: int, num_tokens: int) -> list[Row]:
    found = []
    for kind in KINDS:
        experts = make_routes(num_tokens, num_layers, k, num_experts, skewed=kind == "Zipf")
        code, encode_s, decode_s = timed(experts, num_experts)
        plain = {
            BOUND: num_layers * math.log2(math.comb(num_experts, k)) / 8,
            experts.dtype.name: num_layers * k * experts.itemsize,
            "int32": num_layers * k * 4,
        }
        size = len(code) / num_tokens
        found += [Row(case, f"bytes per token, {kind}", size, peer, name, "lower") for name, peer in plain.items()]
        found.append(Row(case, f"encode, MB/s of {experts.dtype.name}, {kind}", experts.nbytes / encode_s / 1e6))
        found.append(Row(case, f"decode, MB/s of {experts.dtype.name}, {kind}", experts.nbytes / decode_s / 1e6))
    return found


def timed(experts: Ids, num_experts: int) -> tuple[bytes, float, float]:
    """The code, and the CPU seconds of this thread for coding and reading it; all of it is one thread's work."""
    num_tokens, num_layers, k = experts.shape
    encoding, decoding = [], []
    for _ in range(NUM_TIMED):
        began = time.thread_time()
        code = encode_routes(experts, num_experts)
        between = time.thread_time()
        back = decode_routes(code, num_tokens, num_layers, k, num_experts)
        decoding.append(time.thread_time() - between)
        encoding.append(between - began)
    if not np.array_equal(back, experts):
        raise RuntimeError(f"routes of shape {experts.shape} come back different")
    return code, median(encoding), median(decoding)


def make_routes(num_tokens: int, num_layers: int, k: int, num_experts: int, skewed: bool) -> Ids:
    """[tokens, layers, k], ascending in each row."""
    random = np.random.default_rng([num_experts, k, num_layers, skewed])
    routes = np.empty((num_tokens, num_layers, k), route_dtype(num_experts))
    for layer in range(num_layers):
        # Who comes first if each comes at its own rate: a draw without replacement by these weights.
        waits = random.exponential(size=(num_tokens, num_experts))
        if skewed:
            waits *= random.permutation(np.arange(1, num_experts + 1))
        routes[:, layer] = np.sort(np.argpartition(waits, k - 1)[:, :k])
    return routes


def memory_rows(num_tokens: int) -> list[Row]:
    """From one sample of that length, as the rest are alike."""
    num_experts, k, num_layers = IN_FLIGHT_SHAPE
    experts = make_routes(num_tokens, num_layers, k, num_experts, skewed=False)
    layers = np.arange(num_layers, dtype=np.int32)
    (travelling,) = coded([RoutedExperts(experts, layers, np.ones(num_tokens, np.bool_), num_experts)])
    whole = IN_FLIGHT * SAMPLE_TOKENS / num_tokens / 2**30
    ours = len(pickle.dumps(travelling, protocol=5)) * whole
    plain = {"uint8": experts.nbytes, "int32": 4 * experts.nbytes}
    return [Row(MEMORY, "GiB as they travel", ours, size * whole, name, "lower") for name, size in plain.items()]
