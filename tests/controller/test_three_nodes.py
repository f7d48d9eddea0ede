"""Packing, the order of ranks, and the loss of a node, on a cluster of three raylets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    script = Path(__file__).with_name("three_nodes.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def nodes_of(places: list[list[Any]]) -> list[str]:
    return [place[0] for place in places]


def test_processes_of_an_entry_share_a_node_and_ranks_follow_the_nodes(facts: dict[str, Any]) -> None:
    places = facts["packing"]["first"]
    a, b, c, d = nodes_of(places)
    assert a == b and c == d and a != c
    assert [place[1:] for place in places] == [[0, 0, 2, 0], [1, 1, 2, 0], [2, 0, 2, 1], [3, 1, 2, 1]]
    assert len(set(nodes_of(facts["packing"]["all_nodes"]))) == 3
    assert sorted(nodes_of(facts["packing"]["all_nodes"])) == nodes_of(facts["packing"]["all_nodes"])


def test_ranks_stay_where_they_were_after_a_restart(facts: dict[str, Any]) -> None:
    assert facts["packing"]["first"] == facts["packing"]["second"]


def test_a_run_spreads_its_workers_over_the_nodes(facts: dict[str, Any]) -> None:
    a, b, c, d, e = nodes_of(facts["packing"]["spread"])
    assert a == b and c == d and len({a, c, e}) == 3


def test_what_no_node_can_hold_is_refused_with_what_each_has(facts: dict[str, Any]) -> None:
    assert "asked for 3 + 1 processes with 1 CPU each" in facts["too_large"]
    assert facts["too_large"].count("2 of 2 CPU free") == 3


def test_a_node_lost_in_mid_call_is_a_clear_error_and_the_rest_takes_over(facts: dict[str, Any]) -> None:
    loss = facts["loss"]
    assert loss["noticed_s"] < 10
    assert set(loss["ranks"]) <= set(loss["lost_ranks"]) and loss["ranks"]
    assert f"rank {loss['ranks'][0]} (node " in loss["error"] and "died during Citizen.wait" in loss["error"]
    assert loss["victim"] not in nodes_of(loss["after"])
    assert [place[1] for place in loss["after"]] == [0, 1, 2, 3]
    assert len(set(nodes_of(loss["after"]))) == 2
    print({name: round(loss[name], 2) for name in ("noticed_s", "restart_s")})


def test_without_room_the_restart_says_what_is_missing(facts: dict[str, Any]) -> None:
    assert "lost with its node, and no other has room" in facts["no_spare"]
    assert "asked for 2 + 2 processes with 1 CPU each; the cluster has" in facts["no_spare"]
