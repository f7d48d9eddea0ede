from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from practicum.errors import RouterError
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.settings import RouterSettings, parse_settings, worker_address


def test_defaults_are_enough() -> None:
    settings = RouterSettings.make()
    assert settings.workers == () and settings.policy == "expected_finish" and settings.token is None


def test_what_is_told_is_kept() -> None:
    settings = RouterSettings.make(workers=["http://a:1", "http://b:1"], policy="prefix", hedge_quantile=0.95, port=0)
    assert settings.workers == ("http://a:1", "http://b:1")
    assert (settings.policy, settings.hedge_quantile, settings.port) == ("prefix", 0.95, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_can_be_had(policy: str) -> None:
    assert RouterSettings.make(policy=policy).policy == policy


def test_settings_do_not_change() -> None:
    settings: Any = RouterSettings.make()
    with pytest.raises(ValidationError):
        settings.port = 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", "eighty"),
        ("admin_port", 70000),
        ("token", ""),
        ("max_in_flight", 0),
        ("max_waiting", -1),
        ("wait_timeout_s", 0),
        ("connect_timeout_s", -1.0),
        ("response_timeout_s", "soon"),
        ("response_timeout_s", float("nan")),
        ("drain_timeout_s", None),
        ("max_attempts", 0),
        ("retry_share", 1.5),
        ("hedge_quantile", 0.0),
        ("hedge_quantile", 1.0),
        ("probe_path", "health"),
        ("probe_path", "/a b"),
        ("probe_path", "/a\r\nx: y"),
        ("probe_interval_s", 0),
        ("probe_timeout_s", 0),
        ("eject_after", 0),
        ("slow_factor", 1.0),
        ("retrial_s", 0),
        ("session_header", ""),
        ("session_header", "a b"),
        ("session_header", "a:"),
        ("prefix_bytes", 0),
        ("workers", 7),
        ("workers", "http://a:1"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name: str, value: object) -> None:
    with pytest.raises(RouterError) as caught:
        RouterSettings.make(**{name: value})
    told = name if name == "token" else f"{name}={value!r}"  # a secret is not repeated
    assert f"router setting {told}: " in str(caught.value)


def test_a_name_that_is_not_known_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RouterError, match=r"router setting 'polcy' is not known; the settings are: workers, policy, "):
        RouterSettings.make(polcy="prefix")


def test_a_policy_that_is_not_known_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RouterError, match=r"policy 'random' is not known; the policies are: expected_finish, least"):
        RouterSettings.make(policy="random")


@pytest.mark.parametrize(
    "again", ["http://a:80", "http://a:80/", "http://a", "http://a/", "http://A:80", "HTTP://a:80"]
)
def test_a_worker_named_twice_is_refused(again: str) -> None:
    with pytest.raises(RouterError, match=f"worker {again} is named twice"):
        RouterSettings.make(workers=["http://a:80", "http://b:80", again])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.7:8000", ("http", "10.0.0.7", 8000)),
        ("http://worker", ("http", "worker", 80)),
        ("http://worker/", ("http", "worker", 80)),
        ("https://worker", ("https", "worker", 443)),
        ("http://[fe80::1]:81", ("http", "fe80::1", 81)),
    ],
)
def test_the_address_of_a_worker(url: str, address: tuple[str, str, int]) -> None:
    assert worker_address(url) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "is not a URL such as"),
        ("worker", "is not a URL such as"),
        ("worker:8000", "is not a URL such as"),
        ("10.0.0.7:8000", "is not a URL such as"),
        ("ftp://worker", "is not a URL such as"),
        ("http://", "is not a URL such as"),
        ("http://:8000", "is not a URL such as"),
        ("http://wörker", "is not a URL such as"),
        ("http://worker:port", "could not be cast|Port"),
        ("http://worker:65536", "Port out of range"),
        ("http://[::1", "Invalid IPv6"),
        ("http://worker:0", "no port that can be connected to"),
        ("http://worker/v1", "only scheme, host and port"),
        ("http://worker?a=1", "only scheme, host and port"),
        ("http://worker#a", "only scheme, host and port"),
        ("http://me:secret@worker", "only scheme, host and port"),
    ],
)
def test_what_is_no_address_of_a_worker_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        worker_address(url)
    with pytest.raises(RouterError, match=why):
        RouterSettings.make(workers=["http://fine:1", url])


def test_settings_are_read_from_the_command_line_as_in_a_config() -> None:
    pairs = [
        "port=8000",
        "token=123",
        "hedge_quantile=null",
        "workers=[http://a:1, http://b:1]",
        "wait_timeout_s=1.5",
    ]
    values = parse_settings([*pairs, "probe_path=/ready?a=b"])
    assert values == {
        "port": 8000,
        "token": "123",
        "hedge_quantile": None,
        "workers": ["http://a:1", "http://b:1"],
        "wait_timeout_s": 1.5,
        "probe_path": "/ready?a=b",
    }
    assert RouterSettings.make(**values).workers == ("http://a:1", "http://b:1")
    assert parse_settings([]) == {}


def test_a_pair_that_is_none_is_refused() -> None:
    with pytest.raises(RouterError, match="--set port: write NAME=VALUE"):
        parse_settings(["policy=prefix", "port"])


def test_a_value_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(RouterError, match="workers"):
        parse_settings(["workers=[a"])
