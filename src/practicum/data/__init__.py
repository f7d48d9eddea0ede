"""Prompt streams and packing."""

from practicum.data.packing import MicroBatch, pack, plan_micro_batches
from practicum.data.prompts import read_prompts
from practicum.data.stream import ShuffledStream

__all__ = ["MicroBatch", "ShuffledStream", "pack", "plan_micro_batches", "read_prompts"]
