"""The `rollout` benchmark without its peers: its work, how it is counted, what is checked of ours, and its rows."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import rollout, rollout_ours, rollout_work
from bench.contestant import Line
from bench.grpo import rate_rows
from bench.harness import Options, UsageError
from bench.models import VOCABULARY, write_model
from bench.peers.rollout import continuous_batching, generate, load
from bench.rollout_ours import native, samples_of, talk
from bench.rollout_work import DENSE, MOE, Case, Job, make_cases, one_step, take_steps
from bench.turns import Contestant, Plan, Step, Tally, alternate
from bench.work import native_engine
from practicum.models import load_config

CASES = ["equal", "mixed", "different", "shared", "equal moe", "mixed moe", "different moe", "shared moe"]
SMALL = Case(DENSE, [3, 9], [4, 2], num_answers=2)
SPEEDS = {"practicum": 200.0, "generate": 100.0, "vllm": 400.0}
TALLIES = {name: Tally(steps=[Step(1.0, rate)], cpu_s=rate / 100) for name, rate in SPEEDS.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = {name: tmp_path_factory.mktemp("models") / name for name in (DENSE, MOE)}
    for name, folder in folders.items():
        write_model(folder, mixture_of_experts=name == MOE)
    return {name: str(folder) for name, folder in folders.items()}


# The work


def test_the_full_work_is_what_its_name_says() -> None:
    cases = make_cases(64, 64)
    assert list(cases) == CASES
    assert [sum(cases[name].lengths()) for name in ("equal", "mixed", "shared")] == [4096, 4096, 32 * 8 * 64]
    mixed, different = cases["mixed"].prompt_lengths, cases["different"].new_tokens
    assert min(mixed) >= 8 and max(mixed) <= 128 and len(set(mixed)) > 20
    assert min(different) >= 8 and max(different) <= 256 and max(different) > 8 * min(different)
    assert set(cases["shared"].prompt_lengths) == {256}
    assert [case.model for case in cases.values()] == [DENSE] * 4 + [MOE] * 4


@pytest.mark.parametrize("sizes", [rollout.FULL, rollout.QUICK])
def test_every_case_fits_the_model_and_is_the_same_each_time(sizes: rollout.Sizes) -> None:
    cases = make_cases(sizes.num_prompts, sizes.num_new)
    assert cases == make_cases(sizes.num_prompts, sizes.num_new)
    for case in cases.values():
        assert min(case.prompt_lengths + case.new_tokens) >= 1
        assert max(case.prompt_lengths) + max(case.new_tokens) <= 512


def test_prompts_are_the_same_for_everyone_and_new_in_every_step() -> None:
    assert SMALL.prompts(1, 100) == SMALL.prompts(1, 100) != SMALL.prompts(2, 100)
    assert [len(prompt) for prompt in SMALL.prompts(1, 100)] == [3, 9]
    assert SMALL.lengths() == [4, 4, 2, 2]


def test_a_job_is_an_argument() -> None:
    job = Job({DENSE: "a", MOE: "b"}, {"small": SMALL}, 2, 100)
    assert Job.parse(job.dump()) == job
    assert job.models_used() == [DENSE]


@pytest.mark.parametrize(
    "answers",
    [
        [([1] * 4, [-1.0] * 4)] * 2 + [([1] * 2, [-1.0] * 2)],  # one is missing
        [([1] * 4, [-1.0] * 4)] * 4,  # too long
        [([1] * 4, [-1.0] * 3)] * 2 + [([1] * 2, [-1.0] * 2)] * 2,  # a log-prob is missing
        [([1] * 4, [float("nan")] * 4)] * 2 + [([1] * 2, [-1.0] * 2)] * 2,
    ],
)
def test_whoever_does_not_do_the_work_is_found_out(answers: Any) -> None:
    assert one_step(SMALL, honest, [])["amount"] == 12
    with pytest.raises(RuntimeError, match=r"answers of|log-probs"):
        one_step(SMALL, lambda *_: lambda: answers, [])


class FakeLine(Line):
    """Has a contestant take these steps, and keeps what it says."""

    def __init__(self, *told: tuple[int, str]) -> None:
        self._told = [*told, (0, "")]
        self.said: list[Any] = []

    def ready(self, packages: Any = ()) -> None:
        self.said.append(list(packages))

    def wait_for_go(self) -> tuple[int, str]:
        return self._told.pop(0)

    def answer(self, steps: list[dict[str, Any]]) -> None:
        self.said.append([step["amount"] for step in steps])


def honest(case: Case, prompts: Any) -> Any:
    return lambda: [([1] * length, [-1.0] * length) for length in case.lengths()]


def test_a_contestant_takes_steps_of_the_case_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    line = FakeLine((2, "small"), (1, "look"))
    monkeypatch.setattr(rollout_work, "Line", lambda: line)
    monkeypatch.setattr(sys, "argv", ["contestant", Job({DENSE: ""}, {"small": SMALL}, 1, 100).dump()])
    take_steps(["torch"], lambda *_: honest, lambda _, name: {"amount": 0.5 if name == "look" else 0.0})
    assert line.said == [["torch"], [12, 12], [0.5]]


def test_turns_can_be_taken_case_by_case_with_the_same_contestants(tmp_path: Path) -> None:
    script = """
