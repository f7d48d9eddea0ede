"""Errors over HTTP, in OpenAI's shape.

HttpError          status, type and code, by which clients know an error
├── BadRequest     400  a request that nobody can answer
├── Unauthorized   401
├── NoSuchModel    404
└── Unavailable    503  asleep, or about to end: somebody else may answer
"""

from __future__ import annotations

import json
from typing import ClassVar

from aiohttp import web


class HttpError(Exception):
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class BadRequest(HttpError, ValueError):
    status, kind = 400, "invalid_request_error"


class Unauthorized(HttpError):
    status, kind, code = 401, "authentication_error", "invalid_api_key"


class NoSuchModel(HttpError):
    status, kind, code = 404, "invalid_request_error", "model_not_found"


class Unavailable(HttpError):
    status, kind = 503, "service_unavailable"


def error_json(error: BaseException) -> bytes:
    if isinstance(error, HttpError):
        return _json(str(error), error.kind, error.code)
    return _json(f"{type(error).__name__}: {error}", "server_error", None)


def error_response(error: BaseException) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
    status = error.status if isinstance(error, HttpError) else 500
    return web.Response(body=error_json(error), status=status, headers=headers, content_type="application/json")


def http_error_response(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return aiohttp's own errors, such as a path that is not there, in the same shape."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = _json(f"{request.method} {request.path}: {error.reason}", kind, None)
    headers = {name: value for name, value in error.headers.items() if name == "Allow"}
    return web.Response(body=body, status=error.status, headers=headers, content_type="application/json")


def _json(message: str, kind: str, code: str | None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
