"""The documentation tells the truth: every key is described, every file it names is there.

`python -m tests.test_docs` writes the tables of docs/configuration.md and docs/router.md anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.config import Config
from practicum.reward.router import RouterSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MARK = "<!-- keys -->\n"
ROUTER_PAGE = ROOT / "docs" / "router.md"
ROUTER_MARK = "<!-- settings -->\n"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def kind(field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is typing.Literal:
        return " \\| ".join(f"`{choice}`" for choice in typing.get_args(field.annotation))
    name = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[k]} {v:g}" for item in field.metadata for k, v in vars_of(item) if k in signs]
    return ", ".join([name.replace(" | None", ""), *bounds])


def vars_of(item: object) -> list[tuple[str, float]]:
    return [(name, getattr(item, name)) for name in ("ge", "gt", "le", "lt") if hasattr(item, name)]


def row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else "none" if field.default is None else f"`{field.default}`"
    return f"| `{key}` | {kind(field)} | {default} | {' '.join((field.description or '').split())} |"


def tables() -> str:
    blocks, plain = [], []
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows = [row(f"{name}.{key}", inner) for key, inner in field.annotation.model_fields.items()]
            blocks.append("\n".join([f"## {name}", "", f"{field.description}", "", head, *rows]))
        else:
            plain.append(row(name, field))
    blocks.append("\n".join(["## At the top", "", head, *plain]))
    return "\n\n".join(blocks) + "\n"


def router_table() -> str:
    rows = [row(name, field) for name, field in RouterSettings.model_fields.items()]
    return "\n".join(["| setting | type | default | meaning |\n|---|---|---|---|", *rows]) + "\n"


def test_every_key_has_a_sentence() -> None:
    def check(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            assert field.description and field.description.rstrip().endswith("."), f"{prefix}{name} is not described"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation, f"{name}.")

    check(Config, "")
    check(RouterSettings, "router ")


def test_the_page_of_keys_is_up_to_date() -> None:
    assert PAGE.read_text().partition(MARK)[2] == tables(), "run: python -m tests.test_docs"
    assert ROUTER_PAGE.read_text().partition(ROUTER_MARK)[2] == router_table(), "run: python -m tests.test_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for source in re.findall(r"`((?:src/practicum|tests|bench|docs)/[\w./-]+)`", text):
        assert (ROOT / source).exists(), f"{page.name} names {source}"


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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables())
    ROUTER_PAGE.write_text(ROUTER_PAGE.read_text().partition(ROUTER_MARK)[0] + ROUTER_MARK + router_table())
