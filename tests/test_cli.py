"""The command line as a person meets it: exit codes, one-paragraph errors, runs that survive a kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from typer.testing import CliRunner

from practicum.cli import app
from practicum.loop.run_folder import read_metrics
from practicum.models import load_model
from tests.conftest import config_tree
from tests.loop.test_trainer import timeless
from tests.test_adapters import save_adapted


@pytest.fixture
def config_file(tiny_model: Path, sums_file: Path, tmp_path: Path) -> Path:
    tree = config_tree(tiny_model, sums_file, tmp_path / "run")
    tree["actor"] |= {"lr_schedule": "linear", "mini_batches": 2}
    tree["trainer"] |= {"steps": 6, "checkpoint_every": 2}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def practicum(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_ends_with_a_summary_and_a_report(config_file: Path, tmp_path: Path) -> None:
    code, output, _ = practicum("train", config_file, "trainer.steps=2")
    assert code == 0
    assert "held-out accuracy:" in output and "step 2/2" in output
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
    code, output, _ = practicum("train", config_file, "trainer.steps=2", "resume=auto")
    assert code == 0 and "held-out accuracy:" in output  # a finished run says so again


def test_adapters_and_their_model_are_merged(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_adapted(tiny_model, tmp_path / "adapters")
    code, output, _ = practicum("merge", folder, tmp_path / "whole")
    assert code == 0 and "holds the whole model" in output
    merged, whole = load_model(str(folder)), load_model(str(tmp_path / "whole"))
    assert all(torch.equal(parameter, merged.get_parameter(name)) for name, parameter in whole.named_parameters())
    code, _, error = practicum("merge", tiny_model, tmp_path / "other")
    assert code != 0 and "holds no adapters" in error
    code, _, error = practicum("merge", folder, tmp_path / "other", "--dtype", "int4")
    assert code != 0 and "the dtypes are float32, bfloat16" in error


def test_explain_starts_nothing(config_file: Path, tmp_path: Path) -> None:
    code, output, _ = practicum("explain", config_file, "rollout.answers_per_prompt=8")
    assert code == 0
    for part in ("# placement", "4 prompts x 8 answers", "GiB"):
        assert part in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["actor.lrr=1"], "unknown key 'actor.lrr'. Did you mean 'actor.lr'?"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["model.path=./nowhere"], "model folder './nowhere' does not exist"),
        (["reward.function=tests/rewards.py:takes_two"], "cannot be called with one sample"),
        (["reward.function=nowhere.py:grade"], "nowhere.py does not exist"),
        (["data.overlong=error", "data.max_prompt_tokens=3"], "more than 3 tokens"),
    ],
)
def test_a_mistake_is_a_paragraph_and_exit_code_2(config_file: Path, overrides: list[str], complaint: str) -> None:
    code, _, errors = practicum("train", config_file, *overrides)
    assert code == 2
    assert errors.startswith("error: ") and complaint in errors
    assert "Traceback" not in errors
    code, _, errors = practicum("train", config_file, *overrides, "--debug")
    assert code == 2 and "Traceback" in errors and complaint in errors


@pytest.mark.slow
def test_debug_shows_the_traceback_of_the_worker(config_file: Path, tiny_model: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated"
    shutil.copytree(tiny_model, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = [str(config_file), "controller.backend=ray", f"model.path={truncated}"]
    run = subprocess.run(command(*arguments, "--debug"), capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "on the worker:" in run.stderr and "train/actor.py" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: model folder")


def test_an_empty_data_file_is_a_mistake(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    code, _, errors = practicum("train", config_file, f"data.train={tmp_path / 'empty.jsonl'}")
    assert code == 2 and "holds no records" in errors


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_process_behind(config_file: Path, tiny_model: Path, tmp_path: Path) -> None:
    hollow = tmp_path / "hollow"
    shutil.copytree(tiny_model, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
    overrides = ["controller.backend=ray", "algorithm.advantage=gae", f"critic.path={hollow}"]
    run = subprocess.Popen(
        command(config_file, *overrides), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    started: set[psutil.Process] = set()
    while run.poll() is None:
        started.update(children_of(run))
        time.sleep(0.05)
    assert run.returncode == 2
    assert run.stderr is not None
    errors = run.stderr.read()
    assert "hollow': its weights cannot be loaded" in errors
    assert "Traceback" not in errors and errors.count("\n") <= 2
    assert started and not psutil.wait_procs(started, timeout=10)[1]


def test_help_is_quick_and_needs_no_heavy_imports() -> None:
    code = "import sys, practicum.cli; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def command(config_file: Path | str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "practicum", "train", str(config_file), *overrides]


def children_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def killed_run(config_file: Path, run_dir: Path, after_step: int, delay_s: float) -> None:
    """Start a run on Ray and kill it, with nothing but SIGKILL, some time after a step."""
    process = subprocess.Popen(
        command(config_file, f"trainer.run_dir={run_dir}", "controller.backend=ray"), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if any(row["step"] >= after_step for row in read_metrics(run_dir)):
            break
        time.sleep(0.01)
    time.sleep(delay_s)
    started = children_of(process)
    process.kill()
    process.wait(30)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive, "processes survived the driver"


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(config_file: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    subprocess.run(
        command(config_file, f"trainer.run_dir={straight}", "controller.backend=ray"), check=True, timeout=120
    )
    seed = int(os.environ.get("PRACTICUM_KILL_SEED", random.randrange(10**6)))
    print(f"PRACTICUM_KILL_SEED={seed}")  # shown when the test fails, to run it again
    dice = random.Random(seed)
    killed = tmp_path / "killed"
    for after_step in sorted(dice.sample(range(1, 6), 3)):
        # Resumed each time from what the kill before left, so the later kills also hit a resumed run.
        delay = dice.uniform(0.0, 0.4)
        resume = config_file.with_name("resume.yaml")
        resume.write_text(config_file.read_text() + "\nresume: auto\n")
        killed_run(resume, killed, after_step, delay)
    final = [f"trainer.run_dir={killed}", "controller.backend=ray", "resume=auto"]
    subprocess.run(command(config_file, *final), check=True, timeout=120)
    assert timeless(read_metrics(killed)) == timeless(read_metrics(straight))
    models = [load_model(str(folder / "checkpoints" / "step-000006" / "model")) for folder in (straight, killed)]
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_cleans_up_and_says_how_to_go_on(
    config_file: Path, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        command(config_file, "trainer.steps=500", "controller.backend=ray"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not read_metrics(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.05)
    started = children_of(process)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"resume=auto" in errors and errors.count(b"\n") == 1
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "fast"], "unknown engine 'fast': those that serve are native, hf"),
        (["--dtype", "int4"], "unknown dtype 'int4'"),
        (["--token-env", "PRACTICUM_NO_SUCH_TOKEN"], "nothing in that environment variable"),
    ],
)
def test_a_mistake_in_serve_is_a_paragraph(tiny_model: Path, arguments: list[str], complaint: str) -> None:
    code, _, errors = practicum("serve", tiny_model, *arguments)
    assert code == 2 and errors.startswith("error: ") and complaint in errors
    code, _, errors = practicum("serve", "./nowhere", "--engine", "hf")
    assert code == 2 and "model folder './nowhere' does not exist" in errors


def test_serve_at_a_port_that_is_taken_says_so(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, errors = practicum("serve", tiny_model, "--engine", "hf", "--device", "cpu", "--port", port)
    assert code == 2 and f"port {port} of 127.0.0.1 is in use" in errors


def test_serve_says_where_it_is_wants_its_token_and_finishes_what_it_has_begun(tiny_model: Path) -> None:
    arguments = ["serve", str(tiny_model), "--engine", "hf", "--device", "cpu", "--port", "0", "--token-env", "TOKEN"]
    process = subprocess.Popen(
        [sys.executable, "-m", "practicum", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKEN": "secret", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"{tiny_model} ready at http://127.0.0.1:")
        address = f"{said.split()[-1]}/v1/completions"
        body = {"prompt": "1", "max_tokens": 60, "ignore_eos": True, "n": 8, "stream": True}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode()), timeout=60)
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Authorization": "Bearer secret"})
        with urllib.request.urlopen(asked, timeout=60) as reply:
            reply.readline()
            process.send_signal(signal.SIGTERM)
            assert reply.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
