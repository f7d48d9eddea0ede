from __future__ import annotations

import socket
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from practicum.processes.work import Unpacker, packed, receive

MESSAGES = st.lists(st.one_of(st.integers(), st.text(max_size=50), st.tuples(st.booleans(), st.binary(max_size=200))))


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 60), min_size=1))
def test_messages_are_put_together_however_their_bytes_are_cut(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(packed, messages))
    unpacker, received, position, turn = Unpacker(), [], 0, 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        received += unpacker.feed(data[position : position + size])
        position, turn = position + size, turn + 1
    assert received == messages


def test_receive_waits_for_a_whole_message_and_tells_the_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5)
        there.sendall(packed("one") + packed("two")[:5])
        unpacker = Unpacker()
        assert receive(here, unpacker) == ["one"]
        there.sendall(packed("two")[5:])
        assert receive(here, unpacker) == ["two"]
        there.close()
        assert receive(here, unpacker) is None
