"""The package exports the roles of rollout, and its example works."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import practicum.rollout
from practicum.rollout import ChatRequest, NativeRollout
from practicum.types import Prompt, PromptGroup, SamplingParams


def test_every_role_can_be_had_from_the_package() -> None:
    for name in practicum.rollout.__all__:
        assert getattr(practicum.rollout, name) is not None


def test_schemas_need_no_torch() -> None:
    """Clients and the processes of tools import them."""
    code = "import sys, practicum.rollout.schemas; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_group_is_written_by_an_engine_and_a_request_becomes_one(tiny_model: Path) -> None:
    engine = NativeRollout(
        str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=64, cache_gb=0.05
    )
    prompt, ids = Prompt("q1", text="1+2="), np.array([5, 14, 6, 15], np.int32)
    group = PromptGroup("q1", prompt, ids, SamplingParams(4, num_answers=8), seed=1)
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "1+2="}], "n": 2, "seed": 3})
    asked = request.to_groups(request.prompts("native"), [ids], request.params(4))

    async def write() -> None:
        await engine.resume()
        async for _ in engine.generate([group, *asked]):
            pass
        await engine.close()

    asyncio.run(write())
    assert [len(one.samples) for one in (group, *asked)] == [8, 2]
    assert all(one.is_finished for one in (group, *asked))
