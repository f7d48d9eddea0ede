"""From what people's functions and services return to a `Score`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from practicum.types import Score

_LONGEST_REASON = 2000


def score_of(value: Any) -> Score:
    """Read a `Score`, a number, or a mapping with a number under `score` and others that become parts, or with a
    `status` other than ok and a `reason`. A text under `answer`, or `pred` as others call it, is what was read as the
    result.

    Raises ValueError for anything else; text is no number, even if it reads like one.
    """
    if isinstance(value, Score):
        if value.value is None:
            return Score.failed(value.status, _cut(str(value.reason), _LONGEST_REASON))
        stated = None if value.answer is None else str(value.answer)
        return Score(_float(value.value), parts=_parts(value.parts), answer=stated)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if not _is_number(value):
        raise ValueError(f"{_short(value)} is neither a number nor a Score")
    return Score(_float(value))


def _from_mapping(fields: Mapping[str, Any]) -> Score:
    status = fields.get("status", "ok")
    if status != "ok":
        return Score.failed(status, _cut(str(fields.get("reason", "")), _LONGEST_REASON))
    if "score" not in fields:
        raise ValueError(f"{_short(fields)} has no 'score'")
    others = {name: value for name, value in fields.items() if name not in ("score", "parts", "status", "reason")}
    numbers = _parts({name: value for name, value in others.items() if _is_number(value)})
    stated = next((fields[name] for name in ("answer", "pred") if isinstance(fields.get(name), str)), None)
    return Score(score_of(fields["score"]).value, parts=numbers | _parts(fields.get("parts", {})), answer=stated)


def _parts(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise ValueError(f"'parts' must map names to numbers, not be {_short(given)}")
    for name, value in given.items():
        if not _is_number(value) or not math.isfinite(_float(value)):
            raise ValueError(f"part {name!r} is {_short(value)}, not a number")
    return {str(name): _float(value) for name, value in given.items()}


def _float(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{_short(value)} is no number of float32: {error}") from None


def _is_number(value: Any) -> bool:
    # The plain ones first: to ask for a protocol takes longer than many a function does.
    return isinstance(value, float | int) or (isinstance(value, SupportsFloat) and not isinstance(value, str | bytes))


def _short(value: Any) -> str:
    return _cut(repr(value), 100)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + " ..."
