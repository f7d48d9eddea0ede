"""Ours in the `rollout` benchmark: `JOB practicum` is the native engine; `promises FOLDER NEW_TOKENS NUM_TURNS` counts
what rollout promises.

What is checked of the engine alone: that it is right (log-probs, greedy tokens), and how near it comes to the machine's
limit. Each promise is a step, whose parts are what was counted:

    kill          a replica in a process of its own is killed in the middle of a batch: is each answer there, once?
    update        new weights come while answers are written: does every answer tell one version, the old or the new?
    conversation  many turns with a tool: are the tokens the trainer gets those that the engine had, all of them?
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.contestant import Line, step
from bench.models import FAMILIES, save_family, save_random
from bench.rollout_work import Answer, Case, Job, Prompts, take_steps
from bench.work import group_of, native_engine, written
from practicum.config import AgentConfig, RolloutConfig
from practicum.controller import Controller, RayResourcePool, ray_cluster
from practicum.demo.arithmetic import make_model, make_tokenizer
from practicum.models import load_model, load_tokenizer, save_model
from practicum.rollout.agent.conversation import Conversations
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Sequence as EngineSequence
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.native import NativeRollout
from practicum.rollout.placement import open_replicas
from practicum.types import Message, Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import ChannelSettings, Place, Ticket, choose, open_sender

LOG_PROBS, GREEDY, MATRIX_RATE = "log-probs", "greedy", "matrix rate, "
NUM_COMPARED, NUM_GREEDY = 16, 24  # answers of each case, and tokens
QUICK_COMPARED, QUICK_GREEDY = 2, 8


class Native:
    def __init__(self, engine: BaseRollout) -> None:
        self._engine = engine

    def write(self, case: Case, prompts: Prompts) -> list[Sample]:
        lengths = zip(prompts, case.new_tokens, strict=True)
        groups = [
            group_of(i, ids, SamplingParams(length, num_answers=case.num_answers, ignore_eos=True), seed=i)
            for i, (ids, length) in enumerate(lengths)
        ]
        return written(self._engine, groups)

    def answers(self, case: Case, written: list[Sample]) -> list[Answer]:
        return [(sample.token_ids.tolist(), sample.log_probs.tolist()) for sample in written]


def engine_main(line: Line, job: Job) -> None:
    torch.set_num_threads(job.threads)
    measure = cache(matrix_rate) if job.quick else matrix_rate  # a quick run measures once for all cases
    with ExitStack() as stack:
        natives = {
            name: Native(stack.enter_context(native_engine(folder, max_batch=512)))
            for name, folder in job.models_used().items()
        }

        def check_step(name: str) -> dict[str, Any]:
            if name == GREEDY:
                with tempfile.TemporaryDirectory(prefix="bench-families-") as folder:
                    return step(1.0, len(equal_families(Path(folder), QUICK_GREEDY if job.quick else NUM_GREEDY)))
            if name == LOG_PROBS:
                samples = [
                    (job.models[case.model], natives[case.model].write(case, case.prompts(0, job.vocabulary)))
                    for case in job.cases.values()
                ]
                return step(1.0, largest_difference(samples, QUICK_COMPARED if job.quick else NUM_COMPARED))
            case = job.cases[name.removeprefix(MATRIX_RATE)]
            prompts = case.prompts(0, job.vocabulary)
            write = natives[case.model].write
            return step(1.0, matrix_share(case, job.models[case.model], lambda: write(case, prompts), measure))

        take_steps(line, job, ["practicum", "torch", "transformers"], natives, check_step)


# What is checked of the engine


@torch.inference_mode()
def log_probs_of(model: Any, sample: Sample) -> NDArray[np.float32]:
    """Return those of the answer's tokens by a full forward pass of transformers' model."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
    first = len(sample.prompt_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1].float()
    found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[first:, None])[:, 0].numpy()
    return found


