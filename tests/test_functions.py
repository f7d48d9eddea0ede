from __future__ import annotations

import sys
from pathlib import Path

import pytest

from practicum.errors import RolloutError
from practicum.functions import load_named

FILE = """
VALUE = 3
def one(): return 1
class Thing: ...
"""


def load(spec: str, kind: str = "function") -> object:
    return load_named(spec, key="rollout.agent.tools", error=RolloutError, kind=kind)


def test_functions_and_classes_are_found_in_files_and_packages(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    one = load(f"{tmp_path}/mine.py:one")
    assert callable(one) and one() == 1
    thing = load(f"{tmp_path}/mine.py:Thing", "class")
    assert (
        isinstance(thing, type) and sys.modules[thing.__module__].Thing is thing
    )  # so that its objects can be pickled
    assert load("math:floor") is not None
    assert load(f"{tmp_path}/mine.py:one") is one  # the file is run once


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_tool.py").write_text("VALUE = 4")
    (tmp_path / "uses.py").write_text("import neighbour_of_tool as n\ndef f(): return n.VALUE")
    function = load(f"{tmp_path}/uses.py:f")
    assert callable(function) and function() == 4


@pytest.mark.parametrize(
    ("spec", "kind", "complaint"),
    [
        ("one", "function", "write path/to/file.py:function or package.module:function"),
        (":one", "class", "write path/to/file.py:class"),
        ("nowhere.py:one", "function", "file nowhere.py does not exist"),
        ("no_such_package:one", "function", "import raised ModuleNotFoundError"),
        ("{folder}/mine.py:two", "function", "has no function 'two'; it defines one"),
        ("{folder}/mine.py:VALUE", "function", "has no function 'VALUE'"),
        ("{folder}/mine.py:Thong", "class", "has no class 'Thong'; it defines Thing"),
        ("{folder}/broken.py:one", "function", "broken.py raised ZeroDivisionError"),
    ],
)
def test_what_cannot_be_found_is_named_with_its_key(tmp_path: Path, spec: str, kind: str, complaint: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    spec = spec.format(folder=tmp_path)
    with pytest.raises(RolloutError) as caught:
        load(spec, kind)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"rollout.agent.tools={spec!r}")
