"""Rollout: prompt groups in, the same groups with their answers out, by whichever engine.

engine = NativeRollout("./my-model", device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
run_sync(engine.resume())
group = PromptGroup("q1", prompt, prompt_ids, SamplingParams(64, num_answers=8), seed=1)
engine.generate_all([group])
print([trajectory.last.text for trajectory in group.trajectories])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.rollout.base import BaseRollout
    from practicum.rollout.hf import HFRollout
    from practicum.rollout.manager import RolloutManager
    from practicum.rollout.native import NativeRollout
    from practicum.rollout.openai import OpenAIRollout
    from practicum.rollout.replica import RolloutReplica
    from practicum.rollout.schemas import ChatMessage, ChatRequest, CompletionRequest, ImagePart, Reply, TextPart
    from practicum.rollout.tokenizer import Tokenizer, check_tokenizer
    from practicum.rollout.vllm.engine import VllmRollout
    from practicum.rollout.worker import RolloutWorker

__all__ = [
    "BaseRollout",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "HFRollout",
    "ImagePart",
    "NativeRollout",
    "OpenAIRollout",
    "Reply",
    "RolloutManager",
    "RolloutReplica",
    "RolloutWorker",
    "TextPart",
    "Tokenizer",
    "VllmRollout",
    "check_tokenizer",
]

# Engines pull in torch and transformers, which the processes that run tools do not need: only for those who ask.
_MODULES = {
    "BaseRollout": "base",
    "HFRollout": "hf",
    "NativeRollout": "native",
    "OpenAIRollout": "openai",
    "RolloutManager": "manager",
    "RolloutReplica": "replica",
    "RolloutWorker": "worker",
    "VllmRollout": "vllm.engine",
    **dict.fromkeys(("ChatMessage", "ChatRequest", "CompletionRequest", "ImagePart", "Reply", "TextPart"), "schemas"),
    **dict.fromkeys(("Tokenizer", "check_tokenizer"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"practicum.rollout.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'practicum.rollout' has no attribute {name!r}")
