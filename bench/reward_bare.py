"""The bare math grader in the `reward` benchmark: what its samples cost without anything around them.

A plain loop over all of them in this process, and two such loops at once over half of them each: on cores that share
their caches or their arithmetic units, the same work takes more CPU time when both are busy.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence

from bench.contestant import Line, step
from bench.reward_functions import MATH
from bench.reward_items import math_items
from bench.reward_ours import make_sample
from bench.reward_work import CPU, NUM_WORKERS, Job, part_of
from practicum.reward.graders.math import Math
from practicum.types import Sample

ALONE, BOTH = "bare loop", "bare loops on both cores"


def loop_cpu_s(samples: Sequence[Sample]) -> float:
    grader = Math()
    before = time.process_time()
    for sample in samples:
        grader.grade(sample)
    return time.process_time() - before


def loops_cpu_s(samples: Sequence[Sample]) -> float:
    """Of as many loops at once as there are workers."""
    halves = [samples[rank::NUM_WORKERS] for rank in range(NUM_WORKERS)]
    with multiprocessing.get_context("fork").Pool(NUM_WORKERS) as pool:
        return sum(pool.map(loop_cpu_s, halves, chunksize=1))


def main() -> None:
    line = Line()
    job = Job.parse(sys.argv[1])
    seed = 0
    Math().prepare()
    line.ready(["math-verify"])
    while num_steps := line.wait_for_go():
        steps = []
        for _ in range(num_steps):
            began = time.perf_counter()
            samples = [make_sample(item, [1]) for item in math_items(job.loads[MATH].num_samples, seed)]
            # In this order: the two are forked from this process and would remember what it has just graded.
            both_s = loops_cpu_s(samples)
            parts = {part_of(ALONE, CPU): loop_cpu_s(samples), part_of(BOTH, CPU): both_s}
            steps.append(step(time.perf_counter() - began, 1, **parts))
            seed += 1
        line.answer(steps)


if __name__ == "__main__":
    main()
