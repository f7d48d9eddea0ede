"""`async`: overlap of rollout and training, `trainer.staleness=1` against `trainer.staleness=0`, both ours.

The reward is an async function that sleeps as long as the generation of a batch takes: rewards that wait for others (a
judge, a sandbox, a service) cost no time of the cores here. Each side is a run of its own in the same Ray, in turns.
`learning` is the demonstration: after as many steps, are as many held-out sums right?
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from bench.contestants.practicum_grpo import config_of
from bench.grpo_work import Job
from bench.harness import Options, Outcome, Row, beside
from bench.models import write_model, write_prompts
from practicum import Trainer
from practicum.controller import ray_cluster
from practicum.demo.arithmetic import make_model, make_tokenizer
from practicum.demo.run import demo_config, prepare
from practicum.loop.run_folder import read_metrics
from practicum.models import save_model

PEER = "staleness=0"
PROMPTS, ANSWERS, NEW_TOKENS = 4, 2, 256
_GRADE = """
import asyncio, pathlib

DELAY = pathlib.Path({delay!r})

async def grade(sample):
    await asyncio.sleep(float(DELAY.read_text()))
    return sum(token % 2 == 0 for token in sample.token_ids.tolist()) / len(sample.token_ids)
"""


@dataclass(frozen=True, slots=True)
class Plan:
    num_rounds: int = 5
    num_steps: int = 20  # timed ones of a run
    num_warm: int = 4
    learning_steps: int = 100
    held_out: int | None = None


QUICK = Plan(num_rounds=1, num_steps=6, num_warm=2, learning_steps=4, held_out=50)
Run = dict[str, float]  # samples/s, and the median of what its steps report
Sides = Mapping[int, Sequence[Run]]  # by staleness


def run(options: Options) -> Outcome:
    has_peer = options.has_peer([PEER])
    plan = QUICK if options.quick else Plan()
    rows: list[Row] = []
    where: dict[str, Any] = {"samples_per_step": PROMPTS * ANSWERS, "max_new_tokens": NEW_TOKENS, "plan": asdict(plan)}
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name, ray_cluster():
        folder = Path(name)
        write_work(folder)
        for placement in filter(options.wants, ("standalone", "hybrid")):
            sides, delay_s = contest(folder, placement, plan)
            rows += speed_rows(placement, sides, has_peer)
            where[placement] = figures(placement, sides, delay_s)
        if options.wants("learning"):
            found, where["learning"] = learn(folder, plan, has_peer, options.quick)
            rows += found
    return Outcome(rows, where)


def contest(folder: Path, placement: str, plan: Plan) -> tuple[Sides, float]:
    """Return the runs, and how long the reward takes in them: the first run measures that before it begins."""
    sides: dict[int, list[Run]] = {0: [], 1: []}
    delay_s = set_delay(folder, 0.0)
    for number in range(plan.num_rounds):
        for staleness in (0, 1) if number % 2 == 0 else (1, 0):
            config = speed_config(folder, placement, staleness, f"{placement}-{number}-{staleness}")
            with closing(steps_of(config)) as reports:
                if not delay_s:
                    seconds = [next(reports).metrics["time/rollout_s"] for _ in range(plan.num_warm + 3)]
                    delay_s = set_delay(folder, median(seconds[-3:]))
                sides[staleness].append(take(reports, plan))
            rate = sides[staleness][-1]["samples/s"]
            print(f"{placement}, staleness={staleness}: {rate:.2f} samples/s", flush=True)
    return sides, delay_s


def take(reports: Iterator[Any], plan: Plan) -> Run:
    for _ in range(plan.num_warm):
        next(reports)
    start = time.perf_counter()
    metrics = [next(reports).metrics for _ in range(plan.num_steps)]
    rate = plan.num_steps * PROMPTS * ANSWERS / (time.perf_counter() - start)
    names = [name for name in metrics[-1] if name.startswith(("time/", "staleness/max"))]
    return {"samples/s": rate} | {name: median(step[name] for step in metrics if name in step) for name in names}


def speed_rows(placement: str, sides: Sides, has_peer: bool) -> list[Row]:
    ours, theirs = (median(run["samples/s"] for run in sides[staleness]) for staleness in (1, 0))
    return beside(placement, "samples/s", ours, {PEER: theirs} if has_peer else {})


def figures(placement: str, sides: Sides, delay_s: float) -> dict[str, Any]:
    """Return what a step is made of, and what could be gained at best by overlapping it."""

    def part(staleness: int, *names: str) -> float:
        return round(sum(median(run.get(name, 0.0) for run in sides[staleness]) for name in names), 4)

    generation = part(0, "time/rollout_s")
    learning = part(0, "time/reference_s", "time/update_s", "time/weights_s", "time/idle_s")
    return {
        "reward_takes_s": round(delay_s, 4),
        "step_s": {f"staleness={k}": part(k, "time/step_s") for k in sides},
        "generation_s": generation, "learning_s": learning,
        "best_possible_ratio": round(best_ratio(placement, generation, delay_s, learning), 3),
        "oldest_token_age": part(1, "staleness/max"),
        "learner_waited_s": part(1, "time/waiting_s", "time/lease_s"),
        "writers_waited_s": part(1, "time/ahead/idle_s"),
        "samples_per_s": {f"staleness={k}": [round(run["samples/s"], 2) for run in sides[k]] for k in sides},
    }  # fmt: skip


def best_ratio(placement: str, generation_s: float, reward_s: float, learning_s: float) -> float:
    """Return the best ratio with staleness 1: two batches are under way, and each part is done once at a time."""
    whole = generation_s + reward_s + learning_s
    apart = [generation_s, learning_s] if placement == "standalone" else [generation_s + learning_s]
    return whole / max(*apart, whole / 2)


def learn(folder: Path, plan: Plan, has_peer: bool, is_quick: bool) -> tuple[list[Row], dict[str, Any]]:
    write_demo(folder, warms_up=not is_quick)
    after = {}
    for staleness in (1, 0):
        run_dir = folder / f"learning-{staleness}"
        overrides = [
            f"trainer.staleness={staleness}", "algorithm.correction.kind=truncated", f"trainer.run_dir={run_dir}",
            f"trainer.steps={plan.learning_steps}", f"validation.max_prompts={plan.held_out or 'null'}",
            f"controller.backend={'local' if is_quick else 'ray'}", "validation.every=0", "trainer.checkpoint_every=0",
        ]  # fmt: skip
        after[staleness] = [report.accuracy for report in steps_of(demo_config(folder, overrides))][-1]
    metric = f"held-out accuracy after {plan.learning_steps} steps"
    rows = beside("learning", metric, after[1], {PEER: after[0]} if has_peer else {})
    return rows, {"held_out_before": read_metrics(run_dir)[0]["validation/accuracy"], "steps": plan.learning_steps}


def write_demo(folder: Path, *, warms_up: bool) -> None:
    """Write the demonstration's problems and its model, warmed up or with random weights."""
    if not warms_up:
        save_model(make_model(seed=0), make_tokenizer(), folder / "model")
    prepare(folder, ["resume=auto"])  # keeps a model that is there


