"""`rollout`: the native engine against transformers, TRL and vLLM; against the machine; in training; its promises.

contest   equal, mixed, different, shared; dense and moe   ours and the peers                    in turns
alone     share of the matrix rate, log-probs, greedy      ours                                  a step each
demo      the demonstration's training, its accuracy       rollout.engine=native and =hf         in turns
weights   a version from trainer to engine, by channel     memcpy                                in turns
promises  kill, update under load, conversation            ours                                  once
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median

import psutil
import torch
from torch import Tensor

from bench.grpo import OURS, rate_rows
from bench.harness import Options, Outcome, Peer, Row, UsageError, asked_peers
from bench.models import VOCABULARY, write_model
from bench.overlap import write_demo
from bench.rollout_work import DENSE, MOE, Job, make_cases
from bench.turns import Plan, Tally, alternate, cpu_environment, opened
from practicum.weights import ChannelSettings, WeightReceiver
from tests.weights.sending import TrainerProcess

IN_ENVIRONMENTS_OF_THEIR_OWN = ("trl", "vllm")
PEERS = ("generate", "continuous_batching", *IN_ENVIRONMENTS_OF_THEIR_OWN)
CHECKS = {"log-probs": "largest difference to a full forward pass", "greedy": "families with the tokens of generate"}
PROMISES = ("conversation", "kill, update under load")  # whose contestant ends with the replicas
NUM_TURNS, WITHOUT = 50, "without"
HIGHER = ("turns with a tool", "tokens less, had its text been tokenised again", "by the old weights",
          "by the new weights", CHECKS["greedy"])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    plan: Plan
    demo: Plan
    num_prompts: int = 64
    num_new: int = 64
    num_looks: int = 5  # at what is checked of ours alone and depends on the machine
    demo_steps: int = 150  # in all; those that are timed are among the first
    demo_backend: str = "ray"
    weights: tuple[int, int] = (500_000_000, 7)  # bytes, and rounds
    promised_tokens: int = 48  # of each answer of the replicas
    end_s: float = 3.0  # then contestants are killed: nothing of worth is left in them
    environment: Mapping[str, str] | None = None  # of all contestants


FULL = Sizes(
    Plan(warmup_steps=1, num_rounds=7, steps_per_turn=1, extra_rounds=14, patience_s=300, turn_s=600),
    Plan(warmup_steps=4, num_rounds=8, steps_per_turn=5, extra_rounds=16, patience_s=300),
)
QUICK = Sizes(
    Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1), Plan(warmup_steps=1, num_rounds=1, steps_per_turn=2),
    num_prompts=8, num_new=8, num_looks=1, demo_steps=4, weights=(20_000_000, 2), promised_tokens=16,
    demo_backend="local",  # starting Ray twice takes too long for a quick run
    # They get ready all at once: threads that spin while they wait for each other would take the cores from the others.
    end_s=0.3, environment={"OMP_WAIT_POLICY": "passive"},
)  # fmt: skip


def run(options: Options) -> Outcome:
    """`--peer none` is ours alone; the demo and the weights stay, whose other side is ours or a plain copy."""
    sizes = QUICK if options.quick else FULL
    commands, missing = peer_commands(options.peer)
    where: dict[str, object] = {"sizes": asdict(sizes), "threads": os.cpu_count(), "peers_not_installed": missing}
    cases = make_cases(sizes.num_prompts, sizes.num_new)
    wanted, checks, promised = (list(filter(options.wants, names)) for names in (cases, CHECKS, PROMISES))
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as name:
        folder = Path(name)
        outcomes: list[Outcome] = []
        if wanted or checks:
            models = {model: str(folder / model) for model in (DENSE, MOE)}
            own = {name: cases[name] for name in wanted or cases}
            job = Job(models, own, os.cpu_count() or 1, VOCABULARY, options.quick)
            outcomes.append(contest(job, commands if wanted else {}, checks, wanted, sizes, folder))
        parts: list[Callable[[], Outcome]] = [partial(demo, sizes, folder)] if options.wants("demo") else []
        parts += [partial(weights, *sizes.weights)] if options.wants("weights") else []
        parts += [partial(promises, promised, sizes, folder)] if promised else []
        with ThreadPoolExecutor(3 if options.quick else 1) as pool:
            outcomes += pool.map(lambda part: part(), parts)
    for found in outcomes:
        where |= found.environment
    return Outcome([row for found in outcomes for row in found.rows], where)


def peer_commands(asked: str | None) -> tuple[dict[str, list[str]], list[str]]:
    """Return the peers' programs, and the peers that are not installed and left out. One asked for must be."""
    commands, missing = {}, []
    for name in asked_peers(asked, PEERS):
        try:
            python = Peer(name).python if name in IN_ENVIRONMENTS_OF_THEIR_OWN else sys.executable
            commands[name] = [python, "-m", "bench.peers.rollout"]
        except UsageError as error:
            if asked is not None:
                raise
            print(f"left out: {error}", file=sys.stderr, flush=True)
            missing.append(name)
    if "vllm" in commands:
        # As its manual asks for; and in one process with all cores, where it would keep one for its second process.
        runtime = Path(commands["vllm"][0]).parent.parent / "lib" / "libiomp5.so"
        settings = ["VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_NO_USAGE_STATS=1"]
        settings += ["VLLM_CPU_KVCACHE_SPACE=1", *([f"LD_PRELOAD={runtime}"] if runtime.exists() else [])]
        commands["vllm"] = ["env", *settings, *commands["vllm"]]
    return commands, missing


