from __future__ import annotations

import threading
import time

from practicum.rollout.inbox import Inbox, Ticket
from practicum.types import Sample
from tests.rollout.writers import requests_of
from tests.samples import make_sample


def tickets_of(num: int) -> list[Ticket]:
    return [Ticket(request, lambda answer, sample: None) for request in requests_of(num)]


def test_tickets_are_taken_in_their_order_so_many_at_a_time() -> None:
    inbox, tickets = Inbox(), tickets_of(5)
    assert inbox.put(*tickets)
    assert inbox.take(2) == tickets[:2]
    assert inbox.num_waiting == 3
    assert inbox.take(9) == tickets[2:]
    assert inbox.take(9) == []


def test_who_waits_hears_of_all_that_was_put_in_together() -> None:
    inbox, tickets = Inbox(), tickets_of(50)
    threading.Timer(0.05, lambda: inbox.put(*tickets)).start()
    assert inbox.take(100, wait_s=10.0) == tickets


def test_a_closed_inbox_takes_nothing_more_and_is_over_when_it_is_empty() -> None:
    inbox, (first, second) = Inbox(), tickets_of(2)
    inbox.put(first)
    inbox.close()
    assert not inbox.put(second)
    assert not inbox.is_over and not inbox.is_aborted
    start = time.monotonic()
    assert inbox.take(5, wait_s=30.0) == [first]
    assert inbox.take(5, wait_s=30.0) == []  # nobody waits for what cannot come
    assert time.monotonic() - start < 10
    assert inbox.is_over


def test_what_has_not_been_taken_can_be_had_back() -> None:
    inbox, tickets = Inbox(), tickets_of(3)
    inbox.put(*tickets)
    inbox.take(1)
    assert inbox.recall() == tickets[1:]
    assert inbox.is_over and not inbox.is_aborted


def test_an_aborted_inbox_still_hands_out_what_waits_so_that_all_are_told() -> None:
    inbox, tickets = Inbox(), tickets_of(2)
    inbox.put(*tickets)
    inbox.abort()
    assert inbox.is_aborted and inbox.take(5) == tickets


def test_a_ticket_counts_its_open_answers() -> None:
    told: list[tuple[int, Sample]] = []
    (request,) = requests_of(1, num_answers=2)
    ticket = Ticket(request, lambda answer, sample: told.append((answer, sample)))
    sample = make_sample()
    ticket.done(1, sample)
    assert ticket.num_open == 1 and told == [(1, sample)]
    Inbox().cancel(ticket)
    assert ticket.is_cancelled
