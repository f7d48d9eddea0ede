"""Replay on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.replay import RouteRecorder, RouteReplayer, check_replayable
from tests.replay.test_hooks import FAMILIES, TOKENS, by_layer, everything, gradients, learn, loaded, perturb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_goes_where_it_went(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = loaded(family, tmp_path).to("cuda", dtype)
    tokens = TOKENS.cuda()
    check_replayable(model)
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    before = recorder.take()
    perturb(model)
    replayer = RouteReplayer(model)
    with replayer.replaying(by_layer(before).cuda(), everything().cuda()) as seen:
        learn(model, tokens)
    assert np.array_equal(recorder.take(), before)
    assert sum(int(num) for num in seen.differing.values()) > 0
    grads = gradients(model)
    assert all(grad.abs().max() > 0 for name, grad in grads.items() if name.endswith(("gate.weight", "router.weight")))


def test_compiled_layers_replay_too(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path).cuda().eval()
    tokens = TOKENS.cuda()
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    routes = by_layer(recorder.take())
    perturb(model)
    replayer = RouteReplayer(model)
    with replayer.replaying(routes.cuda(), everything().cuda()), torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False).logits
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    with replayer.replaying(routes.cuda(), everything().cuda()), torch.no_grad():
        compiled = model(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(plain, compiled, atol=1e-3)
    assert np.array_equal(by_layer(recorder.take()), routes)
