"""Answers of the router's own: errors, and what the control plane says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus


def answer(status: int, body: bytes, content_type: str, *, close: bool, extra: Sequence[str] = ()) -> bytes:
    """An answer of the router's own."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "server: practicum-router",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *extra,
        *(["connection: close"] if close else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_answer(status: int, code: str, reason: str, *, close: bool) -> bytes:
    body = json.dumps({"error": {"code": code, "message": reason}}).encode() + b"\n"
    extra = {
        401: ['www-authenticate: Bearer realm="practicum router"'],
        429: ["retry-after: 1"],
        503: ["retry-after: 1"],
    }
    return answer(status, body, "application/json", close=close, extra=extra.get(status, ()))
