"""What a box can see: the interpreter, its standard library and the machine's shared libraries, all read-only."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGES = "/packages"
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")


@dataclass(frozen=True, slots=True)
class Layout:
    interpreter: str
    packages: str  # where this environment keeps its packages on the machine
    binds: list[tuple[str, str]] = field(default_factory=list)  # from the machine, to the box
    links: list[tuple[str, str]] = field(default_factory=list)  # target, link
    hidden: list[str] = field(default_factory=list)  # folders that are empty in the box


def interpreter() -> str:
    """Return the Python that runs this, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def plan(packages: bool) -> Layout:
    """Plan what to bind where. `packages` adds this environment's site-packages, as `/packages`."""
    layout = Layout(interpreter(), os.path.realpath(sysconfig.get_path("platlib")))
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    folders = [f"{prefix}/{name}" for prefix in sorted(prefixes) for name in ("lib", "lib64")]
    for folder in [*LIBRARIES, *folders]:
        real = os.path.realpath(folder)
        if not os.path.isdir(real):
            continue
        if real != folder:
            layout.links.append((real, folder))
        add(layout, real)
    for file in (layout.interpreter, "/etc/ld.so.cache"):
        if os.path.isfile(file):
            add(layout, os.path.realpath(file))
    layout.hidden.extend(sorted(third_party(layout)))
    layout.links.extend([("/box/tmp", "/tmp"), ("/box/tmp", "/dev/shm")])
    if packages:
        layout.binds.append((layout.packages, PACKAGES))
    return layout


def add(layout: Layout, path: str) -> None:
    if not any(path == known or path.startswith(known + "/") for known, _ in layout.binds):
        layout.binds.append((path, path))


def third_party(layout: Layout) -> set[str]:
    """Return folders with packages that are not part of the standard library, within what is bound."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = {
        f"{folder}/{python}/{name}"
        for folder, _ in layout.binds
        for python in (version, "python3")
        for name in ("site-packages", "dist-packages")
    }
    return {path for path in found if Path(path).is_dir() and os.path.realpath(path) == path}