def largest_difference(samples: Sequence[tuple[str, Sequence[Sample]]], num_compared: int = NUM_COMPARED) -> float:
    """Return that between the log-probs of samples and those of transformers' model in their folder."""
    from transformers import AutoModelForCausalLM

    load = cache(lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    return max(
        float(np.abs(log_probs_of(load(folder), sample) - sample.log_probs).max())
        for folder, own in samples
        for sample in own[:: max(1, len(own) // num_compared)]
    )


def equal_families(folder: Path, num_tokens: int = NUM_GREEDY) -> list[str]:
    """Return the families of which a tiny model writes the same greedy tokens as with `generate`."""
    return [family for family in FAMILIES if _is_equal(save_family(family, folder / family, 2), num_tokens)]


def _is_equal(folder: Path, num_tokens: int) -> bool:
    chance = np.random.default_rng(0)
    prompts = [chance.integers(len(make_tokenizer()), size=length) for length in (3, 11, 17, 6)]
    model = load_model(str(folder)).eval()
    expected = [_greedy(model, prompt, num_tokens) for prompt in prompts]
    params = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    with native_engine(folder, max_batch=len(prompts)) as native:
        samples = written(native, [group_of(i, ids, params, seed=i) for i, ids in enumerate(prompts)])
    return [sample.token_ids.tolist() for sample in samples] == expected


@torch.inference_mode()
def _greedy(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)  # none that ends it early
    ids = torch.from_numpy(prompt)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)[0, len(prompt) :]
    return [int(token) for token in tokens]


def matrix_share(
    case: Case, folder: str, write: Callable[[], Any], measure: Callable[[], float] | None = None
) -> float:
    """Return what the answers' forward passes need, per second, as a share of what large products of matrices reach.

    The engine has written such answers before. `measure` tells what they reach, just before and just after.
    """
    measure = measure or matrix_rate
    before = measure()
    began = time.perf_counter()
    write()
    seconds = time.perf_counter() - began
    return needed_flops(case, json.loads((Path(folder) / "config.json").read_text())) / seconds / max(before, measure())


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


def needed_flops(case: Case, config: dict[str, Any]) -> float:
    """Return those of the forward passes that a case needs, if each prompt is read once and nothing is padded."""
    hidden, layers, wide = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * wide * (2 * heads + 2 * key_heads)
    if "num_experts" in config:
        experts = config["num_experts_per_tok"] * 3 * hidden * config["moe_intermediate_size"]
        mlp = experts + hidden * config["num_experts"]
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    per_token = 2 * layers * (attention + mlp)
    per_seen = 4 * layers * heads * wide  # a token's queries with one key, and its weight with one value
    per_logits = 2 * hidden * config["vocab_size"]
    total = 0.0
    for prompt, new in zip(case.prompt_lengths, case.new_tokens, strict=True):
        total += prompt * per_token + per_logits + per_seen * _seen(0, prompt)
        written = new - 1  # the last token has been through no layer
        total += case.num_answers * (written * (per_token + per_logits) + per_seen * _seen(prompt, prompt + written))
    return total


def _seen(first: int, end: int) -> float:
    """Return how many tokens those from `first` up to `end` attend to, each to itself and all before it."""
    return (end * (end + 1) - first * (first + 1)) / 2


# A kill, and new weights under load

NUM_REPLICAS, MAX_BATCH = 2, 16
NUM_ANSWERS = 256
PATIENCE_S = 120.0
Answers = dict[str, Sample]  # by their ids
Counts = dict[str, float]


def promises_main(line: Line, folder: Path, new_tokens: int, num_turns: int) -> None:
    torch.set_num_threads(1)

    async def replica_counts() -> Counts:
        async with replicas(folder) as (manager, weights):
            counts = await under_new_weights(manager, weights, new_tokens)
            return counts | await under_a_kill(manager, new_tokens)

    def take_step(case: str) -> dict[str, Any]:
        counts = talk(folder / "talk", num_turns) if case == "conversation" else asyncio.run(replica_counts())
        return step(1.0, 1.0, **counts)

    line.serve(["practicum", "torch", "transformers", "ray"], take_step)


@asynccontextmanager
async def replicas(folder: Path) -> AsyncIterator[tuple[RolloutManager, ModelWeights]]:
    """Open replicas on their own places that never sleep: standalone ones, with the trainer in this process."""
    model = folder / "replicas"
    save_model(make_model(0), make_tokenizer(), model)
    config = RolloutConfig(placement="colocated", max_batch=MAX_BATCH)
    engine = EngineSettings("native", str(model), device="cpu", max_batch=MAX_BATCH, cache_gb=0.05)
    weights = ModelWeights(model)
    with ray_cluster(), RayResourcePool([NUM_REPLICAS], resources_per_process={"CPU": 1}) as pool:
        controller = Controller(pool, PATIENCE_S, PATIENCE_S)
        async with open_replicas(config, controller, engine, weights, threads=1) as manager:
            manager.sleeps = False
            await manager.update_weights(1)
            yield manager, weights


async def under_a_kill(manager: RolloutManager, new_tokens: int) -> Counts:
    expected, _, undisturbed_s = await _written(manager, new_tokens)
    victim = (await manager.replicas[0].where()).pid

    async def kill() -> None:
        os.kill(victim, signal.SIGKILL)

    found, times, seconds = await _written(manager, new_tokens, kill())
    return {
        "missing": len(expected) - len(found),
        "twice": sum(times.values()) - len(found),
        "other": sum(found[id].token_ids.tolist() != own.token_ids.tolist() for id, own in expected.items()),
        "killed_s": seconds,
        "undisturbed_s": undisturbed_s,
    }


async def under_new_weights(manager: RolloutManager, weights: ModelWeights, new_tokens: int) -> Counts:
    old, new = manager.version, manager.version + 1
    weights.learn()
    found, _, _ = await _written(manager, new_tokens, manager.update_weights(new))
    versions = [set(sample.versions.tolist()) for sample in found.values()]
    by_old, by_new = (versions.count({version}) for version in (old, new))
    return {"mixed": len(versions) - by_old - by_new, "by_old": by_old, "by_new": by_new}


async def _written(
    manager: RolloutManager, new_tokens: int, at_first: Coroutine[Any, Any, None] | None = None
) -> tuple[Answers, Counter[str], float]:
    """Return the answers, how often each came, and how long it took. `at_first` begins when the first have come."""
    params = SamplingParams(new_tokens, ignore_eos=True)
    groups = [group_of(i, [5, 6, 3 + i % 9], params, seed=i) for i in range(NUM_ANSWERS)]
    samples: Answers = {}
    times: Counter[str] = Counter()
    beside: asyncio.Task[None] | None = None
    began = time.perf_counter()
    async for finished in manager.generate(groups):
        if at_first is not None and beside is None:
            beside = asyncio.create_task(at_first)
        for sample in (sample for group in finished for sample in group.samples):
            times[sample.id] += 1
            samples[sample.id] = sample
    seconds = time.perf_counter() - began
    if beside is not None:
        await asyncio.wait_for(beside, PATIENCE_S)
    return samples, times, seconds


class ModelWeights:
    """The trainer's end of the weights: a model in this process that is sent to the replicas."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(str(folder)).eval().requires_grad_(False)

    async def open(self, engines: Sequence[Place]) -> None:
        settings = ChannelSettings(timeout_s=PATIENCE_S, num_receivers=len(engines))
        self._sender = open_sender(choose(Place.here(), engines), settings)

    async def invite(self, version: int, num_receivers: int) -> Ticket | None:
        return self._sender.invite(version, num_receivers)

    async def send(self, version: int) -> Ticket:
        return await asyncio.to_thread(self._sender.send, version, self._model.named_parameters())

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return [self._log_probs(torch.from_numpy(ids.astype(np.int64))) for ids in sequences]

    @torch.no_grad()
    def _log_probs(self, ids: torch.Tensor) -> NDArray[np.float32]:
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        return found

    def learn(self) -> None:
        for parameter in self._model.parameters():
            parameter.mul_(1.01)


# A conversation of many turns with a tool
#
# The model is made to call the tool in every turn: after each token it writes another is the likeliest, so no training
# is needed. Its attention and its layers take part, so log-probs depend on all tokens before. It writes 1 and 2 apart,
# which its tokenizer would join: a conversation whose text is tokenised again is found out.

END, USER, TOOL, BOT = "<end>", "<user>", "<tool>", "<bot>"
CALL = "[12*34]"  # every character once, and those before and after it
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '<user>', 'tool': '<tool>', 'assistant': '<bot>'}[m['role']] }}"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def talk(folder: Path, num_turns: int) -> Counts:
    """Compare what the engine read and wrote in a conversation with what the trainer gets."""
    _write_talker(folder, num_turns)
    sample, seen = asyncio.run(_conversation(folder, num_turns))
    whole = [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
    if len(seen) != num_turns:
        raise RuntimeError(f"the conversation had {len(seen)} turns instead of {num_turns}: {sample.text!r}")
    tokenizer = load_tokenizer(str(folder))
    again = tokenizer(tokenizer.decode(whole), add_special_tokens=False)["input_ids"]
    full = log_probs_of(load_model(str(folder)).eval(), sample)
    return {
        "turns": len(seen),
        "other": sum(a != b for own in seen for a, b in zip(own, whole, strict=False)),
        "difference": float(np.abs(full - sample.log_probs)[sample.loss_mask].max()),
        "drift": len(whole) - len(again),
    }


class Recorded(NativeRollout):
    """Keeps the tokens that each turn goes on from."""

    seen: list[list[int]]

    def submit(self, sequences: list[EngineSequence]) -> None:
        self.seen += [sequence.prompt_ids.tolist() for sequence in sequences]
        super().submit(sequences)


async def _conversation(folder: Path, num_turns: int) -> tuple[Sample, list[list[int]]]:
    """Return the conversation, and the tokens that went into each of its turns."""
    engine = Recorded(str(folder), device=torch.device("cpu"), dtype=torch.float32, max_batch=2)
    engine.seen = []
    await engine.resume()
    tokenizer = load_tokenizer(str(folder))
    agent = AgentConfig(tools=("bench.contestants.calculator:multiply",), call_format="plain", max_turns=num_turns)
    conversations = Conversations(engine, tokenizer, agent)
    await conversations.start()
    ids = np.array(tokenizer(f"{USER}12*34={BOT}", add_special_tokens=False)["input_ids"], np.int32)
    prompt = Prompt("talk", messages=(Message("user", "12*34="),))
    group = PromptGroup("talk", prompt, ids, SamplingParams(40 * num_turns, 0.0), seed=0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in conversations.generate([group]):
                pass
    finally:
        await conversations.close()
        await engine.close()
    return group.samples[0], engine.seen


def _write_talker(folder: Path, num_turns: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", END, USER, TOOL, BOT]
    letters = [*"0123456789*=[] abcdefghijklmnopqrstuvwxyz:',().EV"]
    vocabulary = {token: index for index, token in enumerate([*special, *letters, "12"])}
    plain = Tokenizer(models.BPE(vocabulary, [("1", "2")], unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token=END, additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    model = save_random(
        folder, "qwen3", tokenizer, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=64 * num_turns, tie_word_embeddings=False,
    )  # fmt: skip
    chain = tokenizer.convert_tokens_to_ids([BOT, *CALL, END])
    with torch.no_grad():
        words = torch.nn.functional.normalize(torch.randn(len(tokenizer), 128), dim=-1)
        model.model.embed_tokens.weight.copy_(words)
        for now, after in itertools.pairwise(chain):
            model.lm_head.weight[after] += 0.3 * words[now]  # the likeliest, though far from certain
    save_model(model, tokenizer, folder)


if __name__ == "__main__":
    opened_line = Line()
    if sys.argv[1] == "promises":
        promises_main(opened_line, Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        engine_main(opened_line, Job.read(sys.argv[1]))
