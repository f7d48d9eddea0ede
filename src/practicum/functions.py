"""Finds what users write in files of their own: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from practicum.errors import PracticumError


def load_named(spec: str, *, key: str, error: type[PracticumError], kind: str = "function") -> Callable[..., Any]:
    """The function or class that `spec` names. `key` is the one in the config; mistakes are raised as `error`."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise error(f"{key}={spec!r}: write path/to/file.py:{kind} or package.module:{kind}.")
    where = f"{key}={spec!r}"
    module = _from_file(place, where, error) if place.endswith(".py") else _from_import(place, where, error)
    found = getattr(module, name, None)
    if not callable(found):
        looked_for = inspect.isclass if kind == "class" else inspect.isfunction
        defined = [n for n, v in vars(module).items() if looked_for(v) and v.__module__ == module.__name__]
        raise error(f"{where}: {place} has no {kind} {name!r}; it defines {', '.join(defined) or 'none'}.")
    return found  # type: ignore[no-any-return]


def _from_file(place: str, where: str, error: type[PracticumError]) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise error(f"{where}: file {place} does not exist (looked from {Path.cwd()}).")
    _make_importable(path.parent)
    module_name = f"practicum_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    try:
        found.loader.exec_module(module)
    except BaseException as failure:
        del sys.modules[module_name]
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise error(f"{where}: {place} raised {type(failure).__name__}: {failure}") from failure
    return module


def _from_import(place: str, where: str, error: type[PracticumError]) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except Exception as failure:
        raise error(f"{where}: import raised {type(failure).__name__}: {failure}") from failure


def _make_importable(folder: Path) -> None:
    """A file may import its neighbours, as it could if it were run."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
