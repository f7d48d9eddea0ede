"""`rollout`: the native engine against transformers, TRL and vLLM; against the machine; in training; its promises.

    contest   equal, mixed, different, shared; dense and moe   ours and the peers                    in turns
    alone     share of the matrix rate, log-probs, greedy      ours                                  a step each
    demo      the demonstration's training, its accuracy       rollout.engine=native and =hf         in turns
    weights   a version from trainer to engine, by channel     memcpy; see rollout_weights.py        in turns
    promises  kill, update under load, conversation            ours; see rollout_promises.py         once

The work is in rollout_work.py, our side in rollout_ours.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from bench.grpo import OURS, rate_rows
from bench.harness import Options, Outcome, Peer, Row, UsageError, asked_peers
from bench.models import VOCABULARY, write_model
from bench.overlap import write_demo
from bench.rollout_work import DENSE, MOE, Job, make_cases
from bench.turns import Plan, Tally, alternate, cpu_environment, opened

GENERATE, CONTINUOUS, TRL, VLLM = "generate", "continuous_batching", "trl", "vllm"
PEERS = (GENERATE, CONTINUOUS, TRL, VLLM)
LOG_PROBS, GREEDY, DEMO, WEIGHTS = "log-probs", "greedy", "demo", "weights"
REPLICAS, CONVERSATION, NUM_TURNS = "kill, update under load", "conversation", 50
DIFFERENCE = "largest difference to a full forward pass"


@dataclass(frozen=True, slots=True)
class Sizes:
    num_prompts: int
    num_new: int
    plan: Plan
    warms_each_case: bool  # or only the first with each model
    num_looks: int  # at what is checked of ours alone and depends on the machine
    demo: Plan
    demo_steps: int  # in all; those that are timed are among the first
    demo_accuracy: float  # of its model before the training
    demo_backend: str
    promised_tokens: int  # of each answer of the replicas
    end_s: float  # then contestants are killed: nothing of worth is left in them
    environment: Mapping[str, str]  # of all contestants


FULL = Sizes(
    num_prompts=64, num_new=64,
    plan=Plan(warmup_steps=1, num_rounds=7, steps_per_turn=1, extra_rounds=14, patience_s=300, turn_s=600),
    warms_each_case=True, num_looks=5,
    demo=Plan(warmup_steps=4, num_rounds=8, steps_per_turn=5, extra_rounds=16, patience_s=300), demo_steps=150,
    demo_accuracy=0.3, demo_backend="ray", promised_tokens=48, end_s=3.0, environment={},
)  # fmt: skip
QUICK = Sizes(
    num_prompts=8, num_new=8, plan=Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1), warms_each_case=False,
    num_looks=1, demo=Plan(warmup_steps=1, num_rounds=1, steps_per_turn=2), demo_steps=4, demo_accuracy=0.0,
    demo_backend="local",  # starting Ray twice takes too long for a quick run
    promised_tokens=16, end_s=0.3,
    # They get ready all at once: threads that spin while they wait for each other would take the cores from the others.
    environment={"OMP_WAIT_POLICY": "passive"},
)  # fmt: skip


def run(options: Options) -> Outcome:
    """`--peer none` is ours alone; the demo and the weights stay, whose other side is ours or a plain copy."""
    sizes = QUICK if options.quick else FULL
    commands, missing = peer_commands(options.peer)
    threads = os.cpu_count() or 1
    rows: list[Row] = []
    where: dict[str, object] = {"sizes": asdict(sizes), "threads": threads, "peers_not_installed": missing}
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as name:
        folder = Path(name)
        cases = make_cases(sizes.num_prompts, sizes.num_new)
        wanted = {name: case for name, case in cases.items() if options.wants(name)}
        checks = [check for check in (LOG_PROBS, GREEDY) if options.wants(check)]
        promised = [name for name in PROMISES if options.wants(name)]
        parts: list[Callable[[], Outcome]] = []
        parts += [partial(demo, sizes, folder)] if options.wants(DEMO) else []
        parts += [partial(weights, options)] if options.wants(WEIGHTS) else []
        parts += [partial(promises, promised, sizes, folder)] if promised else []
        outcomes: list[Outcome] = []
        if wanted or checks:
            models = {model: str(folder / model) for model in (DENSE, MOE)}
            job = Job(models, wanted or cases, threads, VOCABULARY, options.quick)
            outcomes.append(contest(job, commands if wanted else {}, checks, list(wanted), sizes, folder))
        with ThreadPoolExecutor(3 if options.quick else 1) as pool:
            outcomes += pool.map(lambda part: part(), parts)
    for found in outcomes:
        rows += found.rows
        where |= found.environment
    return Outcome(rows, where)


def peer_commands(asked: str | None) -> tuple[dict[str, list[str]], list[str]]:
    """Return the peers' programs, and the peers that are not installed and left out. One asked for must be."""
    commands, missing = {}, []
    for name in asked_peers(asked, PEERS):
        try:
            python = sys.executable if name in (GENERATE, CONTINUOUS) else Peer(name).python
        except UsageError as error:
            if asked is not None:
                raise
            print(f"left out: {error}", file=sys.stderr, flush=True)
            missing.append(name)
            continue
        module = "hf_rollout" if name in (GENERATE, CONTINUOUS) else f"{name}_rollout"
        commands[name] = [*(vllm_settings(python) if name == VLLM else []), python, "-m", f"bench.peers.{module}"]
    return commands, missing


