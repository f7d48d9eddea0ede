"""A model that computes something else than transformers is not let in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.errors import RolloutError
from tests.rollout.cuda.test_engine import opened
from tests.rollout.families import save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_model_that_comes_out_different_is_refused_each_time(tmp_path: Path, monkeypatch: Any) -> None:
    from practicum.rollout.cuda import engine as module

    folder = save_family("llama", tmp_path)
    monkeypatch.setitem(module._AGREES, torch.float32, 0.0)
    engine = module.CudaRollout(
        str(folder), device=torch.device("cuda"), dtype=torch.float32, max_batch=4, cache_gb=0.05
    )  # fmt: skip
    trial, filled = module.Reader.trial, []

    def look(self: Any, model: Any) -> float:
        filled.append(engine._weights.is_filled)
        return trial(self, model)

    monkeypatch.setattr(module.Reader, "trial", look)
    for _ in range(2):
        with pytest.raises(RolloutError, match="come out different"):
            engine.resume()
    monkeypatch.setitem(module._AGREES, torch.float32, 1e-3)
    engine.resume()
    assert filled == [True] * 3  # its weights were there each time
    assert engine.held_bytes > 0
    engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_it_is_tried_out_on_every_way_of_computing(family: str, tmp_path: Path) -> None:
    engine = opened(save_family(family, tmp_path))
    assert engine._reader.trial(engine._model) < 1e-5
    engine.close()
