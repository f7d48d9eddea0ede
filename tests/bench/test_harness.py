"""The benchmark harness, with contestants that are a few lines of Python each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the installed package

from bench import __main__ as command_line  # noqa: E402
from bench import harness  # noqa: E402
from bench.harness import ContestantError, Options, Outcome, Row  # noqa: E402
from bench.turns import Contestant, Plan, alternate  # noqa: E402

HONEST = """
from bench.contestant import Line, step
line = Line()
print("libraries may print what they like")
line.ready(["psutil"])
while num_steps := line.wait_for_go()[0]:
    line.answer([step(0.5, {amount}, rollout=0.2)] * num_steps)
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def add_benchmark(monkeypatch: pytest.MonkeyPatch, name: str, run: Any) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(run=run))  # type: ignore[misc]
    monkeypatch.setitem(command_line.BENCHMARKS, name, name)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("better", "ratio"), [("higher", 2.0), ("lower", 0.5)])
def test_a_ratio_above_one_means_that_ours_is_better(better: str, ratio: float) -> None:
    assert Row("case", "metric", ours=10, peer=5, peer_name="trl", better=better).ratio == ratio  # type: ignore[arg-type]


def test_a_row_without_a_peer_has_no_ratio() -> None:
    row = Row("case", "metric", ours=10).as_dict()
    assert row == {"case": "case", "metric": "metric", "ours": 10, "peer": None, "peer_name": None, "ratio": None}


def test_the_file_has_environment_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "grpo.json"
    harness.write_json(path, [Row("dense", "tokens/s", 10, 5, "trl")], harness.environment("python -m bench grpo"))
    written = json.loads(path.read_text())
    assert set(written) == {"environment", "rows"}
    assert written["rows"] == [
        {"case": "dense", "metric": "tokens/s", "ours": 10, "peer": 5, "peer_name": "trl", "ratio": 2.0}
    ]
    where = written["environment"]
    assert where["command"] == "python -m bench grpo"
    assert {"python", "torch", "transformers", "platform", "cpu_count", "date"} <= set(where)


def test_the_table_shows_both_sides_and_a_dash_for_what_is_missing() -> None:
    text = io.StringIO()
    rows = [Row("dense", "tokens/s", 4000, 2000, "trl"), Row("moe", "tokens/s", 3210)]
    harness.print_table("grpo", rows, Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert any("4,000" in line and "2,000" in line for line in lines)
    assert any("3,210" in line and "-" in line for line in lines)


def test_the_table_names_the_peer_of_each_row_where_there_are_several() -> None:
    text = io.StringIO()
    rows = [Row("no-op", "ms", 1, 2, "bare ray"), Row("no-op", "ms", 1, 3, "verl"), Row("fakes", "ms", 1)]
    harness.print_table("controller", rows, Console(file=text, width=120))
    lines = text.getvalue().splitlines()
    assert any("2" in line and "bare ray" in line for line in lines)
    assert any("3" in line and "verl" in line for line in lines)


def test_contestants_take_turns_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    plan = Plan(warmup_steps=1, num_rounds=2, steps_per_turn=3)
    with (
        Contestant("ours", python(HONEST.format(amount=100)), tmp_path) as ours,
        Contestant("peer", python(HONEST.format(amount=50)), tmp_path) as peer,
    ):
        tallies = alternate([ours, peer], plan)
    assert [len(tally.steps) for tally in tallies.values()] == [6, 6]
    assert (tallies["ours"].rate, tallies["peer"].rate) == (200, 100)
    assert tallies["ours"].parts() == {"step": 0.5, "rollout": 0.2}
    assert tallies["ours"].versions == {"psutil": psutil.__version__}
    assert "libraries may print" in (tmp_path / "ours.log").read_text()


def test_disturbed_rounds_are_replaced_up_to_a_limit(tmp_path: Path) -> None:
    plan = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1, extra_rounds=3, quiet_share=-1.0)  # never quiet
    script = HONEST.replace("line.answer(", "import sys; print('turn', file=sys.stderr); line.answer(")
    with Contestant("ours", python(script.format(amount=1)), tmp_path) as ours:
        tallies = alternate([ours], plan)
    assert len(tallies["ours"].steps) == 1
    assert (tmp_path / "ours.log").read_text().count("turn") == 1 + 4


