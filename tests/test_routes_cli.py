from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from practicum.cli import app
from practicum.replay.format import RecordingHeader
from tests.replay.recordings import HEADER, make_batch, make_record, write


def routes(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["routes", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_inspect_shows_header_sizes_and_load(tmp_path: Path) -> None:
    header = RecordingHeader("olmoe-7", (0, 2), 64, 8, "tok-3", made={"torch": "2.12"})
    path = write(tmp_path / "routes", make_batch(4, 3, answer=97, header=header), header, 1 << 14)
    code, output, _ = routes("inspect", path, "--png", tmp_path / "load.png")
    assert code == 0
    for part in (
        "olmoe-7, tokenizer tok-3",
        "8 of 64 experts in 2 layers, uint8",
        "torch 2.12",
        "samples         3 in 1 steps, 4 to 4",
        "300, without a record 3 (1.00%)",
        "as int32 64.0, as uint8 16.0, bound log2 C(64, 8) 8.0",
        "max/mean",
        "entropy",
        "dead",
        "▄",
    ):
        assert part in output, part
    assert max(map(len, output.splitlines())) <= 100
    with Image.open(tmp_path / "load.png") as picture:
        assert picture.format == "PNG"


def test_inspect_shows_dead_experts(tmp_path: Path) -> None:
    records = make_batch(1, 4, answer=40)
    for record in records:
        record.routes.experts[:] = [0, 1]
    code, output, _ = routes("inspect", write(tmp_path / "routes", records))
    (row,) = [line for line in output.splitlines() if line.strip().startswith("5 ")]
    assert code == 0 and row.split()[1:] == ["████████", "4.00", "33.3%", "6"]


def test_inspect_of_an_empty_recording(tmp_path: Path) -> None:
    code, output, _ = routes("inspect", write(tmp_path / "routes", []), "--png", tmp_path / "load.png")
    assert code == 0 and "samples         0\n" in output


def test_diff_says_where_recordings_disagree(tmp_path: Path) -> None:
    records = make_batch(1, 6)
    one = write(tmp_path / "one", records[:5])
    code, output, _ = routes("diff", one, one)
    assert code == 0 and "no set of experts differs" in output
    changed = records[2].routes.experts.copy()
    changed[3, 1] = [0, 1] if changed[3, 1].tolist() != [0, 1] else [2, 3]
    changed_routes = replace(records[2].routes, experts=changed)
    other = write(tmp_path / "other", [*records[:2], replace(records[2], routes=changed_routes), records[5]])
    code, output, _ = routes("diff", one, other)
    assert code == 0
    for part in (
        "samples in both   3",
        "only in A         2: 1-3, 1-4",
        "only in B         1: 1-5",
        "63 compared, 1 differ (1.587%)",
        "at token 3 of 8 of sample 1-2, in layer 2",
        "in 1 of 3 samples",
    ):
        assert part in output, part
    apart = write(tmp_path / "apart", [make_record("x")])
    code, output, _ = routes("diff", one, apart)
    assert code == 0 and "nothing to compare" in output


def test_diff_refuses_another_model_by_name(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [])
    other = write(tmp_path / "other", [], replace(HEADER, model="olmoe-5"))
    code, _, errors = routes("diff", one, other)
    assert code == 2 and errors.startswith("error: ") and "model qwen3_moe-1f2e3d4c, not olmoe-5" in errors


def test_verify_exits_with_1_when_something_is_damaged(tmp_path: Path) -> None:
    good = write(tmp_path / "good", make_batch(1, 10))
    bad = write(tmp_path / "bad", make_batch(1, 10))
    code, output, _ = routes("verify", good, bad)
    assert code == 0 and output.count(": whole: 10 records in 2 chunks") == 2
    os.truncate(good, good.stat().st_size - 5)
    code, output, _ = routes("verify", good)
    assert code == 0 and "of an unfinished chunk" in output
    data = bytearray(bad.read_bytes())
    data[len(data) // 3] ^= 1
    bad.write_bytes(data)
    code, output, _ = routes("verify", good, bad)
    assert code == 1 and f"{bad}: DAMAGED: " in output and "whole are 5 records in 1 chunks" in output
    assert "chunk 0 (5 samples, 1-0 to 1-4): the section" in output
    code, output, _ = routes("verify", tmp_path / "nowhere")
    assert code == 1 and "it cannot be read: No such file" in output


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_a_mistake_is_a_paragraph(command: str, tmp_path: Path) -> None:
    files = [tmp_path / "nowhere"] * (2 if command == "diff" else 1)
    code, _, errors = routes(command, *files)
    assert code == 2 and errors == f"error: recording {files[0]} cannot be read: No such file or directory.\n"
    code, _, errors = routes(command, *files, "--debug")
    assert code == 2 and "Traceback" in errors


def test_ids_that_are_no_unicode_can_be_shown(tmp_path: Path) -> None:
    record = make_record("odd")
    record.sample.id = "odd \ud800 [bold]"
    code, output, _ = routes("diff", write(tmp_path / "a", [record]), write(tmp_path / "b", []))
    assert code == 0 and "odd \\ud800 [bold]" in output