def vllm_settings(python: str) -> list[str]:
    """Return what its manual asks for; and it runs in one process with all cores, where it would keep one for its
    second process."""
    runtime = Path(python).parent.parent / "lib" / "libiomp5.so"
    preload = [f"LD_PRELOAD={runtime}"] if runtime.exists() else []
    one_process = ["VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_OMP_THREADS_BIND=nobind"]
    return ["env", *preload, *one_process, "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1"]


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
    with opened(commands, folder, {**cpu_environment(job.threads), **sizes.environment}, sizes.end_s) as everyone:
        ours = everyone[0]
        ours.ready(plan.start_s)
        found = {check: ours.go(1, plan.turn_s, check)[0].amount for check in checks}  # while the others get ready
        versions = {one.name: one.ready(plan.start_s) for one in everyone}
        warm: set[str] = set()
        for case in cases:
            print(f"{case}:", file=sys.stderr, flush=True)
            is_warm = job.cases[case].model in warm and not sizes.warms_each_case
            tallies = alternate(everyone, replace(plan, warmup_steps=0) if is_warm else plan, case)
            warm.add(job.cases[case].model)
            looks = Tally(ours.go(sizes.num_looks, plan.turn_s, f"matrix rate, {case}"))
            rows += [*rate_rows(case, tallies), Row(case, "share of the matrix rate", looks.rate)]
            others[case] = round(tallies[OURS].others_share, 3)
    if LOG_PROBS in found:
        rows.append(Row(LOG_PROBS, DIFFERENCE, found[LOG_PROBS], better="lower"))
    if GREEDY in found:
        rows.append(Row(GREEDY, "families with the tokens of generate", found[GREEDY]))
    return Outcome(rows, {"versions": versions, "cpu_share_of_others": others})


# The demonstration's training


def demo(sizes: Sizes, folder: Path) -> Outcome:
    """Measure each engine's speed, and its accuracy on held-out problems when it has trained to the end."""
    write_demo(folder, sizes.demo_accuracy)
    program = [sys.executable, "-m", "bench.contestants.practicum_grpo", "demo"]
    rest = [str(folder), sizes.demo_backend, str(sizes.demo_steps)]
    commands = {engine: [*program, engine, *rest] for engine in ("native", "hf")}
    with opened(commands, folder, sizes.environment, sizes.end_s) as contestants:
        tallies = alternate(contestants, sizes.demo)
        accuracy = {one.name: one.go(1, sizes.demo.turn_s, "accuracy")[0].amount for one in contestants}
    share = round(tallies["native"].others_share, 3)
    return Outcome(demo_rows(tallies, accuracy), {"demo_cpu_share_of_others": share})


def demo_rows(tallies: Mapping[str, Tally], accuracy: Mapping[str, float]) -> list[Row]:
    ours, theirs = tallies["native"], tallies["hf"]
    cpu = "CPU s per 1000 tokens"
    return [
        Row(DEMO, "tokens/s", ours.rate, theirs.rate, "hf"),
        Row(DEMO, "s of a step for rollout", ours.parts()["rollout"], theirs.parts()["rollout"], "hf", better="lower"),
        Row(DEMO, cpu, ours.cpu_s_per_1000, theirs.cpu_s_per_1000, "hf", better="lower"),
        Row(DEMO, "held-out accuracy at the end", accuracy["native"], accuracy["hf"], "hf"),
    ]


# What is promised


def weights(options: Options) -> Outcome:
    from bench import rollout_weights  # brings torch, which other benchmarks can do without

    return Outcome(rollout_weights.rows(options))


def promises(names: Sequence[str], sizes: Sizes, folder: Path) -> Outcome:
    words = [str(folder), str(sizes.promised_tokens), str(NUM_TURNS)]
    commands = {"promises": [sys.executable, "-m", "bench.rollout_promises", *words]}
    with opened(commands, folder, sizes.environment, sizes.end_s) as (one,):
        one.ready(sizes.plan.start_s)
        counts = {name: one.go(1, sizes.plan.turn_s, name)[0].parts for name in names}
    return Outcome([row for name in names for row in PROMISES[name](counts[name])])


def replica_rows(counts: Mapping[str, float]) -> list[Row]:
    return [
        Row(REPLICAS, "of 256 answers, missing after a kill", counts["missing"], better="lower"),
        Row(REPLICAS, "come twice after a kill", counts["twice"], better="lower"),
        Row(REPLICAS, "other than without a kill", counts["other"], better="lower"),
        Row(REPLICAS, "s with a kill", counts["killed_s"], counts["undisturbed_s"], "without", better="lower"),
        Row(REPLICAS, "of 256 answers, mixed versions in an update under load", counts["mixed"], better="lower"),
        Row(REPLICAS, "by the old weights", counts["by_old"]),
        Row(REPLICAS, "by the new weights", counts["by_new"]),
    ]


def conversation_rows(counts: Mapping[str, float]) -> list[Row]:
    return [
        Row(CONVERSATION, "turns with a tool", counts["turns"]),
        Row(CONVERSATION, "tokens other for the trainer than for the engine", counts["other"], better="lower"),
        Row(CONVERSATION, DIFFERENCE, counts["difference"], better="lower"),
        Row(CONVERSATION, "tokens less, had its text been tokenised again", counts["drift"]),
    ]


PROMISES = {CONVERSATION: conversation_rows, REPLICAS: replica_rows}  # whose contestant ends with the replicas
