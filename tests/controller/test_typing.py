"""The type checker catches what goes wrong with a call: the method, its arguments, its worker class, its result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPT = """
from collections.abc import AsyncIterator, Sequence
import numpy as np
from numpy.typing import NDArray
from practicum.controller import GroupFuture, LocalWorkerGroup, RayClassWithInitArgs, Worker, WorkerGroup

class Counter(Worker):
    def __init__(self, start: int) -> None: ...
    def add(self, values: Sequence[int], times: int = 1) -> int: ...
    def squares(self, values: Sequence[int]) -> list[int]: ...
    async def later(self, value: int) -> str: ...
    async def squares_later(self, values: Sequence[int]) -> list[float]: ...
    async def items(self, num: int) -> AsyncIterator[bytes]:
        yield b""
    def scaled(self, values: NDArray[np.float64]) -> NDArray[np.float64]: ...

class Other(Worker):
    def other(self) -> None: ...

group: WorkerGroup[Counter] = LocalWorkerGroup(RayClassWithInitArgs(Counter, 3))
future: GroupFuture[list[int]] = group.scatter_async(Counter.squares, [1, 2])
totals: list[int] = group.execute_all(Counter.add, [1], times=2)
total: int = group.execute_rank_zero(Counter.add, [1])
mapped: list[int] = group.map(Counter.add, [[1], [2]], 3)
squares: list[int] = group.mesh("m").with_timeout(1).scatter(Counter.squares, [1, 2])
handed: list[int] = group.scatter(Counter.squares, future)
forwarded: list[int] = group.execute_all(Counter.add, future.forward())
array: NDArray[np.float64] = group.scatter(Counter.scaled, np.zeros(3))
own: int = group.scatter_with(lambda b, n: [[b] * n], sum, Counter.add, 5)
soon: GroupFuture[list[str]] = group.execute_all_async(Counter.later, 3)
text: str = group.execute_rank_zero(Counter.later, 3)
floats: list[float] = group.scatter(Counter.squares_later, [1, 2])
texts: list[str] = group.map(Counter.later, [1, 2])
joined: str = group.scatter_with(lambda b, n: [b] * n, "".join, Counter.later, 5)
async def awaits() -> None:
    awaited: list[str] = await group.execute_all_async(Counter.later, 3)
    number: int = await group.execute_rank_async(1, Counter.add, [3])
    async for item in group.stream(0, Counter.items, 3):
        data: bytes = item
role: WorkerGroup[Other] = group.role("o", Other)
# from here on each line is wrong
RayClassWithInitArgs(Counter, "three")
RayClassWithInitArgs(Counter)
group.execute_all(Counter.ad, [1])
group.execute_all(Counter.add, "text")
group.execute_all(Counter.add, [1], time=2)
group.execute_all(Other.other)
group.map(Counter.add, [1, 2])
group.scatter(Counter.squares, 3)
group.scatter(Counter.squares, future.result()[0])
wrong: list[str] = group.scatter(Counter.squares, [1])
group.stream(0, Counter.items, "three")
group.stream(0, Counter.later, 3)
group.execute_all_async(Counter.later, "three")
numbers: list[int] = group.execute_all(Counter.later, 3)
strange: str = group.execute_rank_zero(Counter.add, [1])
"""


@pytest.mark.slow
def test_right_calls_pass_and_wrong_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(Path(__file__).parents[2])  # where the settings and the cache are
    report, _, _ = api.run(["--strict", "--follow-imports=silent", "--disable-error-code=empty-body", str(script)])
    first_wrong = SCRIPT.splitlines().index("# from here on each line is wrong") + 2
    last = len(SCRIPT.splitlines())
    found = {int(number) for number in re.findall(r"script\.py:(\d+): error", report)}
    assert found == set(range(first_wrong, last + 1)), report
