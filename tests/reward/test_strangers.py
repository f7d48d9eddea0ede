"""A run answers nobody who does not know its secret: every port that it listens at is knocked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ADDRESS = "10.77.0.1"
# A network with one machine, whose address is not loopback's.
NETWORK = f'ip link set lo up && ip addr add {ADDRESS}/24 dev lo && ip route add default dev lo && exec "$@"'


@pytest.fixture(scope="module", params=[1, 2], ids=["one machine", "two raylets"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    inside = ["unshare", "--net", "sh", "-c", NETWORK, "sh"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this sandbox allows no network of one's own: {error}")
    command = [*inside, sys.executable, "-m", "tests.reward.knocking", str(request.param)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert result["address"] == ("127.0.0.1" if request.param == 1 else ADDRESS)
    return result


def test_nothing_is_served_to_a_stranger_and_nothing_changes(facts: dict[str, Any]) -> None:
    assert len(facts["bound"]) > 6
    assert facts["served"] == {}
    assert facts["unchanged"]
    assert facts["after"] == pytest.approx(facts["before"], abs=1e-4)
    assert facts["before"][2] == 0.25


def test_everything_of_ours_listens_at_one_address(facts: dict[str, Any]) -> None:
    assert all(url.startswith(f"http://{facts['address']}:") for url in facts["servers"])
    routers = [place for place, command in facts["bound"].items() if "router.launch" in command]
    assert len(routers) == 2
    assert all(place.startswith(f"{facts['address']}:") for place in routers)


def test_the_secret_is_on_no_command_line(facts: dict[str, Any]) -> None:
    assert not facts["told_on_a_command_line"]
