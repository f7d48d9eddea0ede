"""What the log of a child process says about its failure."""

from __future__ import annotations

import re
from pathlib import Path

_MAX_READ = 16 << 20
_MAX_END = 4000
_MAX_LINE = 1000
_BEFORE, _AFTER = 3, 5
_PREFIX = r"^(?:\([^()]*\) )?(?:(?:ERROR|CRITICAL) [^\]]*\] ?)?[\s|]*"
# The last line of an exception that was printed, also by a logger that begins each line with its own mark.
_EXCEPTION = re.compile(_PREFIX + r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::|\s*$)")
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|[Ee]rror:|[Ff]atal|Segmentation fault|Aborted)")


def excerpt(log: Path, start: int = 0) -> str:
    """Return the first error that was printed from the byte `start` on, with the lines around it, and the log's end.

    What fails first is the cause; a server with several processes prints hundreds of lines after it.
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(_MAX_READ)
            file.seek(max(0, file.seek(0, 2) - _MAX_END))
            end = file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"Its log cannot be read: {error}."
    if not end:
        return "It printed nothing."
    lines = [line[:_MAX_LINE] for line in text.decode(errors="replace").splitlines()]
    for sort in (_EXCEPTION, _ERROR):
        first = next((number for number, line in enumerate(lines) if sort.search(line)), None)
        if first is not None:
            around = "\n".join(lines[max(0, first - _BEFORE) : first + 1 + _AFTER])
            return f"The first error in its log:\n{around}\n...\nThe end of its log:\n{end}"
    return f"The end of its log:\n{end}"
