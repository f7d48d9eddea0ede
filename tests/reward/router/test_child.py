"""The child process's side of the handshake."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from practicum.reward.router import RouterSettings
from tests.reward.router.client import LOCAL, Client, request


def start(settings: RouterSettings) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "practicum.reward.router.child"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(settings.model_dump_json() + "\n")
    child.stdin.flush()
    return child


def first_words(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    words: dict[str, Any] = json.loads(child.stdout.readline())
    return words


def test_it_tells_its_address_and_ends_with_its_input() -> None:
    child = start(RouterSettings(admin_port=0))
    told = first_words(child)
    with Client(told["admin_url"]) as client:
        assert client.ask(request(target=b"/workers", host=LOCAL)).status == 200
    child.communicate(timeout=10.0)
    assert child.returncode == 0


def test_it_tells_what_went_wrong() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = start(RouterSettings(port=taken.getsockname()[1]))
        assert "in use" in first_words(child)["error"]
        child.communicate(timeout=10.0)
