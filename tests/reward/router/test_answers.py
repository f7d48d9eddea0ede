from __future__ import annotations

import json

import pytest

from practicum.reward.router.answers import answer, error_answer
from practicum.reward.router.heads import END, read_response


def split(raw: bytes) -> tuple[bytes, bytes]:
    head, _, body = raw.partition(END)
    return head + END, body


def test_an_answer_is_one_whole_message() -> None:
    head, body = split(answer(200, b"fine", "text/plain", close=False))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"fine"
    read = read_response(head)
    assert (read.status, read.framing.length, read.keep_alive) == (200, 4, True)
    assert b"\r\ncontent-type: text/plain\r\n" in head


def test_an_answer_can_end_the_connection() -> None:
    head, _ = split(answer(200, b"", "text/plain", close=True))
    assert not read_response(head).keep_alive


def test_an_answer_may_have_more_headers() -> None:
    head, body = split(answer(405, b"no", "text/plain", close=False, extra=["allow: GET", "x-a: b"]))
    assert b"\r\nallow: GET\r\nx-a: b\r\n" in head and body == b"no"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 431, 501, 502, 503, 504, 505])
@pytest.mark.parametrize("close", [True, False])
def test_an_error_says_what_and_why(status: int, close: bool) -> None:
    reason = 'worker "http://a:1" said:\r\n\r\nnö'
    head, body = split(error_answer(status, "worker_failed", reason, close=close))
    read = read_response(head)
    assert (read.status, read.framing.length, read.keep_alive) == (status, len(body), not close)
    assert json.loads(body) == {"error": {"code": "worker_failed", "message": reason}}
    assert b"\r\ncontent-type: application/json\r\n" in head


@pytest.mark.parametrize(
    ("status", "header"),
    [(429, b"retry-after: 1"), (503, b"retry-after: 1"), (401, b'www-authenticate: Bearer realm="practicum router"')],
)
def test_an_error_says_what_can_be_done(status: int, header: bytes) -> None:
    assert b"\r\n" + header + b"\r\n" in error_answer(status, "code", "reason", close=False)
    assert header not in error_answer(502, "code", "reason", close=False)
