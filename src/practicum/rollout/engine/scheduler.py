"""Which sequences are written next, and which blocks of keys and values belong to whom. Bookkeeping alone: no torch.

    add ─▶ waiting ─ admit: a slot and blocks are free ─▶ running ─ finish, abort ─▶ gone; slot and blocks are free
              ▲                                             │
              └─────────── preempt: no block is free ◀──────┘ grow: one more token each

A block has room for `block_size` tokens. Answers to one prompt share the blocks that the prompt fills; what it begins
of one more block is copied for each. Block 0 belongs to nobody: what only fills up a batch may write there. Where
blocks run out, the youngest sequence gives its own back and is read again later, before anything that is new.

Slots and blocks that were given back may be taken at once: a device does what it is asked to in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from practicum.rollout.engine.sequence import Sequence


class Scheduler:
    """`prefill_tokens` bounds what is read in one pass, so that those under way do not wait for long; a sequence that
    grows gets up to `grow_blocks` at once."""

    def __init__(self, *, max_batch: int, block_size: int, prefill_tokens: int, grow_blocks: int = 1) -> None:
        self.block_size = block_size
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._grow_blocks = grow_blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self.reset(0)

    def reset(self, num_blocks: int) -> list[Sequence]:
        """Begin anew with so many blocks; return those that were begun, which are gone. What waits, waits on."""
        begun = [*self.running, *(sequence for sequence in self.waiting if sequence.token_ids)]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.token_ids)
        self.running = []
        self.num_blocks = num_blocks
        self._free_blocks = list(range(num_blocks, 0, -1))  # the last is taken first
        self._num_holders = [0] * (num_blocks + 1)
        self._free_slots = list(range(self._max_batch - 1, -1, -1))
        return begun

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def admit(self) -> list[list[Sequence]]:
        """Give slots and blocks to those that wait, as far as there are any; return what is to be read in one pass, in
        groups of sequences that begin with the same tokens. They are running from now on."""
        groups: list[list[Sequence]] = []
        num_tokens = 0
        # One more block is left to each of those under way that may need it.
        num_free = self.num_free_blocks - sum(
            len(one.blocks) * self.block_size < one.max_tokens for one in self.running if self.waiting
        )
        while self.waiting and self._free_slots:
            first = self.waiting[0]
            length = first.num_tokens
            shared, begun = divmod(length, self.block_size)
            own = self.blocks_for(begun + 1)
            room = min(len(self._free_slots), (num_free - shared) // own)
            if room < 1 or (groups and num_tokens + length > self._prefill_tokens):
                break
            group = [self.waiting.popleft()]
            while len(group) < room and self.waiting and self.waiting[0].shares_prompt(first):
                group.append(self.waiting.popleft())
            common = self._take(shared)
            for block in common:
                self._num_holders[block] = len(group)
            for sequence in group:
                sequence.slot = self._free_slots.pop()
                sequence.blocks = [*common, *self._take(own)]
            num_free -= shared + own * len(group)
            num_tokens += length
            groups.append(group)
            self.running += group
        return groups

    def grow(self, sequences: Iterable[Sequence]) -> list[Sequence] | None:
        """Have room for one more token of each; return those that got blocks. None, and nothing changed, if there are
        not enough."""
        size = self.block_size
        wanted = [one for one in sequences if one.num_tokens + one.num_launched > len(one.blocks) * size]
        if len(wanted) > self.num_free_blocks:
            return None
        if wanted:
            each = max(1, min(self._grow_blocks, self.num_free_blocks // len(wanted)))
            for sequence in wanted:
                most = self.blocks_for(sequence.max_tokens) - len(sequence.blocks)
                sequence.blocks += self._take(max(1, min(each, most)))
        return wanted

    def preempt(self) -> Sequence:
        """Take slot and blocks from the youngest; it is the first to be admitted again."""
        sequence = self.running.pop()
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def remove(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """Forget sequences that have ended or are aborted; return those that were here."""
        if not sequences:
            return []
        gone = set(sequences)
        ended = [sequence for sequence in self.running if sequence in gone]
        if ended:
            self.running = [sequence for sequence in self.running if sequence not in gone]
            for sequence in ended:
                self._give_back(sequence)
        if any(sequence in gone for sequence in self.waiting):
            ended += [sequence for sequence in self.waiting if sequence in gone]
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in gone)
        return ended

    def _take(self, num: int) -> list[int]:
        assert num <= len(self._free_blocks), "more blocks than there are"
        taken = [self._free_blocks.pop() for _ in range(num)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def _give_back(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        for block in reversed(sequence.blocks):
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, "a block was given back twice"
            if not self._num_holders[block]:
                self._free_blocks.append(block)
        sequence.slot, sequence.blocks = -1, []


def in_order(groups: Iterable[Iterable[Sequence]]) -> Iterator[Sequence]:
    """The sequences of all groups, one after the other."""
    return (sequence for group in groups for sequence in group)
