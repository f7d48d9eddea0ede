"""`replay`: router replay, whether it is exact, what it changes, what it costs, and what its records take.

    exact    seven families, and two ranks against one     the live router             replay_exact.py
    effect   three models in bfloat16                      replay disabled             replay_effect.py
    cost     rollout, update                               replay disabled             replay_cost.py, in turns
    size     records of five shapes; memory in flight      plain arrays, the bound     replay_size.py
    file     recordings cut off, or with a wrong bit                                   replay_damage.py

The other side is ours too, or arithmetic: there is no peer to install.
"""

from __future__ import annotations

from bench.harness import Options, Outcome, UsageError

THREADS = 1  # in this process: the matrices are small, and a second thread costs more than it brings


def run(options: Options) -> Outcome:
    if options.peer not in (None, "none"):
        raise UsageError(f"peer {options.peer!r} is not known here; known: none. Ours is compared with itself.")
    # They bring torch, which other benchmarks can do without.
    import torch

    from bench import replay_cost, replay_damage, replay_effect, replay_exact, replay_size

    cost = replay_cost.run(options)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        before = [*replay_exact.rows(options), *replay_effect.rows(options)]
        after = [*replay_size.rows(options), *replay_damage.rows(options)]
    finally:
        torch.set_num_threads(num_threads)
    return Outcome([*before, *cost.rows, *after], cost.environment)
