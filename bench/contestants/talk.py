"""A conversation of many turns with a tool, by the native engine: what it read and wrote, and what the trainer gets.

The model is made to call the tool in every turn: after each token it writes another is the likeliest, so no training is
needed. Its attention and its layers take part, so log-probs depend on all tokens before. It writes 1 and 2
apart, which its tokenizer would join: a conversation whose text is tokenised again is found out.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum import Sample
from practicum.config import AgentConfig
from practicum.models import load_model, load_tokenizer, save_model
from practicum.rollout.agent.conversation import Conversations
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.native import NativeRollout
from practicum.types import Message, Prompt, PromptGroup, SamplingParams

END, USER, TOOL, BOT = "<end>", "<user>", "<tool>", "<bot>"
CALL = "[12*34]"  # every character once, and those before and after it
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '<user>', 'tool': '<tool>', 'assistant': '<bot>'}[m['role']] }}"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PATIENCE_S = 120.0


def talk(folder: Path, num_turns: int) -> dict[str, float]:
    _write_model(folder, num_turns)
    sample, seen = _conversation(folder, num_turns)
    whole = [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
    if len(seen) != num_turns:
        raise RuntimeError(f"the conversation had {len(seen)} turns instead of {num_turns}: {sample.text!r}")
    tokenizer = load_tokenizer(str(folder))
    again = tokenizer(tokenizer.decode(whole), add_special_tokens=False)["input_ids"]
    return {
        "turns": len(seen),
        "other": sum(a != b for own in seen for a, b in zip(own, whole, strict=False)),
        "difference": _difference(folder, sample),
        "drift": len(whole) - len(again),
    }


class Recorded(NativeRollout):
    """Keeps the tokens that each turn goes on from."""

    seen: list[list[int]]

    def submit(self, sequences: list[Sequence]) -> None:
        super().submit(sequences)
        self.seen += [sequence.prompt_ids.tolist() for sequence in sequences]


def _conversation(folder: Path, num_turns: int) -> tuple[Sample, list[list[int]]]:
    """The conversation, and the tokens that went into each of its turns."""
    return asyncio.run(asyncio.wait_for(_converse(folder, num_turns), PATIENCE_S))


async def _converse(folder: Path, num_turns: int) -> tuple[Sample, list[list[int]]]:
    engine = Recorded(str(folder), device=torch.device("cpu"), dtype=torch.float32, max_batch=2)
    engine.seen = []
    tokenizer = load_tokenizer(str(folder))
    agent = AgentConfig(tools=("bench.contestants.calculator:multiply",), call_format="plain", max_turns=num_turns)
    conversations = Conversations(engine, tokenizer, agent)
    ids = np.array(tokenizer(f"{USER}12*34={BOT}", add_special_tokens=False)["input_ids"], np.int32)
    prompt = Prompt("talk", messages=(Message("user", "12*34="),))
    group = PromptGroup("talk", prompt, ids, SamplingParams(40 * num_turns, 0.0), seed=0)
    try:
        await engine.resume()
        await conversations.start()
        async for _ in conversations.generate([group]):
            pass
    finally:
        await conversations.close()
        await engine.close()
    return group.trajectories[0].last, engine.seen


@torch.no_grad()
def _difference(folder: Path, sample: Sample) -> float:
    model = load_model(str(folder)).eval()
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
    full = logits.log_softmax(-1).gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0].numpy()
    return float(np.abs(full - sample.log_probs)[sample.loss_mask].max())


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", END, USER, TOOL, BOT]
    letters = [*"0123456789*=[] abcdefghijklmnopqrstuvwxyz:',().EV"]
    vocabulary = {token: index for index, token in enumerate([*special, *letters, "12"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=END,
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _write_model(folder: Path, num_turns: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64 * num_turns,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    chain = tokenizer.convert_tokens_to_ids([BOT, *CALL, END])
    with torch.no_grad():
        words = torch.nn.functional.normalize(torch.randn(len(tokenizer), 128), dim=-1)
        model.model.embed_tokens.weight.copy_(words)
        for now, after in itertools.pairwise(chain):
            model.lm_head.weight[after] += 0.3 * words[now]  # the likeliest, though far from certain
    save_model(model, tokenizer, folder)
