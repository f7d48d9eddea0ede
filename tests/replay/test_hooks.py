from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.models import load_model
from practicum.replay import RouteRecorder, find_routers
from practicum.replay.hooks import route_dtype
from tests.rollout.families import DENSE, MIXED, save_family


@pytest.mark.parametrize(("family", "layers"), [(name, [1, 2] if name in ("deepseek_v3", "glm4_moe") else [0, 1, 2])
                                                for name in MIXED])  # fmt: skip
def test_routers_are_found_by_layer_and_their_choice_is_kept(family: str, layers: list[int], tmp_path: Path) -> None:
    model = load_model(str(save_family(family, tmp_path))).eval()
    assert list(find_routers(model)) == layers
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 15, (2, 6)))
    chosen = recorder.take()
    assert chosen.shape == (12, len(layers), 2)
    assert chosen.dtype == np.uint8
    assert (np.sort(chosen)[..., 0] < np.sort(chosen)[..., 1]).all()  # two different experts
    recorder.close()
    with torch.no_grad():
        model(input_ids=torch.randint(0, 15, (2, 6)))
    with pytest.raises(AssertionError, match="routed nothing"):
        recorder.take()


@pytest.mark.parametrize("family", DENSE)
def test_dense_models_have_none(family: str, tmp_path: Path) -> None:
    assert find_routers(load_model(str(save_family(family, tmp_path)))) == {}


def test_the_number_of_experts_decides_how_they_are_written() -> None:
    assert route_dtype(256) is np.uint8
    assert route_dtype(257) is np.uint16
