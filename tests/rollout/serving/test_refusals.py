from __future__ import annotations

import json

from practicum.rollout.serving.refusals import BadRequest, NoSuchModel, NotNow, Unauthorized, error_reply


def test_errors_have_openais_shape() -> None:
    for error, status, kind, code in [
        (BadRequest("too long", "context_length_exceeded"), 400, "invalid_request_error", "context_length_exceeded"),
        (BadRequest("bad"), 400, "invalid_request_error", None),
        (Unauthorized("who?"), 401, "authentication_error", "invalid_api_key"),
        (NoSuchModel("x"), 404, "invalid_request_error", "model_not_found"),
        (NotNow("asleep"), 503, "service_unavailable", None),
        (ValueError("a bug"), 500, "server_error", None),
    ]:
        reply = error_reply(error)
        assert reply.status == status and reply.body is not None
        told = json.loads(reply.body)["error"]  # type: ignore[arg-type]
        assert (told["type"], told["code"]) == (kind, code)
        assert str(error) in told["message"]
    assert error_reply(Unauthorized("who?")).headers["WWW-Authenticate"] == "Bearer"