# The contest, and what is checked of ours alone


def contest(
    job: Job, peers: Mapping[str, list[str]], checks: Sequence[str], cases: Sequence[str], sizes: Sizes, folder: Path
) -> Outcome:
    for model in job.models_used():
        write_model(Path(job.models[model]), mixture_of_experts=model == MOE)
    plan = sizes.plan
    programs = {OURS: [sys.executable, "-m", "bench.rollout_ours"], **peers}
    commands = {name: [*program, job.dump(), name] for name, program in programs.items()}
    rows: list[Row] = []
    others: dict[str, float] = {}
    env = cpu_environment(job.threads) | dict(sizes.environment or {})
    with opened(commands, folder, env, sizes.end_s) as everyone:
        ours = everyone[0]
        ours.ready(plan.start_s)
        found = {check: ours.go(1, plan.turn_s, check)[0].amount for check in checks}  # while the others get ready
        versions = {one.name: one.ready(plan.start_s) for one in everyone}
        for case in cases:
            tallies = alternate(everyone, plan, case)
            looks = Tally(ours.go(sizes.num_looks, plan.turn_s, f"matrix rate, {case}"))
            rows += [*rate_rows(case, tallies), Row(case, "share of the matrix rate", looks.rate)]
            others[case] = round(tallies[OURS].others_share, 3)
    rows += [row for check, value in found.items() for row in alone_rows(check, {CHECKS[check]: value})]
    return Outcome(rows, {"versions": versions, "cpu_share_of_others": others})


# The demonstration's training


def demo(sizes: Sizes, folder: Path) -> Outcome:
    """Measure each engine's speed, and its accuracy on held-out problems when it has trained to the end."""
    write_demo(folder, warms_up=sizes is FULL)
    program = [sys.executable, "-m", "bench.contestants.practicum_grpo", "demo", str(folder)]
    alike = [
        f"controller.backend={sizes.demo_backend}", f"trainer.steps={sizes.demo_steps}",
        "trainer.checkpoint_every=0", "validation.every=0",  # nothing but training steps until the last
        "actor.router_replay.mode=disabled",  # not every engine keeps routes, and both are to do the same
    ]  # fmt: skip
    own = {engine: [f"rollout.engine={engine}", f"trainer.run_dir={folder / engine}"] for engine in ("native", "hf")}
    commands = {engine: [*program, *alike, *overrides] for engine, overrides in own.items()}
    with opened(commands, folder, sizes.environment, sizes.end_s) as contestants:
        tallies = alternate(contestants, sizes.demo)
        accuracy = {one.name: one.go(1, sizes.demo.turn_s, "accuracy")[0].amount for one in contestants}
    return Outcome(demo_rows(tallies, accuracy), {"demo_cpu_share_of_others": round(tallies["hf"].others_share, 3)})


