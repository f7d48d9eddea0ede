"""The tool of the conversation in talk.py. Processes of its own import this file: nothing heavy."""

from __future__ import annotations


def multiply(expression: str) -> int:
    """The product of two numbers, such as 12*34."""
    left, right = expression.split("*")
    return int(left) * int(right)
