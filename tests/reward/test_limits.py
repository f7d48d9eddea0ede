from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.config import LimitsConfig
from practicum.errors import RewardError
from practicum.reward import limits as limits_module
from practicum.reward.limits import LimitBook, LimitClient, LimitKeeper
from tests.reward.fakes import run


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Audit:
    """Drives a book and checks, after every turn, all that it promises."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        self.clock = Clock()
        self.book = LimitBook(limits, self.clock)
        self.waiting: list[tuple[Any, int]] = []  # in the order they asked
        self.held: list[tuple[Any, int]] = []
        self.granted: dict[tuple[Any, int], tuple[float, int]] = {}
        self.tokens: dict[tuple[Any, int], int] = {}

    def ask(self, who: int, tokens: int) -> None:
        holder = (who, len(self.tokens))
        self.tokens[holder] = tokens
        self.waiting.append(holder)
        self.book.ask(holder, tokens)
        self.turn()

    def done(self, index: int, share: float) -> None:
        if self.held:
            holder = self.held.pop(index % len(self.held))
            used = int(self.granted[holder][1] * share)
            self.book.done(holder, used)
            self.granted[holder] = (self.granted[holder][0], used)
            self.turn()

    def withdraw(self, index: int) -> None:
        if self.waiting:
            self.book.done(self.waiting.pop(index % len(self.waiting)), 0)
            self.turn()

    def leave(self, who: int) -> None:
        self.book.leave(who)
        self.waiting = [holder for holder in self.waiting if holder[0] != who]
        self.held = [holder for holder in self.held if holder[0] != who]
        self.turn()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.turn()

    def turn(self) -> None:
        for holder in self.book.grants():
            assert holder == self.waiting.pop(0)  # first come, first served
            self.held.append(holder)
            self.granted[holder] = (self.clock.now, self.tokens[holder])
        assert self.book.num_held == len(self.held)
        limits = self.limits
        assert limits.concurrency is None or len(self.held) <= limits.concurrency
        window = [tokens for at, tokens in self.granted.values() if at > self.clock.now - 60]
        assert limits.requests_per_minute is None or len(window) <= limits.requests_per_minute
        if limits.tokens_per_minute is not None and len(window) > 1:
            assert sum(window) <= limits.tokens_per_minute

    def drain(self) -> None:
        """Everyone gets a turn in the end, and the book says how long to wait for it."""
        for _ in range(10 * len(self.tokens) + 10):
            if not self.waiting:
                return
            due_s = self.book.next_change_s()
            if due_s is None:
                assert self.held, "nobody holds anything, yet nobody gets a turn"
                self.done(0, 1.0)
            else:
                self.wait(due_s + 1e-9)
        raise AssertionError("somebody never got a turn")


def maybe(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), values)


DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 120)),
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 120)),
        st.tuples(st.just("done"), st.integers(0, 9), st.floats(0, 1)),
        st.tuples(st.just("withdraw"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.one_of(st.floats(0, 5), st.sampled_from([30.0, 59.99, 60.0]))),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    concurrency=maybe(st.integers(1, 4)),
    requests=maybe(st.integers(1, 5)),
    tokens=maybe(st.integers(1, 200)),
    deeds=DEEDS,
)
def test_no_limit_is_ever_exceeded_and_nobody_waits_for_ever(
    concurrency: int | None, requests: int | None, tokens: int | None, deeds: list[tuple[Any, ...]]
) -> None:
    limits = LimitsConfig(concurrency=concurrency, requests_per_minute=requests, tokens_per_minute=tokens)
    audit = Audit(limits)
    for name, *arguments in deeds:
        getattr(audit, name)(*arguments)
    audit.drain()


def test_a_minute_is_a_minute_to_the_second() -> None:
    audit = Audit(LimitsConfig(requests_per_minute=2))
    for wait_s in (0.0, 20.0, 0.0):
        audit.wait(wait_s)
        audit.ask(0, 1)
    assert len(audit.held) == 2 and audit.book.next_change_s() == 40.0
    audit.wait(39.999)
    assert len(audit.held) == 2
    audit.wait(0.001)
    assert len(audit.held) == 3


def test_what_was_really_used_counts() -> None:
    audit = Audit(LimitsConfig(tokens_per_minute=100))
    for _ in range(3):
        audit.ask(0, 60)
    assert len(audit.held) == 1
    audit.done(0, 0.5)  # 30 instead of 60: there is room for the next
    assert len(audit.held) == 1 and len(audit.waiting) == 1
    book = LimitBook(LimitsConfig(tokens_per_minute=100), audit.clock)
    book.ask(("a", 0), 10)
    book.grants()
    book.done(("a", 0), 95)  # more than thought
    book.ask(("a", 1), 10)
    assert book.grants() == []


def test_a_request_larger_than_the_limit_goes_alone() -> None:
    audit = Audit(LimitsConfig(tokens_per_minute=100))
    audit.ask(0, 50)
    audit.ask(0, 500)
    audit.ask(0, 1)
    assert len(audit.held) == 1
    audit.wait(60.0)
    assert [audit.tokens[holder] for holder in audit.held] == [50, 500]
    audit.wait(60.0)
    assert len(audit.held) == 3


# The keeper and its clients


async def holding(client: LimitClient, num: int) -> list[Any]:
    permits = [client.permit(1) for _ in range(num)]
    for permit in permits:
        await permit.__aenter__()
    return permits


async def is_granted(task: asyncio.Task[Any], within_s: float = 0.2) -> bool:
    done, _ = await asyncio.wait([task], timeout=within_s)
    return bool(done)


def test_clients_share_one_limit_and_never_exceed_it() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=3), "secret") as keeper:
            clients = [await LimitClient.connect(keeper.address, "secret") for _ in range(2)]
            at_a_time, most, served = 0, 0, Counter[int]()

            async def use(number: int) -> None:
                nonlocal at_a_time, most
                async with clients[number].permit(5):
                    at_a_time += 1
                    most = max(most, at_a_time)
                    await asyncio.sleep(0.002)
                    at_a_time -= 1
                    served[number] += 1

            await asyncio.gather(*(use(i % 2) for i in range(100)))
            assert most == 3 and served == {0: 50, 1: 50}
            for client in clients:
                client.close()

    run(test)


def test_a_turn_is_passed_on_for_a_while_and_then_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_PASSED_ON_S", 0.3)

    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            busy, other = [await LimitClient.connect(keeper.address, "secret") for _ in range(2)]
            order: list[str] = []

            async def use(client: LimitClient, name: str, times: int) -> None:
                for _ in range(times):
                    async with client.permit(1):
                        order.append(name)
                        await asyncio.sleep(0.02)

            mine = [asyncio.create_task(use(busy, "busy", 30)) for _ in range(3)]
            while not order:
                await asyncio.sleep(0.001)
            await asyncio.gather(use(other, "other", 1), *mine)
            assert 1 < order.index("other") < 60  # later than in the order of the questions, but not at the end
            for client in (busy, other):
                client.close()

    run(test)


@pytest.mark.parametrize("limits", [LimitsConfig(concurrency=1), LimitsConfig(concurrency=1, requests_per_minute=99)])
def test_a_turn_passed_on_to_one_that_is_cancelled_is_not_lost(limits: LimitsConfig) -> None:
    async def test() -> None:
        async with LimitKeeper(limits, "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            for _ in range(20):
                (permit,) = await holding(client, 1)
                waiting = [asyncio.create_task(client.ask(1)) for _ in range(3)]
                await asyncio.sleep(0)
                waiting[0].cancel()  # still in the queue when the turn is passed on
                await permit.__aexit__()
                waiting[1].cancel()  # has got it, and does not know yet
                client.done(await asyncio.wait_for(waiting[2], 5.0), 1)
            client.close()

    run(test)


def test_what_a_client_held_is_free_when_it_is_gone() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=2), "secret") as keeper:
            first, second = [await LimitClient.connect(keeper.address, "secret") for _ in range(2)]
            await holding(first, 2)
            waiting_first = asyncio.create_task(first.ask(1))
            waiting = asyncio.create_task(holding(second, 1))
            assert not await is_granted(waiting)
            first.connection.transport.abort()  # as when its process is killed
            await waiting
            with pytest.raises(ConnectionError):
                await waiting_first
            second.close()

    run(test)


def test_a_client_that_waits_no_more_takes_nobodys_turn() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1, requests_per_minute=3), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            (permit,) = await holding(client, 1)
            given_up = [asyncio.create_task(client.ask(1)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in given_up:
                task.cancel()
            await asyncio.wait(given_up)
            for _ in range(2):  # of the three requests of this minute two are left
                await permit.__aexit__()
                (permit,) = await holding(client, 1)
            await permit.__aexit__()
            assert not await is_granted(asyncio.create_task(client.ask(1)))
            client.close()

    run(test)


def test_a_request_cancelled_as_its_turn_comes_gives_it_back() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            for _ in range(50):
                tasks = [asyncio.create_task(holding(client, 1)) for _ in range(2)]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                (winner,) = done
                await winner.result()[0].__aexit__()
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(result, BaseException) and result is not winner.result():
                        await result[0].__aexit__()
            (permit,) = await holding(client, 1)
            await permit.__aexit__()
            client.close()

    run(test)


def test_windows_reopen_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_WINDOW_S", 0.3)

    async def test() -> None:
        async with LimitKeeper(LimitsConfig(requests_per_minute=2), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            start = time.monotonic()
            times = []
            for _ in range(5):
                async with client.permit(1):
                    times.append(time.monotonic() - start)
            assert times[1] < 0.25 and 0.29 < times[2] < 0.55 and 0.59 < times[4] < 1.0
            client.close()

    run(test)


def test_a_permit_says_what_was_really_used() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(tokens_per_minute=100), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            async with client.permit(90) as permit:
                permit.tokens = 20
            async with client.permit(80):
                pass
            assert not await is_granted(asyncio.create_task(client.ask(1)))
            client.close()

    run(test)


def test_a_keeper_that_is_gone_is_an_error_at_once() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            await holding(client, 1)
            waiting = asyncio.create_task(client.ask(1))
            await asyncio.sleep(0)
        with pytest.raises(ConnectionError, match=r"keeper of reward\.limits is gone"):
            await waiting
        with pytest.raises(ConnectionError):
            await client.ask(1)
        with pytest.raises(RewardError, match="does not answer"):
            await LimitClient.connect(keeper.address, "secret")

    run(test)


def test_a_keeper_that_cannot_listen_says_where() -> None:
    async def test() -> None:
        with pytest.raises(RewardError, match=r"cannot listen at 203\.0\.113\.1"):
            async with LimitKeeper(LimitsConfig(concurrency=1), "secret", host="203.0.113.1"):
                raise AssertionError("not reached")

    run(test)


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether the keeper closes within seconds, and sends nothing before that."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 20.0) == b""
    return True


@pytest.mark.parametrize("said", [b"\x01" + b"\0" * 16 * 4, b"secret" * 20, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2])
def test_who_does_not_know_the_secret_gets_nothing_and_takes_nothing(said: bytes) -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            reader, writer = await asyncio.open_connection(*keeper.address)
            writer.write(said)
            assert await is_cut(reader)
            stranger = await LimitClient.connect(keeper.address, "another")
            with pytest.raises(ConnectionError):
                await stranger.ask(1)
            client = await LimitClient.connect(keeper.address, "secret")
            async with client.permit(1):
                pass
            client.close()
            writer.close()

    run(test)


def test_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_GREETING_S", 0.1)

    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            client = await LimitClient.connect(keeper.address, "secret")
            for said in (b"", b"\0" * 31):
                reader, writer = await asyncio.open_connection(*keeper.address)
                writer.write(said)
                assert await is_cut(reader)
                writer.close()
            async with client.permit(1):  # it may be silent for as long as it likes
                pass
            client.close()

    run(test)


def test_many_who_say_nothing_keep_no_worker_out() -> None:
    async def test() -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            silent = [await asyncio.open_connection(*keeper.address) for _ in range(300)]
            assert await is_cut(silent[0][0])
            client = await LimitClient.connect(keeper.address, "secret")
            async with client.permit(1):
                pass
            client.close()
            for _, writer in silent:
                writer.close()

    run(test)
