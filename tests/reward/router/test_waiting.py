from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.reward.router.heads import NUM_PRIORITIES
from practicum.reward.router.waiting import WaitingRoom

priorities = st.integers(0, NUM_PRIORITIES - 1)


def room_of(size: int, *waiting: tuple[str, int]) -> WaitingRoom[str]:
    room: WaitingRoom[str] = WaitingRoom(size)
    for who, priority in waiting:
        assert room.put(who, priority) is None
    return room


def test_the_urgent_come_first_and_among_equals_the_first_to_come() -> None:
    waiting = [("b1", 5), ("c1", 0), ("a1", 9), ("b2", 5), ("a2", 9), ("c2", 0)]
    room = room_of(10, *waiting)
    served = []
    while room.num:
        served.append(room.first())
        room.remove(served[-1], dict(waiting)[served[-1]])
    assert served == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_a_full_room_turns_away_the_newest_of_the_least_urgent() -> None:
    room = room_of(4, ("low1", 1), ("low2", 1), ("mid", 5), ("high", 9))
    assert room.put("urgent", 7) == "low2"
    assert room.put("another", 7) == "low1"
    assert room.put("third", 7) == "mid"
    assert room.num == 4
    assert sorted(room.everyone()) == ["another", "high", "third", "urgent"]


def test_a_full_room_turns_away_a_newcomer_who_is_not_more_urgent() -> None:
    room = room_of(2, ("one", 5), ("two", 5))
    assert room.put("equal", 5) == "equal"
    assert room.put("less", 0) == "less"
    assert room.everyone() == ["one", "two"]


def test_a_room_without_seats_turns_everybody_away() -> None:
    room = room_of(0)
    assert room.put("one", 9) == "one"
    assert not room.num and room.everyone() == []


def test_one_from_the_middle_may_go() -> None:
    room = room_of(5, ("one", 5), ("two", 5), ("three", 5), ("low", 0))
    room.remove("two", 5)
    assert room.num == 3 and room.first() == "one"
    room.remove("one", 5)
    assert room.first() == "three"
    room.remove("three", 5)
    assert room.first() == "low"


def test_a_seat_left_is_taken_again() -> None:
    room = room_of(1, ("one", 5))
    room.remove("one", 5)
    assert room.put("two", 0) is None
    assert room.first() == "two"


@pytest.mark.parametrize("size", [0, 1, 3, 8])
@settings(max_examples=40)
@given(st.data())
def test_as_a_sorted_list_would_do_it(size: int, data: st.DataObject) -> None:
    room: WaitingRoom[int] = WaitingRoom(size)
    model: list[tuple[int, int]] = []  # (-priority, number), in the order in which they are served
    for number in range(data.draw(st.integers(0, 30))):
        leaves = data.draw(st.booleans())
        if model and leaves:
            gone = model.pop(data.draw(st.integers(0, len(model) - 1)))
            room.remove(gone[1], -gone[0])
        else:
            priority = data.draw(priorities)
            model.append((-priority, number))
            model.sort()
            turned_away = room.put(number, priority)
            assert turned_away == (model.pop()[1] if len(model) > size else None)
        assert room.num == len(model)
        assert sorted(room.everyone()) == sorted(number for _, number in model)
        if model:
            assert room.first() == model[0][1]
