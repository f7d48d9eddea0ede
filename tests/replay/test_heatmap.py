from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from practicum.errors import ReplayError
from practicum.replay.heatmap import colours, draw_heatmap


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (48, 128), (94, 512), (2, 3000)])
def test_a_picture_has_a_row_a_layer_and_a_column_an_expert(shape: tuple[int, int], tmp_path: Path) -> None:
    load = np.random.default_rng(0).integers(1, 100, shape)
    load[-1, -1] = 0
    path = tmp_path / "load.png"
    draw_heatmap(load, tuple(range(shape[0])), "a model", path)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] >= shape[1] and pixels.shape[0] >= shape[0]
    black = np.argwhere((pixels == 0).all(-1))
    assert len(black)  # the dead one, at the lower right of the map
    high, wide = np.ptp(black, axis=0) + 1
    assert len(black) == high * wide


def test_colours_tell_less_from_more_than_an_even_share() -> None:
    less, even, more, most = colours(np.array([0.2, 1.0, 3.0, 6.0]), 6.0).astype(int)
    assert less[2] > less[0] + 50 and more[0] > more[2] + 50  # blue, red
    assert min(even) > 230 and sum(most) < sum(more)


def test_a_picture_of_nothing_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    draw_heatmap(np.zeros((2, 4), np.int64), (0, 1), "nothing", tmp_path / "nothing.png")
    with pytest.raises(ReplayError, match=r"nowhere/load\.png cannot be written: No such file"):
        draw_heatmap(np.ones((2, 4), np.int64), (0, 1), "a model", tmp_path / "nowhere" / "load.png")
