"""Ours in the `rollout` benchmark. JOB is the native engine, and what is checked of it alone. `promises FOLDER
NEW_TOKENS NUM_TURNS` counts what rollout promises; each is a step, whose parts are the counts:

    kill          a replica in a process of its own is killed in the middle of a batch: is each answer there, once?
    update        new weights come while answers are written: does every answer tell one version, the old or the new?
    conversation  many turns with a tool: are the tokens the trainer gets those that the engine had, all of them?
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contestant import Line, step
from bench.models import layer_weights, write_model
from bench.rollout_work import Answer, Case, Job, Prompts, Writer, take_steps
from bench.work import group_of, native_engine, written
from practicum.config import AgentConfig, RolloutConfig
from practicum.controller import open_controller
from practicum.demo.arithmetic import make_model, make_tokenizer
from practicum.models import encode_prompts, load_config, load_model, load_tokenizer, save_model
from practicum.rollout.agent.conversation import Conversations
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import open_replicas
from practicum.types import Message, Prompt, PromptGroup, Sample, SamplingParams
from tests.models import DENSE, MIXED, save_family
from tests.rollout.replicas import ModelWeights, groups_of
from tests.rollout.tokenizers import byte_tokenizer

NUM_COMPARED, NUM_GREEDY = 16, 24  # answers of each case, and tokens
FAMILIES = (*DENSE, *MIXED)
PATIENCE_S = 120.0
Counts = dict[str, float]


def samples_of(engine: BaseRollout, case: Case, prompts: Prompts) -> list[Sample]:
    params = [SamplingParams(num, num_answers=case.num_answers, ignore_eos=True) for num in case.new_tokens]
    return written(engine, [group_of(i, *own) for i, own in enumerate(zip(prompts, params, strict=True))])


def native(engine: BaseRollout) -> Writer:
    def write(case: Case, prompts: Prompts) -> Callable[[], list[Answer]]:
        samples = samples_of(engine, case, prompts)
        return lambda: [(sample.token_ids.tolist(), sample.log_probs.tolist()) for sample in samples]

    return write


def engine_main() -> None:
    engines: dict[str, BaseRollout] = {}
    once = cache(matrix_rate)  # for all cases
    with ExitStack() as stack:

        def make(job: Job, model: str) -> Writer:
            engines[model] = stack.enter_context(native_engine(job.models[model], max_batch=512))
            return native(engines[model])

        def check_step(job: Job, name: str) -> dict[str, Any]:
            def samples(case: Case) -> list[Sample]:
                return samples_of(engines[case.model], case, case.prompts(0, job.vocabulary))

            if name == "greedy":
                with tempfile.TemporaryDirectory(prefix="bench-families-") as folder:
                    return step(1.0, len(equal_families(Path(folder), 8 if job.quick else NUM_GREEDY)))
            if name == "log-probs":
                num, cases = 2 if job.quick else NUM_COMPARED, job.cases.values()
                return step(1.0, max(largest_difference(job.models[case.model], samples(case), num) for case in cases))
            # What the answers' forward passes need per second, as a share of what large products of matrices reach just
            # before and just after. The engine has written such answers before.
            case = job.cases[name.removeprefix("matrix rate, ")]
            measure = once if job.quick else matrix_rate
            before, began = measure(), time.perf_counter()
            samples(case)
            seconds, best = time.perf_counter() - began, max(before, measure())
            return step(1.0, needed_flops(case, load_config(job.models[case.model])) / seconds / best)

        take_steps(["practicum", "torch", "transformers"], make, check_step)


# Is it right?


def largest_difference(folder: str, samples: Sequence[Sample], num_compared: int = NUM_COMPARED) -> float:
    """Return that between the log-probs of samples and those of a full forward pass of transformers' model."""
    samples = samples[:: max(1, len(samples) // num_compared)]
    ids = [np.concatenate([sample.prompt_ids, sample.token_ids]) for sample in samples]
    full = asyncio.run(ModelWeights(Path(folder)).log_probs(ids))
    pairs = zip(full, samples, strict=True)
    return max(float(np.abs(own[-len(s.log_probs) :] - s.log_probs)[s.loss_mask].max()) for own, s in pairs)


def equal_families(folder: Path, num_tokens: int = NUM_GREEDY) -> list[str]:
    """Return the families of which a tiny model writes the same greedy tokens as with `generate`."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(len(make_tokenizer()), size=length) for length in (3, 11, 17, 6)]
    params, equal = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True), []
    for family in FAMILIES:
        model = load_model(str(save_family(family, folder / family))).eval()
        with native_engine(folder / family, max_batch=len(prompts)) as native:
            samples = written(native, [group_of(i, ids, params) for i, ids in enumerate(prompts)])
        if [sample.token_ids.tolist() for sample in samples] == [_greedy(model, ids, num_tokens) for ids in prompts]:
            equal.append(family)
    return equal


@torch.inference_mode()
def _greedy(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)  # none that ends it early
    ids = torch.from_numpy(prompt)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)[0, len(prompt) :]
    return [int(token) for token in tokens]


# How near is it to the machine's limit?


def matrix_rate() -> float:
    """Return the operations per second of products of large float32 matrices on the cores that torch uses."""
    size, end = 2048, time.perf_counter() + 0.15
    one, other = torch.randn(2, size, size)
    product = torch.empty_like(one)
    best = 0.0
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(one, other, out=product)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def needed_flops(case: Case, config: Any) -> float:
    """Return those of the forward passes that a case needs, if each prompt is read once and nothing is padded."""
    layers = config.num_hidden_layers
    per_token = 2 * layers * layer_weights(config, getattr(config, "num_experts_per_tok", 0))
    per_seen = 4 * layers * config.num_attention_heads * config.head_dim  # queries with one key, weights with one value
    per_logits = 2 * config.hidden_size * config.vocab_size
    total = 0.0
    for prompt, new in zip(case.prompt_lengths, case.new_tokens, strict=True):
        total += prompt * (per_token + per_seen * (prompt + 1) / 2) + per_logits  # each sees itself and all before it
        written = new - 1  # the last token has been through no layer
        total += case.num_answers * written * (per_token + per_logits + per_seen * (prompt + (written + 1) / 2))
    return total


# What is promised


def promises_main(folder: Path, new_tokens: int, num_turns: int) -> None:
    line = Line()
    torch.set_num_threads(1)

    def counts(case: str) -> Counts:
        if case == "conversation":
            return talk(folder / "talk", num_turns)
        return asyncio.run(replica_counts(folder, new_tokens))

    line.serve(["practicum", "torch", "transformers", "ray"], lambda case: step(1.0, 1.0, **counts(case)))


# A kill, and new weights under load

MAX_BATCH, NUM_ANSWERS = 16, 256


async def replica_counts(folder: Path, new_tokens: int) -> Counts:
    """Open replicas on their own places that never sleep: standalone ones, with the trainer in this process."""
    model = folder / "replicas"
    save_model(make_model(0), make_tokenizer(), model)
    config = RolloutConfig(placement="colocated", max_batch=MAX_BATCH)
    engine = EngineSettings("native", str(model), device="cpu", max_batch=MAX_BATCH, cache_gb=0.05)
    weights = ModelWeights(model)
    with open_controller("ray", num_workers=2, use_gpu=False, max_colocate_count=1) as controller:
        async with open_replicas(config, controller, engine, weights, threads=1) as manager:
            manager.sleeps = False
            await manager.update_weights(1)
            counts = await under_new_weights(manager, weights, new_tokens)
            return await under_a_kill(manager, new_tokens) | counts


async def under_a_kill(manager: RolloutManager, new_tokens: int) -> Counts:
    expected, undisturbed_s = await _written(manager, new_tokens)
    victim = (await manager.replicas[0].where()).pid
    came, seconds = await _written(manager, new_tokens, asyncio.to_thread(os.kill, victim, signal.SIGKILL))
    one, other = ({sample.id: sample.token_ids.tolist() for sample in own} for own in (expected, came))
    return {
        f"of {NUM_ANSWERS} answers, missing after a kill": len(one.keys() - other),
        "come twice after a kill": len(came) - len(other),
        "other than without a kill": sum(tokens != one[id] for id, tokens in other.items()),
        "s with a kill": seconds,
        "without": undisturbed_s,
    }


async def under_new_weights(manager: RolloutManager, weights: ModelWeights, new_tokens: int) -> Counts:
    old, new = manager.version, manager.version + 1
    weights.nudge()
    came, _ = await _written(manager, new_tokens, manager.update_weights(new))
    versions = [set(sample.versions.tolist()) for sample in came]
    by_old, by_new = (versions.count({version}) for version in (old, new))
    mixed = f"of {NUM_ANSWERS} answers, mixed versions in an update under load"
    return {mixed: len(versions) - by_old - by_new, "by the old weights": by_old, "by the new weights": by_new}


async def _written(
    manager: RolloutManager, new_tokens: int, at_first: Coroutine[Any, Any, None] | None = None
) -> tuple[list[Sample], float]:
    """Return the answers as they came, and how long it took. `at_first` begins when the first have come."""
    came: list[Sample] = []
    beside: asyncio.Task[None] | None = None
    began = time.perf_counter()
    async for finished in manager.generate(groups_of(NUM_ANSWERS, new_tokens)):
        if at_first is not None and beside is None:
            beside = asyncio.create_task(at_first)
        came += [sample for group in finished for sample in group.samples]
    seconds = time.perf_counter() - began
    if beside is not None:
        await asyncio.wait_for(beside, PATIENCE_S)
    return came, seconds


# A conversation of many turns with a tool
#
# The model is made to call the tool in every turn: after each token it writes another is the likeliest, so no training
# is needed. Its attention and its layers take part, so log-probs depend on all tokens before. It writes 1 and 2 apart,
# which its tokenizer would join: a conversation whose text is tokenised again is found out.

CALL = "[12*34]"  # every character once
TURN_TOKENS = 128  # at most, with the reply of the tool


def talk(folder: Path, num_turns: int) -> Counts:
    """Compare what the engine read and wrote in a conversation with what the trainer gets."""
    write_talker(folder, TURN_TOKENS * (num_turns + 1))
    seen: list[list[int]] = []  # the tokens that each turn goes on from
    with native_engine(folder, max_batch=2) as engine:
        submit = engine.submit

        def submit_seen(sequences: list[EngineSequence]) -> None:
            seen.extend(sequence.prompt_ids.tolist() for sequence in sequences)
            submit(sequences)

        engine.submit = submit_seen  # type: ignore[method-assign]
        sample = asyncio.run(converse(engine, load_tokenizer(str(folder)), num_turns))
    if len(seen) != num_turns:
        raise RuntimeError(f"the conversation had {len(seen)} turns instead of {num_turns}: {sample.text!r}")
    whole = [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
    tokenizer = load_tokenizer(str(folder))
    again = tokenizer(tokenizer.decode(whole), add_special_tokens=False)["input_ids"]
    return {
        "turns with a tool": len(seen),
        "tokens other for the trainer than for the engine": sum(
            a != b for own in seen for a, b in zip(own, whole, strict=False)
        ),
        "largest difference to a full forward pass": largest_difference(str(folder), [sample]),
        "tokens less, had its text been tokenised again": len(whole) - len(again),
    }


async def converse(engine: BaseRollout, tokenizer: Any, num_turns: int) -> Sample:
    agent = AgentConfig(tools=("bench.contestants.calculator:multiply",), call_format="plain", max_turns=num_turns)
    conversations = Conversations(engine, tokenizer, agent)
    await conversations.start()
    prompt = Prompt("talk", messages=(Message("user", "12*34="),))
    (ids,) = encode_prompts(tokenizer, [prompt])
    params = SamplingParams(TURN_TOKENS * num_turns, temperature=0.0)
    group = PromptGroup("talk", prompt, ids, params, seed=0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in conversations.generate([group]):
                pass
    finally:
        await conversations.close()
    return group.samples[0]


def write_talker(folder: Path, num_positions: int) -> None:
    tokenizer = byte_tokenizer()
    # Before a turn there is the end of a line.
    chain = tokenizer.convert_tokens_to_ids(["\u010a", *CALL, tokenizer.eos_token])

    def make_it_call(model: Any) -> None:
        words = torch.nn.functional.normalize(torch.randn(len(tokenizer), 128), dim=-1)
        model.model.embed_tokens.weight.copy_(words)
        for now, after in itertools.pairwise(chain):
            model.lm_head.weight[after] += 0.3 * words[now]  # the likeliest, though far from certain

    shape = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    shape |= {"head_dim": 32, "max_position_embeddings": num_positions, "eos_token_id": tokenizer.eos_token_id}
    write_model(folder, False, tokenizer, change=make_it_call, **shape)


if __name__ == "__main__":
    if sys.argv[1] == "promises":
        promises_main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        engine_main()
