"""Which sequences are written next, and which blocks belong to whom."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.rollout.engine.scheduler import Scheduler
from practicum.rollout.engine.sequence import Sequence
from practicum.types import Prompt, SamplingParams
from tests.rollout.contract import check_blocks

BLOCK = 4


class Tokenizer:
    def decode(self, ids: Items[int], **_: object) -> str:
        return ""


def answers(num_prompt: int, num: int = 1, max_new: int = 6) -> list[Sequence]:
    """Sequences that begin with one prompt."""
    prompt, ids = Prompt("p", text="?"), np.full(num_prompt, len(CREATED), np.int32)
    CREATED.append(num_prompt)
    own = [Sequence(prompt, ids, SamplingParams(max_new), 0, number) for number in range(num)]
    for sequence in own:
        sequence.begin([], Tokenizer())
    return own


CREATED: list[int] = []


def scheduler(num_blocks: int, max_batch: int = 8, prefill_tokens: int = 100, grow_blocks: int = 1) -> Scheduler:
    made = Scheduler(
        max_batch=max_batch, block_size=BLOCK, prefill_tokens=prefill_tokens, grow_blocks=grow_blocks
    )  # fmt: skip
    made.reset(num_blocks)
    return made


def sizes(groups: list[list[Sequence]]) -> list[int]:
    return [len(group) for group in groups]


def test_answers_to_a_prompt_share_the_blocks_that_it_fills() -> None:
    own = scheduler(20)
    three = answers(2 * BLOCK + 1, 3)
    own.add(three)
    assert own.admit() == [three] == [own.running]
    assert len({tuple(sequence.blocks[:2]) for sequence in three}) == 1
    assert len({sequence.blocks[2] for sequence in three}) == len({sequence.slot for sequence in three}) == 3
    assert own.num_free_blocks == 20 - 5
    check_blocks(own)
    for left in (16, 17, 20):  # the shared ones go with the last
        own.remove([own.running[0]])
        check_blocks(own)
        assert own.num_free_blocks == left
    assert not own.has_work


def test_prompts_are_read_together_up_to_a_number_of_tokens() -> None:
    own = scheduler(40, prefill_tokens=10)
    own.add([*answers(6, 2), *answers(4), *answers(1), *answers(30)])
    assert sizes(own.admit()) == [2, 1]
    assert sizes(own.admit()) == [1]
    assert sizes(own.admit()) == [1]  # one that is too long is read by itself


def test_equal_prompts_are_read_once_and_answers_continued_by_themselves() -> None:
    own = scheduler(40)
    first, second = answers(3), answers(3)
    second[0].prompt_ids = first[0].prompt_ids.copy()
    begun = answers(3)
    begun[0].prompt_ids = first[0].prompt_ids
    begun[0].push(1, -1.0)
    begun[0].continue_from(begun[0].to_sample(Tokenizer(), 0))
    own.add([*first, *second, *begun])
    assert sizes(own.admit()) == [2, 1]


def test_slots_and_blocks_bound_what_is_admitted() -> None:
    own = scheduler(20, max_batch=2)
    own.add(answers(3, 3))
    assert sizes(own.admit()) == [2]
    assert own.admit() == []
    own.remove([own.running[0]])
    assert sizes(own.admit()) == [1]
    tight = scheduler(4)
    tight.add(answers(5, 9))
    assert sizes(tight.admit()) == [3]  # one that they share, and one each
    assert tight.num_free_blocks == 0 and len(tight.waiting) == 6
    check_blocks(tight)


def test_a_block_is_kept_for_each_of_those_under_way() -> None:
    own = scheduler(4)
    own.add([*answers(2, 1), *answers(2, 1), *answers(2, 1, max_new=1)])
    own.admit()
    own.add(answers(2))
    assert own.admit() == [] and own.num_free_blocks == 1
    own.remove([own.running[0]])
    assert sizes(own.admit()) == [1]  # the last of those under way needs no more


def test_sequences_grow_all_or_none() -> None:
    own = scheduler(4)
    first, second = answers(BLOCK - 1)[0], answers(BLOCK - 1)[0]
    own.add([first, second])
    own.admit()
    assert own.grow([first, second]) == []
    first.num_launched = second.num_launched = 2
    assert own.grow([first, second]) == [first, second] and own.num_free_blocks == 0
    first.num_launched = BLOCK + 2
    assert own.grow([first]) is None
    check_blocks(own)


def test_growing_takes_several_blocks_where_there_are_but_no_more_than_it_may_fill() -> None:
    own = scheduler(20, grow_blocks=4)
    long, short = answers(BLOCK - 1, max_new=100)[0], answers(BLOCK - 1, max_new=BLOCK)[0]
    own.add([long, short])
    own.admit()
    long.num_launched = short.num_launched = 2
    own.grow([long, short])
    assert (len(long.blocks), len(short.blocks)) == (5, 2)


def test_the_youngest_gives_way_and_is_the_first_to_come_back() -> None:
    own = scheduler(3)
    old, young, new = answers(3, max_new=20)[0], answers(3, max_new=20)[0], answers(3)[0]
    own.add([old, young, new])
    assert sizes(own.admit()) == [1, 1, 1]
    for sequence in own.running:
        sequence.push(1, -1.0)
        sequence.push(1, -1.0)
    assert own.grow(own.running) is None
    assert own.preempt() is new and own.preempt() is young
    assert list(own.waiting) == [young, new] and young.slot == -1 and young.blocks == []
    assert own.grow(own.running) == [old]
    own.remove([old])
    assert own.admit() == [[young]]  # with all its tokens, in two blocks
    assert len(young.blocks) == 2
    check_blocks(own)


def test_what_is_begun_is_forgotten_on_beginning_anew_and_what_waits_is_not() -> None:
    own = scheduler(2, max_batch=2)
    begun, preempted, waiting = answers(3)[0], answers(3)[0], answers(3)[0]
    own.add([begun, preempted, waiting])
    own.admit()
    preempted.push(1, -1.0)
    own.preempt()
    assert own.reset(5) == [begun, preempted]
    assert list(own.waiting) == [waiting] and own.num_free_blocks == own.num_blocks == 5
    check_blocks(own)


def test_a_block_is_begun_by_its_first_token() -> None:
    assert [scheduler(1).blocks_for(tokens) for tokens in (1, BLOCK, BLOCK + 1, 5 * BLOCK)] == [1, 1, 2, 5]


@pytest.mark.parametrize("behind", [0, 1])
@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=12),
    num_blocks=st.integers(6, 30),
    max_batch=st.integers(1, 6),
    grow_blocks=st.integers(1, 3),
    moves=st.lists(st.integers(0, 5), max_size=30),
)
def test_all_are_written_whatever_happens_and_every_block_has_its_holders(
    behind: int,
    asked: list[tuple[int, int, int]],
    num_blocks: int,
    max_batch: int,
    grow_blocks: int,
    moves: list[int],
) -> None:
    """As the engine's loop goes, with sequences that are aborted and come in meanwhile, and a device so far behind."""
    own = scheduler(num_blocks, max_batch, prefill_tokens=16, grow_blocks=grow_blocks)
    expected = [sequence for prompt, num, max_new in asked for sequence in answers(prompt, num, max_new)]
    coming, ended, aborted = list(expected), [], []
    flights: list[list[Sequence]] = []

    def collect(num: int) -> None:
        while len(flights) > num:
            over = []
            for sequence in flights.pop(0):
                sequence.num_launched -= 1
                if sequence.finish_reason is None and sequence.push(1, -1.0):
                    over.append(sequence)
            assert own.remove(over) == over
            ended.extend(over)

    for move in [*moves, *[5] * 400]:
        if coming:
            own.add(coming[: move + 1])
            del coming[: move + 1]
        if move == 0 and own.running:
            collect(0)
            aborted += own.remove(own.running[:1])
        groups = own.admit()
        assert sum(group[0].num_tokens for group in groups) <= 16 or len(groups) == 1
        for sequence in chain.from_iterable(groups):
            assert len(sequence.blocks) * BLOCK > sequence.num_tokens
            sequence.num_launched += 1
        if groups:
            flights.append(list(chain.from_iterable(groups)))
            collect(behind)
        while going := [one for one in own.running if one.num_tokens + one.num_launched < one.max_tokens]:
            if own.grow(going) is not None:
                assert all(len(one.blocks) * BLOCK >= one.num_tokens + one.num_launched for one in going)
                for sequence in going:
                    sequence.num_launched += 1
                flights.append(going)
                break
            if flights:
                collect(0)
            else:
                own.preempt()
        collect(behind if going else 0)
        check_blocks(own)
        if not (own.has_work or coming or flights):
            break
    assert sorted(map(id, [*ended, *aborted])) == sorted(map(id, expected))
    assert all(sequence.num_tokens == sequence.max_tokens for sequence in ended)
    assert own.num_free_blocks == num_blocks
