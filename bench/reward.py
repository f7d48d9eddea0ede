"""`reward`: our reward centre against verl's reward loop, against the bare grader, and against what can go wrong.

    contest    rule, math-verify, async and sync functions   ours, verl, the bare math grader   in turns, many steps
    hostile    answers that hang, raise, exit, crash, grow   ours; verl with those that raise   one step
    replicas   one killed and one hung in mid-batch          ours                               one step

The work is in reward_work.py, the functions that both sides call in reward_functions.py; ours is reward_ours.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import Options, Outcome, Row, beside, choose_peer
from bench.reward_functions import ASYNC, MATH, MATH_IN_THREAD, RAISE, RULE, SLEEP_S, SYNC
from bench.reward_work import (
    CONCURRENCY,
    CPU,
    LOST,
    NUM_PROCESSES,
    NUM_WORKERS,
    SECONDS,
    SETTINGS,
    Job,
    Load,
    math_items,
    part_of,
    rule_items,
)
from bench.turns import Contestant, Plan, Tally, alternate, opened

OURS, OURS_ELSE, BARE, RATE_LIMITED = "practicum", "practicum (functions)", "bare", "verl (rate_limited)"
LOOPS = ("bare loop", "bare loops on both cores")
CASES = {
    RULE: "rule, 64 samples",
    MATH: "math-verify",
    ASYNC: "async function of 50 ms",
    SYNC: "sync function of 50 ms",
}
RAISING = "hostile, 1 % raise"
HOSTILE = "hostile, 1 % of each of five kinds"
REPLICAS = "one replica killed, one hung"

FULL = Plan(warmup_steps=1, num_rounds=5, steps_per_turn=1, extra_rounds=10, patience_s=600, turn_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)
END_S = 3.0  # then they are killed: Ray's processes take their time to part, and leave nothing of worth

PROGRAM = (sys.executable, "-m", "bench.reward_ours")
Parts = Mapping[str, Mapping[str, float]]  # contestant -> part of its step -> value


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is graded. verl gets fewer samples where it is slower; what is compared is per sample."""

    ours: Mapping[str, Load]
    verl: Mapping[str, Load]
    num_hostile: int
    num_for_replicas: int


FULL_SIZES = Sizes(
    ours={RULE: Load(64, 200), MATH: Load(10_000), ASYNC: Load(2000, 5), SYNC: Load(2000)},
    verl={RULE: Load(64, 200), MATH_IN_THREAD: Load(2500), SYNC: Load(600), ASYNC: Load(2000, 5), RAISE: Load(2000)},
    num_hostile=2000,
    num_for_replicas=600,
)
QUICK_SIZES = Sizes(
    ours={RULE: Load(64, 50), MATH: Load(500), ASYNC: Load(2000), SYNC: Load(640)},
    verl={RULE: Load(64, 50), MATH_IN_THREAD: Load(200), SYNC: Load(120), ASYNC: Load(2000), RAISE: Load(400)},
    num_hostile=400,
    num_for_replicas=200,
)


def run(options: Options) -> Outcome:
    """`--peer none` leaves verl out; the bare grader stays."""
    peer = choose_peer(options.peer, ["verl"])
    sizes, plan = (QUICK_SIZES, QUICK) if options.quick else (FULL_SIZES, FULL)
    faults = {
        "hostile": sizes.num_hostile if options.wants(HOSTILE) or options.wants(RAISING) else None,
        "replicas": sizes.num_for_replicas if options.wants(REPLICAS) else None,
    }
    alone = {program: num for program, num in faults.items() if num is not None}
    num_at_once = 2 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="bench-reward-") as name, ThreadPoolExecutor(num_at_once) as threads:
        folder = Path(name)
        commands = contest_commands(options, sizes, None if peer is None else peer.python, str(folder / "tokenizer"))
        tallies: dict[str, Tally] = {}
        if commands:
            write_tokenizer(folder / "tokenizer")
            with opened(commands, folder, SETTINGS, END_S) as contestants:
                tallies = alternate(contestants, plan)
        # Side by side they wait for their deadlines together, which is good enough for a quick run.
        steps = threads.map(lambda program: single_step(program, alone[program], folder), alone)
        found = dict(zip(alone, steps, strict=True))
    parts = {contestant: dict(tally.parts()) for contestant, tally in tallies.items()}
    parts.setdefault(OURS, {}).update(parts.pop(OURS_ELSE, {}))
    where = {
        "rounds": plan.num_rounds, "ray_settings": SETTINGS, "sizes": asdict(sizes), "parts": parts | found,
        "versions": {name: dict(tally.versions) for name, tally in tallies.items()},
        "cpu_share_of_others": round(max((tally.others_share for tally in tallies.values()), default=0.0), 3),
    }  # fmt: skip
    rows = [*contest_rows(parts, sizes), *fault_rows(parts, found)]
    return Outcome(rows, where)


