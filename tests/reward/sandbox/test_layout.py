from __future__ import annotations

import os
import sys
import sysconfig

from practicum.reward.sandbox import layout


def test_the_interpreter_is_the_real_one_outside_the_environment() -> None:
    path = layout.interpreter()
    assert os.path.realpath(path) == path and os.access(path, os.X_OK)
    assert not path.startswith(sys.prefix + "/") or sys.prefix == sys.base_prefix


def test_the_standard_library_is_bound_and_packages_are_hidden() -> None:
    plan = layout.plan(False)
    bound = [source for source, _ in plan.binds]
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    assert any(library.startswith(folder) for folder in bound)
    assert "/" not in bound and "/usr" not in bound and "/etc" not in bound
    assert not any(os.path.expanduser("~") == folder for folder in bound)
    assert all(path.endswith("-packages") for path in plan.hidden)


def test_packages_are_bound_on_request() -> None:
    sources = {target: source for source, target in layout.plan(True).binds}
    assert os.path.isdir(os.path.join(sources[layout.PACKAGES], "numpy"))
    assert layout.PACKAGES not in dict(layout.plan(False).binds).values()