from bench.contestant import Line, step
line = Line()
line.serve([], lambda case: step(1.0, len(case)))
"""
    with Contestant("one", [sys.executable, "-c", script], tmp_path) as one:
        plan = Plan(warmup_steps=1, num_rounds=2, steps_per_turn=1)
        assert [alternate([one], plan, case)["one"].rate for case in ("equal", "mixed moe")] == [5, 9]


# Contestants


@pytest.mark.parametrize("side", ["native", "generate", "continuous_batching"])
@pytest.mark.parametrize("case", [SMALL, Case(MOE, [5, 2, 7], [1, 3, 6])], ids=["dense", "moe"])
def test_everyone_writes_what_is_asked_for(side: str, case: Case, models: dict[str, str]) -> None:
    folder = models[case.model]
    with ExitStack() as stack:
        if side == "native":
            write = native(stack.enter_context(native_engine(folder)))
        else:
            write = generate(folder) if side == "generate" else continuous_batching(folder, stack)
        assert one_step(case, write, case.prompts(1, VOCABULARY))["amount"] == sum(case.lengths())


def test_log_probs_of_generate_are_those_of_a_forward_pass(models: dict[str, str]) -> None:
    prompts = SMALL.prompts(1, VOCABULARY)
    (tokens, log_probs), *_ = generate(models[DENSE])(SMALL, prompts)()
    with torch.no_grad():
        logits = load(models[DENSE])(input_ids=torch.tensor([[*prompts[0], *tokens]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert np.allclose(log_probs, expected.numpy(), atol=1e-4)


# What is checked of ours alone


def test_a_wrong_log_prob_would_be_seen(models: dict[str, str]) -> None:
    with native_engine(models[DENSE]) as engine:
        samples = samples_of(engine, SMALL, SMALL.prompts(1, VOCABULARY))
    assert rollout_ours.largest_difference(models[DENSE], samples) <= 2e-5
    samples[1].log_probs[2] += 0.25
    assert rollout_ours.largest_difference(models[DENSE], samples) == pytest.approx(0.25, abs=1e-4)


def test_a_family_whose_greedy_tokens_differ_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_ours, "FAMILIES", ("llama", "mixtral"))
    assert rollout_ours.equal_families(tmp_path / "same") == ["llama", "mixtral"]
    monkeypatch.setattr(rollout_ours, "_greedy", lambda model, prompt, num_tokens: [0])
    assert rollout_ours.equal_families(tmp_path / "other") == []


def test_a_conversation_is_counted_turn_by_turn(tmp_path: Path) -> None:
    turns, other, difference, fewer = talk(tmp_path, 3).values()
    assert turns == 3 and other == 0 and difference <= 2e-5
    assert fewer == 3  # its text, tokenised again, would be a token less in every turn


def test_operations_are_those_that_torch_counts(models: dict[str, str]) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    prompt, new = 12, 1
    config = load_config(models[DENSE])
    model = AutoModelForCausalLM.from_pretrained(models[DENSE], attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, prompt, dtype=torch.long), logits_to_keep=1)
    counted = counter.get_total_flops()
    unseen = 4 * 4 * 4 * 64 * (prompt * prompt - prompt * (prompt + 1) / 2)  # eager attention computes what it masks
    assert rollout_ours.needed_flops(Case(DENSE, [prompt], [new]), config) == counted - unseen


def test_answers_to_one_prompt_share_its_reading(models: dict[str, str]) -> None:
    config = load_config(models[MOE])
    once, prompt, both = (
        rollout_ours.needed_flops(Case(MOE, [8], [new], num), config) for new, num in ((5, 1), (1, 1), (5, 2))
    )
    assert both == 2 * once - prompt


# Rows


def test_every_peer_has_its_rows_in_every_case() -> None:
    assert [(row.metric, row.peer_name, row.ratio) for row in rate_rows("equal", TALLIES)] == [
        ("tokens/s", "generate", 2.0),
        ("CPU s per 1000 tokens", "generate", 1.0),
        ("tokens/s", "vllm", 0.5),
        ("CPU s per 1000 tokens", "vllm", 1.0),
    ]


def test_without_a_peer_ours_remains() -> None:
    assert [(row.metric, row.ours, row.peer) for row in rate_rows("equal", {"practicum": TALLIES["practicum"]})] == [
        ("tokens/s", 200.0, None),
        ("CPU s per 1000 tokens", 10.0, None),
    ]


def test_every_channel_is_timed_against_a_plain_copy() -> None:
    times = rollout.measured(4_000_000, num_rounds=2)
    assert times.keys() == {rollout.MEMCPY, *rollout.CHANNELS}
    assert all(len(cpu_s) == len(seconds) == 2 and min(seconds) > 0 for seconds, cpu_s in times.values())


def test_the_demo_compares_our_two_engines() -> None:
    tallies = {
        "native": Tally(steps=[Step(1.0, 300, {"rollout": 0.2})], cpu_s=1.0),
        "hf": Tally(steps=[Step(2.0, 300, {"rollout": 0.8})], cpu_s=2.0),
    }
    assert [row.ratio for row in rollout.demo_rows(tallies, {"native": 0.9, "hf": 0.6})] == [2.0, 4.0, 2.0, 1.5]


@pytest.mark.parametrize("sizes", [rollout.FULL, rollout.QUICK])
def test_the_demo_goes_on_after_its_timed_steps(sizes: rollout.Sizes) -> None:
    most = sizes.demo.warmup_steps + (sizes.demo.num_rounds + sizes.demo.extra_rounds) * sizes.demo.steps_per_turn
    assert most < sizes.demo_steps


def test_a_promise_that_is_not_kept_shows() -> None:
    counts = {"come twice after a kill": 1, "s with a kill": 4.0, "without": 2.0, "by the new weights": 153}
    assert [(row.metric, row.ours, row.better, row.ratio) for row in rollout.alone_rows("kill", counts)] == [
        ("come twice after a kill", 1, "lower", None),
        ("s with a kill", 4.0, "lower", 0.5),
        ("by the new weights", 153, "higher", None),
    ]


def test_peers_that_are_not_installed_are_left_out_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.harness.ROOT", tmp_path)
    commands, missing = rollout.peer_commands(None)
    assert (list(commands), missing) == (["generate", "continuous_batching"], ["trl", "vllm"])
    assert "bash bench/peers/vllm.sh" in capsys.readouterr().err
    assert rollout.peer_commands("none") == ({}, [])
    with pytest.raises(UsageError, match="not installed"):
        rollout.peer_commands("vllm")
    with pytest.raises(UsageError, match="generate, continuous_batching, trl, vllm, none"):
        rollout.peer_commands("sglang")


def test_only_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def contest(job: Job, commands: Any, checks: Any, cases: Any, *_: Any) -> Any:
        done.append((list(commands), list(checks), list(cases)))
        return rollout.Outcome([])

    monkeypatch.setattr(rollout, "contest", contest)
    monkeypatch.setattr(rollout, "demo", lambda *_: done.append("demo") or rollout.Outcome([]))
    monkeypatch.setattr(rollout, "weights", lambda *_: done.append("weights") or rollout.Outcome([]))
    monkeypatch.setattr(rollout, "promises", lambda names, *_: done.append(names) or rollout.Outcome([]))
    for case in ("mixed", "greedy", "demo", "weights", "kill"):
        rollout.run(Options(quick=True, peer="generate", case=case))
    kill, talking = "kill, update under load", "conversation"
    assert done == [(["generate"], [], ["mixed", "mixed moe"]), ([], ["greedy"], []), "demo", "weights", [kill]]
    done.clear()
    rollout.run(Options(peer="none"))
    assert done == [([], ["log-probs", "greedy"], CASES), "demo", "weights", [talking, kill]]


def test_the_sizes_can_be_written_to_a_result_file() -> None:
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(rollout.FULL)))["plan"]["num_rounds"] == 7
