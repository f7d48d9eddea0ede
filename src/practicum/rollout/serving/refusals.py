"""Answers that are no answer, in OpenAI's shape.

Refusal            status, type and code, as clients tell errors apart
├── BadRequest     400  what was asked cannot be answered by anybody
├── Unauthorized   401
├── NoSuchModel    404
└── NotNow         503  asleep, or about to end: somebody else may answer
"""

from __future__ import annotations

from typing import ClassVar

from aiohttp import web


class Refusal(Exception):
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class BadRequest(Refusal, ValueError):
    status, kind = 400, "invalid_request_error"


class Unauthorized(Refusal):
    status, kind, code = 401, "authentication_error", "invalid_api_key"


class NoSuchModel(Refusal):
    status, kind, code = 404, "invalid_request_error", "model_not_found"


class NotNow(Refusal):
    status, kind = 503, "service_unavailable"


def error_body(error: BaseException) -> dict[str, object]:
    if isinstance(error, Refusal):
        return _body(str(error), error.kind, error.code)
    return _body(f"{type(error).__name__}: {error}", "server_error", None)


def error_reply(error: BaseException) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
    status = error.status if isinstance(error, Refusal) else 500
    return web.json_response(error_body(error), status=status, headers=headers)


def http_error_reply(request: web.Request, error: web.HTTPException) -> web.Response:
    """Of a path or method that is not there, say."""
    message = f"{request.method} {request.path}: {error.reason}"
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
    return web.json_response(_body(message, kind, None), status=error.status, headers=allowed)


def _body(message: str, kind: str, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
