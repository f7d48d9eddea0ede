from __future__ import annotations

import numpy as np
import pytest

from practicum.data import ShuffledStream
from practicum.loop.practising import EncodedPrompt, Prompts
from practicum.types import Prompt


def prompts(position: int = 0, again: tuple[int, ...] = ()) -> Prompts:
    items: list[EncodedPrompt] = [(Prompt(str(i), text="1"), np.array([1], np.int32)) for i in range(9)]
    return Prompts(ShuffledStream(items, seed=1, position=position, again=again))


def ids(drawn: list[EncodedPrompt]) -> list[str]:
    return [prompt.id for prompt, _ in drawn]


def test_of_batches_that_are_learnt_from_one_after_another_a_position_is_all_there_is() -> None:
    source = prompts()
    for batch in range(1, 5):
        source.draw(3, batch)
        source.draw(1, batch)
        source.forget(batch - 1)
        assert source.after(batch) == (4 * batch, ())


def test_what_was_drawn_ahead_comes_again() -> None:
    source = prompts()
    for batch in (1, 2, 3):
        source.draw(4, batch)
    assert source.after(0) == (0, ())
    assert source.after(1) == (4, ())
    assert source.after(3) == (12, ())
    source.draw(2, 2)  # prompts of the second batch are renewed
    assert source.after(2) == (14, (8, 9, 10, 11))  # those of the third: the others were learnt from
    assert source.after(1) == (4, ())


@pytest.mark.parametrize("learnt", [0, 1, 2, 3])
def test_a_run_that_goes_on_draws_exactly_what_was_not_learnt(learnt: int) -> None:
    first = prompts()
    batches = {1: ids(first.draw(4, 1)), 2: ids(first.draw(4, 2)), 3: ids(first.draw(4, 3))}
    batches[1] += ids(first.draw(3, 1))
    position, again = first.after(learnt)
    resumed = prompts(position, again)
    assert resumed.after(learnt) == (position, again)
    left = sum(len(batches[number]) for number in batches if number > learnt)
    drawn = ids(resumed.draw(left, 4)) if left else []
    assert sorted(drawn) == sorted(one for number in batches if number > learnt for one in batches[number])
    assert resumed.after(4)[1] == ()