def contest_commands(options: Options, sizes: Sizes, verl: str | None, tokenizer: str) -> dict[str, list[str]]:
    """Return the programs that take turns, each with what it has to do of the cases that are wanted."""

    def wanted(loads: Mapping[str, Load], among: Sequence[str]) -> dict[str, Load]:
        names = {**CASES, MATH_IN_THREAD: CASES[MATH], RAISE: RAISING}
        return {case: load for case, load in loads.items() if case in among and options.wants(names[case])}

    ours, bare = ([*PROGRAM, program] for program in ("contest", "bare"))
    # The calls of a Ray slow down with every process it has, also at rest: the shortest ones have a Ray of their own.
    entries = [(OURS, ours, Job(tokenizer, wanted(sizes.ours, [RULE])))]
    entries.append((OURS_ELSE, ours, Job(tokenizer, wanted(sizes.ours, [MATH, ASYNC, SYNC]))))
    entries.append((BARE, bare, Job(tokenizer, wanted(sizes.ours, [MATH]))))
    if verl is not None:
        program = [verl, "-m", "bench.peers.verl_reward"]
        sync_loads = wanted(sizes.verl, [RULE, MATH_IN_THREAD, SYNC, RAISE])
        entries.append(("verl", program, Job(tokenizer, sync_loads, "naive")))
        # Its other manager is the only one with a limit, and it needs a driver of its own.
        entries.append((RATE_LIMITED, program, Job(tokenizer, wanted(sizes.verl, [ASYNC, RAISE]), "rate_limited")))
    return {name: [*command, job.dump()] for name, command, job in entries if job.loads}


def write_tokenizer(folder: Path) -> None:
    """Write one of the answers' own words: verl gets tokens and makes them text again."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [item.text for item in [*math_items(1000), *rule_items(1000)]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=4096, special_tokens=["<pad>", "<end>"], show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def single_step(program: str, num_samples: int, folder: Path) -> dict[str, float]:
    """Return what one step of a program that has no opponent found."""
    command = [*PROGRAM, program, str(num_samples)]
    with Contestant(program, command, folder, SETTINGS) as contestant:
        contestant.ready(FULL.start_s)
        (step,) = contestant.go(1, FULL.turn_s)
        return dict(step.parts)


def contest_rows(parts: Parts, sizes: Sizes) -> list[Row]:
    rows = []
    ours, verl = parts.get(OURS, {}), parts.get("verl")
    if part_of(RULE, SECONDS) in ours:
        rows.append(_against(RULE, "ms per call", per_call_ms(ours), None if verl is None else per_call_ms(verl)))
    if part_of(MATH, SECONDS) in ours:
        rows += math_rows(parts, sizes)
    for case, at_a_time, peer in ((ASYNC, CONCURRENCY, RATE_LIMITED), (SYNC, NUM_PROCESSES, "verl")):
        if part_of(case, SECONDS) in ours:
            own = ours[part_of(case, SECONDS)] / ideal_s(sizes.ours[case].num_samples, at_a_time)
            theirs = None
            if peer in parts:
                theirs = parts[peer][part_of(case, SECONDS)] / ideal_s(sizes.verl[case].num_samples, at_a_time)
            rows.append(_against(case, "s / ideal s", own, theirs, peer))
    return rows


def ideal_s(num_samples: int, at_a_time: int) -> float:
    """Return the least time: a call cannot be divided, so the last ones take as long as the others."""
    return SLEEP_S * -(-num_samples // at_a_time)


def per_call_ms(parts: Mapping[str, float]) -> float:
    return 1e3 * parts[part_of(RULE, SECONDS)]


def math_rows(parts: Parts, sizes: Sizes) -> list[Row]:
    num = sizes.ours[MATH].num_samples
    seconds, used_s = (parts[OURS][part_of(MATH, what)] for what in (SECONDS, CPU))
    loops = {loop: 1e3 * parts[BARE][part_of(loop, CPU)] / num for loop in LOOPS}
    bare = beside(CASES[MATH], "CPU ms per sample", 1e3 * used_s / num, loops, "lower")
    rate = cpu_ms = share = None
    if "verl" in parts:
        their_num = sizes.verl[MATH_IN_THREAD].num_samples
        their_s, their_cpu_s = (parts["verl"][part_of(MATH_IN_THREAD, what)] for what in (SECONDS, CPU))
        rate, cpu_ms, share = their_num / their_s, 1e3 * their_cpu_s / their_num, their_cpu_s / (NUM_WORKERS * their_s)
    return [
        _against(MATH, "samples/s", num / seconds, rate, better="higher"),
        *bare,
        _against(MATH, "CPU ms per sample", 1e3 * used_s / num, cpu_ms),
        _against(MATH, "share of two cores used", used_s / (NUM_WORKERS * seconds), share, better="higher"),
    ]


def fault_rows(parts: Parts, found: Parts) -> list[Row]:
    rows = []
    if "hostile" in found:
        hostile = found["hostile"]
        unsaid = "samples with neither their score nor a stated failure"
        lost = {peer: theirs[part_of(RAISE, LOST)] for peer, theirs in parts.items() if part_of(RAISE, LOST) in theirs}
        rows += beside(RAISING, unsaid, hostile["wrong_raise"], lost, "lower")
        rows += [
            Row(HOSTILE, "s", hostile["took_s"], hostile["allowed_s"], "deadline arithmetic", better="lower"),
            Row(HOSTILE, "samples with a wrong status or score", hostile["wrong"], better="lower"),
            Row(HOSTILE, "processes left", hostile["left"], better="lower"),
        ]
    if "replicas" in found:
        replicas = found["replicas"]
        rows += [
            Row(REPLICAS, "s", replicas["disturbed_s"], replicas["undisturbed_s"], "undisturbed", better="lower"),
            Row(REPLICAS, "scores missing", replicas["missing"], better="lower"),
            Row(REPLICAS, "largest difference of a score", replicas["difference"], better="lower"),
        ]
    return rows


def _against(
    case: str, metric: str, ours: float, theirs: float | None, peer: str = "verl", better: Any = "lower"
) -> Row:
    return Row(CASES[case], metric, ours, theirs, None if theirs is None else peer, better)
