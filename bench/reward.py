"""`reward`: our reward centre against verl's reward loop, against the bare grader, and against what can go wrong.

contest    rule, math-verify, async and sync functions   ours, verl, the bare math grader   in turns, many steps
hostile    answers that hang, raise, exit, crash, grow   ours; verl with those that raise   one step
replicas   one killed and one hung in mid-batch          ours                               one step
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import Options, Outcome, choose_peer
from bench.reward_functions import ASYNC, HOSTILE, MATH, RAISE, REPLICAS, RULE, SYNC
from bench.reward_work import CALL_MS, CPU_MS, IDEAL, LOST, RATE, SETTINGS, SHARE, Loads, math_items, rule_items
from bench.sides import OURS, Sides, Table, contest, rows_of
from bench.turns import Plan

CASES: dict[str, tuple[str, list[str]]] = {  # what its rows are called, and what they count
    RULE: ("rule, 64 samples", [CALL_MS]),
    MATH: ("math-verify", [RATE, CPU_MS, SHARE]),
    ASYNC: ("async function of 50 ms", [IDEAL]),
    SYNC: ("sync function of 50 ms", [IDEAL]),
    RAISE: ("hostile, 1 % raise", [LOST]),
    HOSTILE: ("hostile, 1 % of each of five kinds", ["s", "samples with a wrong status or score", "processes left"]),
    REPLICAS: ("one replica killed, one hung", ["s", "scores missing", "largest difference of a score"]),
}
TABLE: Table = [
    (name, metric, f"{case}: {metric}", "higher" if metric in (RATE, SHARE) else "lower")
    for case, (name, metrics) in CASES.items()
    for metric in metrics
]

FULL = Plan(warmup_steps=1, num_rounds=5, steps_per_turn=1, extra_rounds=10, patience_s=600, turn_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)
ALONE = Plan(warmup_steps=0, num_rounds=1, steps_per_turn=1, turn_s=600)
# verl gets fewer samples where it is slower; what is compared is per sample.
FULL_LOADS: Mapping[str, Loads] = {
    OURS: {
        **{RULE: (64, 200), MATH: (10_000, 1), ASYNC: (2000, 5), SYNC: (2000, 1)},
        **{RAISE: (2000, 1), HOSTILE: (2000, 1), REPLICAS: (600, 1)},
    },
    "verl": {RULE: (64, 200), MATH: (2500, 1), SYNC: (600, 1), ASYNC: (2000, 5), RAISE: (2000, 1)},
}
QUICK_LOADS: Mapping[str, Loads] = {
    OURS: {
        **{RULE: (64, 50), MATH: (500, 1), ASYNC: (2000, 1), SYNC: (640, 1)},
        **{RAISE: (400, 1), HOSTILE: (400, 1), REPLICAS: (200, 1)},
    },
    "verl": {RULE: (64, 50), MATH: (200, 1), SYNC: (120, 1), ASYNC: (2000, 1), RAISE: (400, 1)},
}


def run(options: Options) -> Outcome:
    """`--peer none` leaves verl out; the bare grader stays."""
    peer = choose_peer(options.peer, ["verl"])
    loads, plan = (QUICK_LOADS, QUICK) if options.quick else (FULL_LOADS, FULL)
    sides: Sides = {}
    where: dict[str, Any] = {"sizes": loads, "parts": sides}
    with tempfile.TemporaryDirectory(prefix="bench-reward-") as folder:
        commands = commands_of(options, loads, None if peer is None else peer.python, Path(folder))
        alone = {name: commands.pop(name) for name in (HOSTILE, REPLICAS) if name in commands}
        write_tokenizer(Path(folder))
        for group, its_plan in ((alone, ALONE), (commands, plan)):
            found, how = contest(group, its_plan, SETTINGS) if group else ({}, {})
            for side, numbers in found.items():
                sides.setdefault(side, {}).update(numbers)
            where |= how
    return Outcome(rows_of(TABLE, sides), where)


def commands_of(
    options: Options, loads: Mapping[str, Loads], verl: str | None, tokenizer: Path
) -> dict[str, list[str]]:
    """Return the programs that run, each with what it has to do of the cases that are wanted."""
    ours = [sys.executable, "-m", "bench.reward_ours"]
    programs = [
        # The calls of a Ray slow down with every process it has, also at rest: the shortest have a Ray of their own.
        (OURS, OURS, [*ours, "contest"], [RULE]),
        (f"{OURS} (functions)", OURS, [*ours, "contest"], [MATH, ASYNC, SYNC]),
        ("bare", OURS, [*ours, "bare"], [MATH]),
        (HOSTILE, OURS, [*ours, HOSTILE], [HOSTILE, RAISE]),
        (REPLICAS, OURS, [*ours, REPLICAS], [REPLICAS]),
    ]
    if verl is not None:
        theirs = [verl, "-m", "bench.peers.verl_reward"]
        programs.append(("verl", "verl", [*theirs, "naive"], [RULE, MATH, SYNC, RAISE]))
        # Its other manager is the only one with a limit, and it needs a driver of its own.
        programs.append(("verl (rate_limited)", "verl", [*theirs, "rate_limited"], [ASYNC, RAISE]))
    commands = {}
    for name, side, program, cases in programs:
        wanted = {case: loads[side][case] for case in cases if options.wants(CASES[case][0])}
        if wanted:
            commands[name] = [*program, json.dumps(wanted), str(tokenizer)]
    return commands


def write_tokenizer(folder: Path) -> None:
    """Write one of the answers' own words: verl gets tokens and makes them text again."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [item.text for item in [*math_items(1000), *rule_items(1000)]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=4096, special_tokens=["<pad>", "<end>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