def steps_of(config: Any) -> Generator[Any]:
    return cast(Generator[Any], Trainer(config, notify=lambda text: None).steps())


def set_delay(folder: Path, seconds: float) -> float:
    new = folder / "delay.new"
    new.write_text(str(seconds))
    new.rename(folder / "delay")
    return seconds


def write_work(folder: Path) -> None:
    """Write prompts, a reward and a Qwen3 of two layers with random weights, hardly any of whose answers ends before
    it is cut off."""
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    write_model(folder / "work-model", mixture_of_experts=False, **small)
    write_prompts(folder / "prompts.jsonl")
    (folder / "grade.py").write_text(_GRADE.format(delay=str(folder / "delay")))


def speed_config(folder: Path, placement: str, staleness: int, name: str, backend: str = "ray") -> Any:
    model, prompts, run_dir = (str(folder / each) for each in ("work-model", "prompts.jsonl", name))
    job = Job(model, prompts, run_dir, 1, PROMPTS, ANSWERS, NEW_TOKENS)
    overrides = [
        f"rollout.placement={placement}", f"reward.function={folder / 'grade.py'}:grade", "reward.timeout_s=60",
        "algorithm.correction.kind=truncated", f"controller.backend={backend}", f"trainer.staleness={staleness}",
        "trainer.checkpoint_every=0",
    ]  # fmt: skip
    return config_of(job, overrides)
