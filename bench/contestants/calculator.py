"""The tool of the conversation in rollout_ours.py. Processes of its own import this file: nothing heavy."""

from __future__ import annotations


def multiply(expression: str) -> int:
    """Return the product of two numbers, such as 12*34."""
    left, right = expression.split("*")
    return int(left) * int(right)