def demo_rows(tallies: Mapping[str, Tally], accuracy: Mapping[str, float]) -> list[Row]:
    ours, theirs = tallies["native"], tallies["hf"]
    return [
        Row("demo", "tokens/s", ours.rate, theirs.rate, "hf"),
        Row("demo", "s of a step for rollout", ours.parts()["rollout"], theirs.parts()["rollout"], "hf", "lower"),
        Row("demo", "CPU s per 1000 tokens", ours.cpu_s_per_1000, theirs.cpu_s_per_1000, "hf", "lower"),
        Row("demo", "held-out accuracy at the end", accuracy["native"], accuracy["hf"], "hf"),
    ]


# A version of the weights, from a trainer's process into an engine's
#
# The clock runs from the order to send until the last tensor is copied into the engine's own memory. CPU time is that
# of both processes together. Channels and memcpy take turns, so that all see the same machine.

CHANNELS, MEMCPY = ("shm", "collective", "disk"), "memcpy"
NUM_TENSORS, PATIENCE_S = 100, 120.0


def weights(num_bytes: int, num_rounds: int) -> Outcome:
    # CPU times of processes come in hundredths of a second: their mean says more than their median.
    times = {name: (median(s), fmean(cpu_s)) for name, (s, cpu_s) in measured(num_bytes, num_rounds).items()}
    case = f"weights, {num_bytes // 1_000_000} MB of float32"
    memcpy_s, memcpy_cpu_s = times[MEMCPY]
    rows = []
    for channel in CHANNELS:
        seconds, cpu_s = times[channel]
        rows.append(Row(case, f"GB/s by {channel}", num_bytes / 1e9 / seconds, num_bytes / 1e9 / memcpy_s, MEMCPY))
        rows.append(Row(case, f"CPU s by {channel}", cpu_s, memcpy_cpu_s, MEMCPY, better="lower"))
    return Outcome(rows)


def measured(num_bytes: int, num_rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds and CPU seconds of each round, by channel."""
    torch.set_num_threads(1)
    engine = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(num_bytes)}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (MEMCPY, *CHANNELS)}

    def copy(received: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in received:
            engine[name].copy_(tensor)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weights-"))
        settings = {name: ChannelSettings(PATIENCE_S, folder=f"{folder}/{name}") for name in CHANNELS}
        trainers = {name: stack.enter_context(TrainerProcess(name, own)) for name, own in settings.items()}
        receiver = WeightReceiver(PATIENCE_S)
        for version in range(num_rounds + 1):  # the first is for warming up
            for name, (seconds, cpu_s) in times.items():
                trainer = trainers.get(name)
                began, cpu_began = time.perf_counter(), used_s(trainer)
                if trainer is None:
                    copy(tensors_of(num_bytes))
                else:
                    update, sending = trainer.pass_on(receiver, version, tensors_of, num_bytes)
                    copy(update.tensors)
                    sending.result(PATIENCE_S)
                if version:
                    seconds.append(time.perf_counter() - began)
                    cpu_s.append(used_s(trainer) - cpu_began)
    return times


@cache
def tensors_of(num_bytes: int) -> list[tuple[str, Tensor]]:
    """Return those of a process, which are made once."""
    return [(f"layers.{index}.weight", torch.randn(num_bytes // 4 // NUM_TENSORS)) for index in range(NUM_TENSORS)]


def used_s(trainer: TrainerProcess | None) -> float:
    """Return the CPU seconds of this process and the trainer's so far."""
    theirs = 0.0 if trainer is None else sum(psutil.Process(trainer.process.pid).cpu_times()[:2])
    return time.process_time() + theirs


# What is promised


def promises(names: Sequence[str], sizes: Sizes, folder: Path) -> Outcome:
    words = ["promises", str(folder), str(sizes.promised_tokens), str(NUM_TURNS)]
    commands = {"promises": [sys.executable, "-m", "bench.rollout_ours", *words]}
    with opened(commands, folder, sizes.environment, sizes.end_s) as (one,):
        one.ready(sizes.plan.start_s)
        counts = {name: one.go(1, sizes.plan.turn_s, name)[0].parts for name in names}
    return Outcome([row for name in names for row in alone_rows(name, counts[name])])


def alone_rows(case: str, counts: Mapping[str, float]) -> list[Row]:
    """Return what was counted of ours alone, by its metrics."""
    rows = []
    for metric, value in counts.items():
        peer, name = (counts[WITHOUT], WITHOUT) if metric == "s with a kill" else (None, None)
        if metric != WITHOUT:
            rows.append(Row(case, metric, value, peer, name, "higher" if metric in HIGHER else "lower"))
    return rows
