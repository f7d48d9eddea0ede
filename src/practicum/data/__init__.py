"""Prompt streams and packing."""

from practicum.data.packing import MicroBatch, pack, plan_micro_batches
from practicum.data.prompts import picture_fields, read_prompts
from practicum.data.stream import ShuffledStream

__all__ = ["MicroBatch", "ShuffledStream", "pack", "picture_fields", "plan_micro_batches", "read_prompts"]
