"""A picture of which experts the tokens went to: a row a layer, a column an expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from practicum.errors import ReplayError

_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 56, 124, 52  # margins, for the labels
_MOST_WIDTH, _MOST_HEIGHT = 1000, 640  # of the map itself, unless every cell is a pixel already
_INK, _PAPER, _DEAD = (40, 40, 48), (255, 255, 255), (0, 0, 0)
# From no load to an even share, and from there to the busiest expert.
_COOL = np.array([(33, 62, 140), (118, 160, 214), (245, 245, 240)], np.float64)
_WARM = np.array([(245, 245, 240), (236, 146, 92), (165, 20, 38)], np.float64)


def draw_heatmap(load: NDArray[np.int64], layers: tuple[int, ...], title: str, path: Path) -> None:
    """Draw the load [layers, experts]: colours give it over the mean of the layer; dead experts are black."""
    means = load.mean(axis=1, keepdims=True)
    ratios = load / np.where(means == 0, 1, means)
    most = max(2.0, float(ratios.max(initial=0)))
    num_layers, num_experts = load.shape
    wide = max(1, min(48, _MOST_WIDTH // num_experts))
    high = max(1, min(28, _MOST_HEIGHT // num_layers))
    cells = colours(ratios, most)
    cells[load == 0] = _DEAD
    width, height = num_experts * wide, num_layers * high
    size = (_LEFT + max(width, 360) + _RIGHT, _TOP + max(height, 120) + _BOTTOM)
    picture = Image.new("RGB", size, _PAPER)
    tiles = Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)
    picture.paste(tiles, (_LEFT, _TOP))
    draw = ImageDraw.Draw(picture)
    small, large = ImageFont.load_default(12), ImageFont.load_default(16)
    draw.text((_LEFT, 14), title, _INK, large)
    draw.rectangle((_LEFT - 1, _TOP - 1, _LEFT + width, _TOP + height), outline=_INK)
    for place in _ticks(num_layers, high, apart=16):
        draw.text((_LEFT - 8, _TOP + (place + 0.5) * high), str(layers[place]), _INK, small, anchor="rm")
    for expert in _ticks(num_experts, wide, apart=32):
        draw.text((_LEFT + (expert + 0.5) * wide, _TOP + height + 6), str(expert), _INK, small, anchor="ma")
    draw.text((_LEFT + width / 2, _TOP + height + 28), "expert", _INK, small, anchor="ma")
    draw.text((8, _TOP - 18), "layer", _INK, small)
    _draw_scale(picture, most, _LEFT + max(width, 360) + 24, max(height, 120))
    try:
        picture.save(path, format="PNG")
    except OSError as error:
        raise ReplayError(f"picture {path} cannot be written: {error.strerror or error}.") from error


def colours(ratios: NDArray[np.float64], most: float) -> NDArray[np.uint8]:
    """Return the colours of loads over the mean: white is an even share, so both sides of it are seen."""
    cool = _blend(np.clip(ratios, 0, 1), _COOL)
    warm = _blend(np.clip((ratios - 1) / (most - 1), 0, 1), _WARM)
    return np.where((ratios <= 1)[..., None], cool, warm).astype(np.uint8)


def _blend(places: NDArray[np.float64], anchors: NDArray[np.float64]) -> NDArray[np.float64]:
    spots = np.linspace(0, 1, len(anchors))
    return np.stack([np.interp(places, spots, anchors[:, channel]) for channel in range(3)], axis=-1)


def _ticks(num: int, size: int, apart: int) -> range:
    """Return the cells that get a number, so that the numbers do not touch."""
    every = 1
    while every * size < apart:
        every *= 2
    return range(0, num, every)


def _draw_scale(picture: Image.Image, most: float, left: int, height: int) -> None:
    """Draw the scale, half of it for what is below an even share."""
    places = np.linspace(1, 0, height)
    ratios = np.where(places <= 0.5, places * 2, 1 + (places * 2 - 1) * (most - 1))
    strip = np.repeat(colours(ratios, most)[:, None], 14, axis=1)
    picture.paste(Image.fromarray(np.ascontiguousarray(strip)), (left, _TOP))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    draw.rectangle((left - 1, _TOP - 1, left + 14, _TOP + height), outline=_INK)
    for place, label in ((0.0, f"{most:.1f} x mean"), (0.5, "even"), (1.0, "0")):
        draw.text((left + 20, _TOP + place * height), label, _INK, font, anchor="lm")
    draw.text((left, _TOP + height + 14), "black: dead", _INK, font)
