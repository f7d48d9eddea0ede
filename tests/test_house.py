"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "practicum"
FILES = sorted(SOURCE.rglob("*.py"))

BASE = {"errors", "types", "config"}
# Room -> the rooms it may import from, beside itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors", "types"},
    "adapters": {"errors"},
    "control_tokens": set(),
    "models": {"errors", "types", "adapters", "control_tokens"},
    "functions": {"errors"},
    "secret": set(),
    "controller": BASE - {"types"} | {"secret"},
    "algo": BASE,
    "data": BASE,
    "weights": BASE,
    "processes": BASE,
    "replay": BASE,
    "rollout": BASE
    | {"adapters", "models", "controller", "weights", "replay", "processes", "functions", "control_tokens", "secret"},
    "reward": BASE | {"models", "controller", "rollout", "processes", "functions", "control_tokens", "secret"},
    "train": BASE | {"adapters", "models", "controller", "algo", "data", "weights", "replay"},
    "loop": BASE
    | {"adapters", "models", "controller", "algo", "data", "weights", "rollout", "reward", "train", "replay"}
    | {"control_tokens"},
    "demo": BASE | {"models", "loop"},
    "__main__": {"cli"},
    "messages": {"errors"},
    "routes_cli": BASE | {"messages", "replay"},
    "cli": BASE | {"messages", "models", "routes_cli", "loop", "demo", "reward", "rollout"},
    "__init__": BASE | {"loop"},
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.update(f"practicum.{alias.name}" for alias in node.names if node.module == "practicum")
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("practicum.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    forbidden = imported_rooms(path) - ALLOWED[room(path)] - {room(path)}
    assert not forbidden, f"{room(path)} must not import {', '.join(sorted(forbidden))}"
