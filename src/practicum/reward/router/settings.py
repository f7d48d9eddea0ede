"""The settings of a router: frozen, checked when they are made, unknown names refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from practicum.errors import RouterError

_HINTS = {
    "probe_path": "must begin with / and have no spaces",
    "session_header": "must be the name of a header",
    "token": "must be visible ASCII characters without spaces",
    "token_for": "must be control or all",
}


class RouterSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    workers: tuple[str, ...] = ()
    """Addresses of the workers, such as http://gpu-1:8000. More can be added while it runs."""
    policy: str = "expected_finish"
    """Which worker gets a request: expected_finish, least_requests, round_robin, power_of_two, session or prefix."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 for all of this machine's."""
    port: int = Field(0, ge=0, le=65535)
    """The port to listen at; 0 takes a free one. The command line's default is 8000."""
    admin_port: int | None = Field(None, ge=0, le=65535)
    """A port of its own for the control plane. Without it the control plane is at /router of the same port."""
    token: str | None = Field(None, pattern=r"^[!-~]+$", repr=False)
    """What callers of the control plane must send as bearer token. Without one it serves this machine only."""
    token_for: Literal["control", "all"] = "control"
    """all: requests must carry the token too, in the header x-practicum-token, which is not passed on."""
    paths: tuple[str, ...] = ()
    """Paths that requests may have, such as /classify; others are answered 404. Without one all are passed on."""

    max_in_flight: int = Field(256, ge=1)
    """Requests one worker may have at a time; the others wait."""
    max_waiting: int = Field(10_000, ge=0)
    """Requests that may wait for a worker; beyond that the least urgent are refused with 429 or 503."""
    wait_timeout_s: float = Field(60.0, gt=0)
    """How long a request may wait for a worker."""
    connect_timeout_s: float = Field(2.0, gt=0)
    """How long a worker may take to accept a connection."""
    response_timeout_s: float = Field(600.0, gt=0)
    """How long a worker may be silent while a request is with it, until its answer begins and between its parts; also
    how long a client may take none of its answer."""
    client_timeout_s: float = Field(60.0, gt=0)
    """How long a client may be silent in the middle of a request."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long a client may take to send a request, from its first byte to its last."""
    drain_timeout_s: float = Field(30.0, gt=0)
    """How long a stopping router waits for requests that are under way."""

    max_attempts: int = Field(3, ge=1)
    """Workers that one request may be sent to. Refused connections don't count."""
    retry_share: float = Field(0.2, ge=0, le=1)
    """Retries and hedges allowed, as a share of all requests (and 100 at once beyond that), but for ejected ones."""
    hedge_quantile: float | None = Field(None, gt=0, lt=1)
    """Send a request to a second worker when it takes longer than this share of requests do; the first answer wins."""

    probe_path: str = Field("/health", pattern=r"^/[!-~]*$")
    """Where a worker is asked whether it lives. Any answer below 500 will do."""
    probe_interval_s: float = Field(1.0, gt=0)
    """How often a worker without other signs of life is asked."""
    probe_timeout_s: float = Field(1.0, gt=0)
    """How long it may take to answer."""
    eject_after: int = Field(3, ge=1)
    """Failures in a row, at least, after which a worker may be ejected."""
    slow_factor: float = Field(5.0, gt=1)
    """A worker that has become this many times slower than it was, and than the others have, gets none either."""
    retrial_s: float = Field(0.5, gt=0)
    """When an ejected worker is tried again; twice as long after each failed trial, up to four times this."""

    session_header: str = Field("x-practicum-session", pattern=r"^[A-Za-z0-9-]+$")
    """Requests with the same value here go to the same worker (policy session)."""
    prefix_bytes: int = Field(256, ge=1)
    """Prompts that begin with the same bytes go to the same worker (policy prefix)."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_switches(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic would take it for 1 or 0
            raise ValueError("is neither true nor false")
        return value

    @field_validator("workers")
    @classmethod
    def _no_worker_twice(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        addresses = [worker_address(url)[1:] for url in workers]
        for index, address in enumerate(addresses):
            if address in addresses[:index]:
                raise ValueError(f"worker {workers[index]} is named twice")
        return workers

    @field_validator("paths")
    @classmethod
    def _paths_begin_with_a_slash(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not re.fullmatch(r"/[!->@-~]*", path):
                raise ValueError(f"path {path!r} must begin with / and have no spaces and no query")
        return paths

    @field_validator("token_for")
    @classmethod
    def _a_token_to_ask_for(cls, token_for: str, info: ValidationInfo) -> str:
        if token_for == "all" and info.data.get("token") is None:
            raise ValueError("needs a token")
        return token_for

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, policy: str) -> str:
        from practicum.reward.router.policy import POLICIES

        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not known; the policies are: {', '.join(POLICIES)}")
        return policy

    @classmethod
    def make(cls, **values: Any) -> RouterSettings:
        """Make settings from keyword arguments. A `RouterError` names the one that cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise RouterError(f"router setting {name!r} is not known; the settings are: {known}.") from None
            what = _HINTS.get(name, first["msg"]) if "pattern" in first["type"] else first["msg"]
            what = what.removeprefix("Value error, ")
            given = "" if name == "token" else f"={first['input']!r}"
            raise RouterError(f"router setting {name}{given}: {what}.") from None


def worker_address(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a worker. Raises `ValueError` when the URL is not one of a worker."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"worker {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[A-Za-z0-9._:%-]+", parts.hostname or ""):
        raise ValueError(f"worker {url!r} is not a URL such as http://gpu-1:8000")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            f"worker {url!r}: only scheme, host and port can be given, since requests are passed on as they are"
        )
    if port == 0:
        raise ValueError(f"worker {url!r} has no port that can be connected to")
    host = parts.hostname or ""
    with suppress(ValueError):
        host = str(ip_address(host))  # one spelling for each
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80)


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read settings from NAME=VALUE. Text settings take the value as it is, others read it as YAML like the config."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RouterError(f"--set {pair}: write NAME=VALUE.")
        field = RouterSettings.model_fields.get(name)
        if field is not None and field.annotation in (str, str | None):
            values[name] = text
            continue
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise RouterError(f"--set {pair}: {text!r} is not a value that YAML can read.") from None
    return values
