"""The tool of this recipe."""

from __future__ import annotations

import re

from practicum import ToolError

_PRODUCT = re.compile(r"(\d{1,4})\*(\d{1,4})")


def calculate(expression: str) -> int:
    """Multiply two whole numbers.

    Args:
        expression: such as 47*68
    """
    match = _PRODUCT.fullmatch(expression.replace(" ", ""))
    if match is None:
        raise ToolError("write two numbers with * between them")
    return int(match[1]) * int(match[2])
