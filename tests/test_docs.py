"""The documentation tells the truth: every key is described, every file it names is there.

`python -m tests.test_docs` writes the tables of docs/configuration.md, docs/rewards.md and docs/router.md anew.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.config import Config, section_of
from practicum.reward.graders import GRADERS
from practicum.reward.router import RouterSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MARK = "<!-- keys -->\n"
ROUTER_PAGE = ROOT / "docs" / "router.md"
ROUTER_MARK = "<!-- settings -->\n"
REWARD_PAGE = ROOT / "docs" / "rewards.md"
REWARD_MARK = "<!-- graders -->\n"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def kind(field: FieldInfo) -> str:
    return ", ".join([name_of(field.annotation), *bounds_of(field)])


def name_of(annotation: Any) -> str:
    """As a person would write it: None is the default's to say, sections have rows of their own."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin is typing.Annotated:
        return ", ".join([name_of(arguments[0]), *(bound for item in arguments[1:] for bound in bounds_of(item))])
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(name_of(argument) for argument in arguments if argument is not types.NoneType)
    if origin is tuple and section_of(annotation) is not None:
        return "list"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def bounds_of(field: FieldInfo) -> list[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [f"{signs[k]} {v:g}" for item in field.metadata for k, v in vars_of(item) if k in signs]


def vars_of(item: object) -> list[tuple[str, float]]:
    return [(name, getattr(item, name)) for name in ("ge", "gt", "le", "lt") if hasattr(item, name)]


def row(key: str, field: FieldInfo) -> str:
    described = " ".join((field.description or "").split())
    return f"| `{key}` | {kind(field)} | {default_of(field)} | {described} |"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, {}) or section_of(field.annotation) is not None:
        return "none"
    shown = " ".join(str(field.default).split()).replace("|", "\\|")
    return f"`{shown}`" if shown else '`""`'


def rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield row(prefix + name, field)
        section = section_of(field.annotation)
        if section is not None:
            is_list = typing.get_origin(field.annotation) is tuple
            yield from rows(section, f"{prefix}{name}{'[]' if is_list else ''}.")


def tables() -> str:
    blocks, plain = [], []
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            blocks.append("\n".join([f"## {name}", "", f"{field.description}", "", head, *rows(section, f"{name}.")]))
        else:
            plain.append(row(name, field))
    blocks.append("\n".join(["## At the top", "", head, *plain]))
    return "\n\n".join(blocks) + "\n"


def router_table() -> str:
    rows = [row(name, field) for name, field in RouterSettings.model_fields.items()]
    return "\n".join(["| setting | type | default | meaning |\n|---|---|---|---|", *rows]) + "\n"


def graders_text() -> str:
    """Each grader with what it does and its options."""
    blocks = []
    for name, grader in GRADERS.items():
        block = f"### {name}\n\n{inspect.cleandoc(grader.__doc__ or '')}\n"
        options = []
        for key, field in grader.model_fields.items():
            options.append(row(field.alias or key, field))
            section = section_of(field.annotation)
            options += [] if section is None else rows(section, f"{key}.")
        if options:
            block += "\n" + "\n".join(["| option | type | default | meaning |\n|---|---|---|---|", *options]) + "\n"
        blocks.append(block)
    return "\n".join(blocks)


def test_every_key_has_a_sentence() -> None:
    def check(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            assert field.description and field.description.rstrip().endswith("."), f"{prefix}{name} is not described"
            section = section_of(field.annotation)
            if section is not None:
                check(section, f"{prefix}{name}.")

    check(Config, "")
    check(RouterSettings, "router ")


def test_keys_of_sections_within_sections_and_of_lists_have_rows() -> None:
    for key in ("reward.limits.concurrency", "reward.cache.folder", "reward.model.path", "reward.terms[].weight"):
        assert f"\n| `{key}` |" in tables()


def test_the_page_of_keys_is_up_to_date() -> None:
    assert PAGE.read_text().partition(MARK)[2] == tables(), "run: python -m tests.test_docs"
    assert ROUTER_PAGE.read_text().partition(ROUTER_MARK)[2] == router_table(), "run: python -m tests.test_docs"
    assert REWARD_PAGE.read_text().partition(REWARD_MARK)[2] == "\n" + graders_text(), "run: python -m tests.test_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for source in re.findall(r"`((?:src/practicum|tests|bench|docs)/[\w./-]+)`", text):
        assert (ROOT / source).exists(), f"{page.name} names {source}"


def test_tests_named_in_the_docs_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w./]+\.py)::(\w+)`", page.read_text())}
    assert named
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def test_the_example_of_the_controller_runs_as_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "controller.md").read_text()
    code, shown = re.findall(
        r"```python\n(\"\"\"word_count.py.*?)```\n\n```\n\$ python word_count.py\n(.*?)```", page, re.S
    )[0]
    script = tmp_path / "word_count.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 32


def test_the_ten_lines_of_the_controller_print_what_is_shown(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "controller.md").read_text()
    code, shown = re.findall(r"In ten lines:\n\n```python\n(.*?)```\n\n```\n(.*?)```", page, re.S)[0]
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == shown
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_ten_lines_of_rollout_write_answers(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"```python\n(import numpy as np, torch\n.*?)```", (ROOT / "docs" / "rollout.md").read_text(), re.S
    )
    exec(code.replace("./my-model", str(tiny_model)).replace("SamplingParams(64", "SamplingParams(8"), {})
    written = capsys.readouterr().out
    assert written.count("stop [") + written.count("length [") == 8  # a sample each
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_the_ten_lines_of_replay_choose_as_recorded(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"in ten lines:.*?```python\n(.*?)```", (ROOT / "docs" / "replay.md").read_text(), re.S)
    exec(code.replace("./my-moe", str(tiny_model)), {})
    assert capsys.readouterr().out == "chosen as recorded: True layers: [0, 1]\n"
    assert len([line for line in code.splitlines() if line.strip()]) <= 11


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables())
    ROUTER_PAGE.write_text(ROUTER_PAGE.read_text().partition(ROUTER_MARK)[0] + ROUTER_MARK + router_table())
    REWARD_PAGE.write_text(REWARD_PAGE.read_text().partition(REWARD_MARK)[0] + REWARD_MARK + "\n" + graders_text())