def test_cpu_time_includes_children(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with_child = HONEST.replace("line.ready", f"import subprocess, sys; subprocess.run({python(burn)!r})\nline.ready")
    with Contestant("ours", python(with_child.replace("{amount}", "1")), tmp_path) as ours:
        ours.ready(30)
        assert ours.cpu_s() >= 0.3


def test_cpu_time_of_ended_processes_is_the_contestants_and_not_that_of_others(tmp_path: Path) -> None:
    script = HONEST.replace("rollout=0.2", "ended_cpu_s=1000.0").format(amount=1)
    with Contestant("ours", python(script), tmp_path) as ours:
        tally = alternate([ours], Plan(warmup_steps=1, num_rounds=1, steps_per_turn=2))["ours"]
    assert tally.cpu_s >= 2000
    assert tally.others_share == 0


def test_one_that_hangs_hits_its_deadline_and_is_gone_with_its_children(tmp_path: Path) -> None:
    hang = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(json.dumps({"ready": {"pid": str(os.getpid()), "child": str(child.pid)}}), flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    with (
        pytest.raises(ContestantError, match="'sleepy' passed its deadline and has not sent 'steps'"),
        Contestant("sleepy", python(hang), tmp_path) as sleepy,
    ):
        pids = [int(pid) for pid in sleepy.ready(30).values()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        sleepy.go(1, deadline_s=0.2)
    assert time.monotonic() - start < 30
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_who_is_not_on_is_frozen_and_goes_home_when_the_driver_is_killed(tmp_path: Path) -> None:
    driver = f"""
import sys, time
from pathlib import Path
from bench.turns import Contestant
with Contestant("ours", [sys.executable, "-c", {HONEST.format(amount=1)!r}], Path({str(tmp_path)!r})) as ours:
    ours.ready(30)
    ours.go(1, 30)
    print(ours._root.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(python(driver), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        contestant = psutil.Process(int(process.stdout.readline()))
        deadline = time.monotonic() + 5
        while contestant.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "it was not frozen after its turn"
        process.kill()
    gone, _ = psutil.wait_procs([contestant], timeout=10)
    assert gone


def test_one_that_never_gets_ready_hits_its_deadline(tmp_path: Path) -> None:
    with (
        pytest.raises(ContestantError, match="'slow' passed its deadline and has not sent 'ready'"),
        Contestant("slow", python("import time; time.sleep(600)"), tmp_path) as slow,
    ):
        slow.ready(0.2)


def test_one_that_dies_is_named_with_the_end_of_its_standard_error(tmp_path: Path) -> None:
    die = "import sys\nfor i in range(99): print('line', i, file=sys.stderr)\nraise ValueError('out of ideas')"
    with (
        pytest.raises(ContestantError) as caught,
        Contestant("poet", python(die), tmp_path) as poet,
    ):
        poet.ready(30)
    message = str(caught.value)
    assert "contestant 'poet' has ended (exit code 1)" in message
    assert "ValueError: out of ideas" in message
    assert "line 98" in message and "line 0\n" not in message


def test_one_that_answers_nonsense_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(ContestantError, match="sent 'hello' where 'ready' was due"),
        Contestant("dada", python("print('hello', flush=True); input()"), tmp_path) as dada,
    ):
        dada.ready(30)


def test_one_that_takes_too_few_steps_is_refused(tmp_path: Path) -> None:
    lazy = HONEST.replace("* num_steps", "* 1").format(amount=1)
    with (
        pytest.raises(ContestantError, match="took 1 steps instead of 2"),
        Contestant("lazy", python(lazy), tmp_path) as contestant,
    ):
        contestant.ready(30)
        contestant.go(2, deadline_s=30)


def test_without_a_peer_nobody_else_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(options: Options) -> Outcome:
        peer = harness.choose_peer(options.peer, ["trl"])
        return Outcome([Row("dense", "tokens/s", 10, None, peer.name if peer else None)], {"threads": 2})

    add_benchmark(monkeypatch, "alone", alone)
    assert command_line.main(["alone", "--quick", "--peer", "none", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "alone.json").read_text())
    assert written["rows"][0] | {"peer": None, "peer_name": None, "ratio": None} == written["rows"][0]
    assert written["environment"]["threads"] == 2
    assert "alone" in capsys.readouterr().out


def test_a_chosen_case_leaves_the_others_and_the_result_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(options: Options) -> Outcome:
        return Outcome([Row("dense", "tokens/s", 10), Row("moe", "tokens/s", 20)])

    add_benchmark(monkeypatch, "two", two)
    monkeypatch.setattr(command_line, "RESULTS", tmp_path / "results")
    assert command_line.main(["two", "--case", "mo"]) == 0
    printed = capsys.readouterr().out
    assert "moe" in printed and "dense" not in printed
    assert not (tmp_path / "results").exists()
    assert command_line.main(["two", "--case", "mo", "--out", str(tmp_path)]) == 0
    assert [row["case"] for row in json.loads((tmp_path / "two.json").read_text())["rows"]] == ["moe"]
    assert command_line.main(["two", "--case", "sparse"]) == 2
    assert "no case with 'sparse' in its name" in capsys.readouterr().err


def test_arguments_for_our_side_are_refused_where_nobody_reads_them() -> None:
    result = bench("grpo", "--ours", "--policy session")
    assert result.returncode == 2
    assert "'grpo' takes no --ours" in result.stderr


def test_an_unknown_benchmark_lists_the_known_ones() -> None:
    result = bench("nonsense")
    assert result.returncode == 2
    assert "'nonsense' is not known; known: grpo" in result.stderr


def test_an_unknown_peer_lists_the_known_ones() -> None:
    result = bench("grpo", "--peer", "nobody")
    assert result.returncode == 2
    assert "'nobody' is not known here; known: trl, none" in result.stderr


def test_a_peer_that_is_not_installed_names_the_script_to_run() -> None:
    with pytest.raises(harness.UsageError, match=r"run `bash bench/peers/nobody\.sh` first"):
        _ = harness.Peer("nobody").python


def test_a_contestant_that_fails_ends_the_command_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(options: Options) -> Outcome:
        with Contestant("poet", python("raise SystemExit(3)"), tmp_path) as poet:
            poet.ready(30)
        raise AssertionError("unreachable")

    add_benchmark(monkeypatch, "failing", failing)
    assert command_line.main(["failing", "--out", str(tmp_path)]) == 1
    assert "bench: contestant 'poet' has ended (exit code 3)" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "failing.json")
