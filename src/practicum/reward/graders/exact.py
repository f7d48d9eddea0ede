"""Exact match: the answer, stripped of white space, is the ground truth."""

from __future__ import annotations

from practicum.types import Sample, Score


def exact(sample: Sample) -> Score:
    if sample.prompt.answer is None:
        return Score(None, status="invalid", reason=f"prompt {sample.prompt.id} has no ground truth")
    return Score(float(sample.text.strip() == str(sample.prompt.answer).strip()))
