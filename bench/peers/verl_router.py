"""verl's naive router, as verl starts it but without Ray: `python -m bench.peers.verl_router PORT WORKER_URL...`."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def main() -> None:
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None, "run this with the interpreter in bench/peers/venv-verl"
    folder = Path(spec.origin).parent
    # Packages without what they would import: torch and much else, none of which the router needs.
    for name, path in {"verl": folder, "verl.utils": folder / "utils"}.items():
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    naive_router = runpy.run_path(str(folder / "experimental" / "reward_loop" / "router" / "naive_router.py"))
    naive_router["run_router"]("127.0.0.1", int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    main()
