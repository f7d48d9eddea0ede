"""The `router` benchmark without routers: what it makes of what it sees."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not part of the installed package

from bench import router, router_faults, router_load
from bench.harness import ContestantError, Options, UsageError
from bench.router import KILOBYTE, LIGHT_REQUEST, LIGHT_RESPONSE, OURS, ROUTERS, Setup
from bench.router_faults import AVOIDED, BACK, FAILED, HINT, NO_HINT, SPEEDS, avoided_after, back_after
from bench.router_load import read_response, read_wrk
from bench.router_work import (
    JOB,
    Emulation,
    Result,
    Worker,
    judge,
    read_message,
    request_of,
    send_all,
)
from bench.turns import PORTS, Step, Tally, free_ports, is_listened_to

WRK = """Running 1s test @ http://127.0.0.1:20001/v1/completions
  1 threads and 64 connections
Requests/sec:  43018.21

RESULT {"requests": 43018, "duration_us": 2000000, "failed": 2}
"""


def test_wrk_is_read_by_its_last_line() -> None:
    step = read_wrk(WRK)
    assert (step.amount, step.parts["failed"], step.seconds) == (43018, 2, 2.0)


def test_wrk_without_a_result_is_an_error_that_says_what_it_said() -> None:
    with pytest.raises(ContestantError, match="unable to connect"):
        read_wrk("unable to connect to 127.0.0.1:1 Connection refused\n")


def test_load_rows_are_medians_beside_each_peer() -> None:
    def turn(rate: float, cpu_us: float) -> Tally:
        return Tally([Step(1.0, rate)], cpu_s=rate * cpu_us / 1e6)

    rounds = [{OURS: turn(rate, 20.0), "nginx": turn(100.0, 10.0)} for rate in (100, 200, 900)]
    rate, cpu = router_load.load_rows("case", rounds)
    assert (rate.metric, rate.ours, rate.peer, rate.ratio) == ("requests/s", 200, 100, 2.0)
    assert (cpu.metric, cpu.ours, cpu.peer) == ("CPU µs per request", pytest.approx(20), pytest.approx(10))
    alone = router_load.load_rows("case", [{OURS: one[OURS]} for one in rounds])
    assert [row.peer for row in alone] == [None, None]


@pytest.mark.parametrize("text", [LIGHT_REQUEST, LIGHT_RESPONSE])
def test_light_bodies_are_a_kilobyte_of_json_that_fits_into_scripts(text: str) -> None:
    json.loads(text)
    assert len(text) == KILOBYTE
    assert "'" not in text and "%" not in text and "$" not in text


def test_the_wrk_script_of_each_case_has_its_body(tmp_path: Path) -> None:
    same, different = (
        router_load.write_script(tmp_path, case).read_text() for case in (router_load.SAME, router_load.DIFFERENT)
    )
    assert LIGHT_REQUEST in same and LIGHT_REQUEST in different
    assert "X-Request-Id" in different and "X-Request-Id" not in same
    assert "%%" not in same


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{", b'"a"}'],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: y\r", b"\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx: 0\r\n\r\n", b"2\r\n{}\r\n0\r\n", b"\r\n"],
    ],
)
def test_an_answer_is_read_to_its_end(pieces: list[bytes]) -> None:
    whole, rest = b"".join(pieces), list(pieces)
    assert read_response(lambda _: rest.pop(0)) == whole
    assert rest == []


def test_an_answer_other_than_200_ends_the_measurement() -> None:
    with pytest.raises(ContestantError, match="502"):
        read_response(lambda _: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")


def test_jobs_are_the_same_for_everyone_and_as_much_work_for_every_seed() -> None:
    first, again, other = (router_faults.works_of(2000, 0.2, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 2000
    assert sum(first) == pytest.approx(sum(other)) == pytest.approx(2000 * 0.2)
    assert router_faults.ideal_s(first) == pytest.approx(sum(first) / (4 * sum(SPEEDS)))


def test_peers_have_the_same_makespan_with_and_without_hint() -> None:
    found = {(OURS, HINT): [1.0, 1.2], (OURS, NO_HINT): [1.5], ("nginx", NO_HINT): [2.2]}
    rows = router_faults.makespan_rows(found, (HINT, NO_HINT))
    assert [(row.case, row.ours, row.peer, row.ratio) for row in rows] == [
        (HINT, 1.1, 2.2, 2.0),
        (NO_HINT, 1.5, 2.2, pytest.approx(2.2 / 1.5)),
    ]


def test_traffic_avoids_a_worker_after_the_last_window_with_more_than_a_trickle() -> None:
    burst = [0.01 * i for i in range(80)]  # 100 a second for 0.8 s
    trials = [1.5, 2.5, 3.5]
    assert avoided_after([*burst, *trials], 4.0, fair=50) == pytest.approx(0.79)
    assert avoided_after(trials, 4.0, fair=50) == 0.0
    assert avoided_after([], 4.0, fair=50) == 0.0
    assert avoided_after([0.01 * i for i in range(400)], 4.0, fair=50) == 4.0


def test_a_worker_is_back_with_the_first_window_of_half_a_fair_share() -> None:
    late = [1.0 + 0.01 * i for i in range(200)]
    # The window that begins at 0.75 has the 25 requests from 1.0 to 1.25 in it.
    assert back_after(late, 5.0, fair=50) == pytest.approx(0.75)
    assert back_after([0.01 * i for i in range(50)], 5.0, fair=50) == 0.0
    assert back_after([1.0, 2.0], 5.0, fair=50) == 5.0


def test_fault_rows_name_the_fault_and_lower_is_better() -> None:
    results = {
        ("kill", OURS): {FAILED: 1, AVOIDED: 0.5, BACK: 2.0},
        ("kill", "naive"): {FAILED: 8, AVOIDED: 4.0, BACK: 1.0},
    }
    rows = router_faults.fault_rows(results, ["kill"])
    assert [(row.case, row.metric, row.ratio) for row in rows] == [
        ("fault: kill", "failed requests", 8.0),
        ("fault: kill", "s until traffic avoids it", 8.0),
        ("fault: kill", "s until it is back", 0.5),
    ]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b'{"id": "7", "worker": "w1"}', ("w1", None)),
        (200, b'{"id": "8", "worker": "w1"}', (None, "answer to another request")),
        (200, b"<html>", (None, "body is not a worker's")),
        (500, b'{"id": "7", "worker": "w1"}', (None, "status 500")),
    ],
)
def test_only_its_own_answer_is_one(status: int, body: bytes, expected: tuple[str | None, str | None]) -> None:
    assert judge(7, b"http/1.1 %d oh" % status, body) == expected


def test_a_worker_understands_what_the_client_asks() -> None:
    head, _, body = request_of(7, 0.25, cost=3.0)[1].partition(b"\r\n\r\n")
    assert b"\r\nx-practicum-cost: 3.000000\r\n" in head + b"\r\n"
    assert f"Content-Length: {len(body)}".encode() in head
    job = JOB.search(body)
    assert job is not None and (job[1], float(job[2])) == (b"7", 0.25)
    compact = json.dumps(json.loads(body), separators=(",", ":")).encode()  # as some routers pass it on
    assert JOB.search(compact) is not None
    assert b"x-practicum-cost" not in request_of(7, 0.25)[1]


def test_a_worker_that_hung_loses_what_it_held_when_it_recovers() -> None:
    async def hang() -> tuple[object, object, object]:
        emulation = Emulation(Worker(0))
        job = b'{"prompt": "7 0.0 please"}'
        await emulation.respond(b"post /control/hang http/1.1", b"")
        held = asyncio.create_task(emulation.respond(b"post / http/1.1", job))
        await asyncio.sleep(0)
        is_held = not held.done()
        await emulation.respond(b"post /control/ok http/1.1", b"")
        return is_held, await held, await emulation.respond(b"post / http/1.1", job)

    is_held, lost, answered = asyncio.run(hang())
    assert is_held and lost is None
    assert answered == (b"200 OK", b'{"id": "7", "worker": "w0"}')


@pytest.mark.parametrize(
    "framed",
    [
        b"Content-Length: 4\r\n\r\n{\r\n}",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\n{\r\n\r\n1\r\n}\r\n0\r\n\r\n",
    ],
)
def test_a_message_is_read_to_its_end_however_it_is_framed(framed: bytes) -> None:
    async def read() -> list[tuple[bytes, bytes]]:
        reader = asyncio.StreamReader()
        reader.feed_data((b"HTTP/1.1 200 OK\r\n" + framed) * 2)
        return [await read_message(reader) for _ in range(2)]

    assert asyncio.run(read()) == [(b"http/1.1 200 ok", b"{\r\n}")] * 2


def test_the_client_sends_every_request_once_and_checks_each_response() -> None:
    async def ask() -> tuple[list[Result], int]:
        server = await asyncio.start_server(Emulation(Worker(0)).serve, "127.0.0.1", 0)
        results: list[Result] = []
        port = server.sockets[0].getsockname()[1]
        num_unasked = await send_all(port, (request_of(n, 0.001) for n in range(9)), 3, results.append)
        server.close()
        return results, num_unasked

    results, num_unasked = asyncio.run(ask())
    assert sorted(result.id for result in results) == list(range(9)) and num_unasked == 0
    assert {(result.worker, result.failure) for result in results} == {("w0", None)}


def test_ports_are_free_and_never_given_out_twice() -> None:
    ports = free_ports(3) + free_ports(3)
    assert len(set(ports)) == 6
    assert all(port in PORTS and not is_listened_to(port) for port in ports)


def test_our_router_is_told_its_workers_and_the_arguments_of_the_command_line(tmp_path: Path) -> None:
    setup = Setup(tmp_path, 20000, [20001, 20002], response_timeout_s=2.0, arguments=["--policy", "session"])
    command = " ".join(ROUTERS[OURS](setup)[0])
    assert "router --worker http://127.0.0.1:20001 --worker http://127.0.0.1:20002 --host 127.0.0.1" in command
    assert command.endswith("--port 20000 --response-timeout 2.0 --policy session")


def test_who_takes_part() -> None:
    assert router.contestants(Options(peer="none")) == [OURS]
    assert router.contestants(Options(peer="nginx")) == [OURS, "nginx"]
    assert router.contestants(Options()) == list(ROUTERS)
    with pytest.raises(UsageError, match="known: naive, sglang_router"):
        router.contestants(Options(peer="squid"))


def test_only_wanted_cases_are_measured() -> None:
    assert router.run(Options(peer="none", case="no such case")).rows == []
