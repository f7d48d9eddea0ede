"""The secret of a run: whoever knows it belongs to the run.

The driver makes one, `Controller.secret`, and hands it to the processes it starts, in arguments of calls or on standard
input. It is never on a command line and in no message: a `Secret` does not show itself where it is printed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

TOKEN_HEADER = "x-practicum-token"
"""What a router reads and takes out of a request. `Authorization` is for the server behind it."""


class Secret(str):
    """Text that goes out only where it is asked for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"


def new_secret() -> Secret:
    return Secret(secrets.token_urlsafe(32))


def is_secret(given: bytes, secret: str) -> bool:
    """Compare in a time that is the same however much of it is right."""
    return hmac.compare_digest(given, secret.encode())


def is_bearer(authorization: bytes | None, secret: str) -> bool:
    """Return whether an `Authorization` header carries the secret."""
    scheme, _, given = (authorization or b"").partition(b" ")
    return scheme.lower() == b"bearer" and is_secret(given.strip(), secret)


def headers_for(secret: str, *, server: bool) -> Mapping[str, str]:
    """Return what a request needs to pass a router of ours and, with `server`, a server of ours behind it."""
    return {TOKEN_HEADER: secret} | ({"Authorization": f"Bearer {secret}"} if server else {})
