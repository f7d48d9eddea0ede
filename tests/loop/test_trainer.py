"""The loop as a whole, on a tiny model: in process, on Ray, on two ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from practicum import Config, Trainer
from practicum.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    ReplayError,
    ResourceError,
    RewardError,
    RolloutError,
    WorkerError,
)
from practicum.loop.explain import explanation
from practicum.loop.run_folder import read_best, read_metrics
from practicum.models import load_model
from tests.models import save_classifier

MakeConfig = Callable[..., Config]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(load_model(str(run_dir / "checkpoints" / f"step-{step:06d}" / "model")).named_parameters())


def saved_names(run_dir: Path, step: int) -> frozenset[str]:
    with safe_open(run_dir / f"checkpoints/step-{step:06d}/model/model.safetensors", "pt") as file:
        return frozenset(file.keys())


def test_a_run_leaves_everything_in_its_folder(make_config: MakeConfig) -> None:
    config = make_config("trainer.steps=3", "validation.every=2", "trainer.checkpoint_every=2")
    reports = list(Trainer(config).steps())
    assert [report.number for report in reports] == [1, 2, 3]
    assert all(report.kl < 1e-5 for report in reports)
    assert [report.accuracy is not None for report in reports] == [False, True, True]
    run_dir = Path(config.trainer.run_dir)
    assert Config.load(run_dir / "config.yaml") == config
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["reward/mean"] == reports[0].reward
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert (run_dir / "answers" / "step-000001.txt").exists()
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == ["step-000002", "step-000003"]


def test_held_out_prompts_are_measured_by_dataset(make_config: MakeConfig, write_jsonl: Any) -> None:
    rows = [{"prompt": f"0{i}+0{i}=", "answer": "x", "data_source": "ab"[i % 2]} for i in range(6)]
    config = make_config(
        f"data.validation={write_jsonl(*rows)}", "validation.answers_per_prompt=4", "validation.right_above=0.2"
    )
    last = list(Trainer(config).steps())[-1].metrics
    for part in ("", "a/", "b/"):
        assert last[f"validation/{part}pass@1"] <= last[f"validation/{part}pass@2"] <= last[f"validation/{part}pass@4"]
        assert 0 <= last[f"validation/{part}maj@4"] <= last[f"validation/{part}pass@4"]
        assert last[f"validation/{part}mean@4"] == pytest.approx(last[f"validation/{part}accuracy"])
    assert last["validation/pass@4"] == pytest.approx((last["validation/a/pass@4"] + last["validation/b/pass@4"]) / 2)


def test_the_best_checkpoint_is_kept_and_marked(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["trainer.steps=6", "validation.every=1", "trainer.keep_checkpoints=1", "trainer.checkpoint_every=0"]
    config = make_config(*overrides, "trainer.keep_best=validation/accuracy", "validation.answers_per_prompt=2")
    accuracies = {report.number: report.accuracy or 0.0 for report in Trainer(config).steps()}
    run_dir = Path(config.trainer.run_dir)
    best = read_best(run_dir)
    assert best is not None
    assert best.value == max(accuracies.values()) == accuracies[best.step]
    there = [path.name for path in sorted((run_dir / "checkpoints").iterdir())]
    assert there == [f"step-{step:06d}" for step in sorted({best.step, 6})]
    assert weights(run_dir, best.step)


FAKE_WANDB = """
import json, pathlib

class Error(Exception):
    pass

class Run:
    step = 0

    def __init__(self, given):
        self.file = pathlib.Path(given["dir"]) / "told.jsonl"
        self.note({"id": given["id"]})

    def note(self, row):
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\\n")

    def log(self, data, step):
        self.note({"step": step, **data})

    def finish(self):
        self.note({"finished": True})

def Settings(**settings):
    return settings

def init(**given):
    return Run(given)
"""


def test_a_run_and_its_resumption_are_told_to_wandb(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    wanted = ("trainer.wandb.project=sums", "trainer.wandb.mode=offline")
    list(Trainer(make_config(*wanted)).steps())
    config = make_config(*wanted, "trainer.steps=3", "resume=auto")
    list(Trainer(config).steps())
    del sys.modules["wandb"]
    told = [json.loads(line) for line in (Path(config.trainer.run_dir) / "told.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in told if "id" in row}) == 1
    assert [row for row in told if "step" in row] == read_metrics(Path(config.trainer.run_dir))
    assert told[-1] == {"finished": True}


def test_wandb_that_is_not_there_is_missed_before_anything_starts(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("trainer.wandb.project=sums")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"practicum\[wandb\]"):
        Trainer(config)
    assert not Path(config.trainer.run_dir).exists()


def test_a_learning_rate_out_of_all_measure_is_told_and_stops_the_run(make_config: MakeConfig) -> None:
    notices: list[str] = []
    with pytest.raises(WorkerError, match=r"step 2: the gradient of update 2 is nan.*update_ratio above 1"):
        list(Trainer(make_config("actor.lr=1e30", "data.validation=null"), notify=notices.append).steps())
    (told,) = notices
    assert "step 1: an update has changed the weights of the actor by " in told and "lower actor.lr=1e+30" in told
    assert read_metrics(Path(make_config().trainer.run_dir))[0]["actor/update_ratio"] > 1e30


def test_rewards_rise(make_config: MakeConfig) -> None:
    config = make_config("trainer.steps=25", "data.prompts_per_step=8", "rollout.answers_per_prompt=8")
    rewards = [report.reward for report in Trainer(config).steps()]
    assert sum(rewards[-5:]) / 5 > 1.3 * sum(rewards[:5]) / 5


def test_a_resumed_run_is_the_uninterrupted_one(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["trainer.steps=4", "trainer.checkpoint_every=2", "actor.lr_schedule=linear", "actor.mini_batches=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(Trainer(make_config(*overrides, f"trainer.run_dir={whole}")).steps())
    steps = Trainer(make_config(*overrides, f"trainer.run_dir={parts}")).steps()
    for report in steps:
        if report.number == 3:  # past the checkpoint at 2
            steps.close()  # type: ignore[attr-defined]
    notices: list[str] = []
    resumed = Trainer(make_config(*overrides, f"trainer.run_dir={parts}", "resume=auto"), notify=notices.append)
    assert [report.number for report in resumed.steps()] == [3, 4]
    assert timeless(read_metrics(parts)) == timeless(read_metrics(whole))
    first, second = weights(whole, 4), weights(parts, 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(resumed.steps()) == []  # nothing is left to do
    assert notices == ["resuming after step 2", "nothing is left to do: 4 steps are done"]


@pytest.mark.parametrize("name", ["rng-0.pt", "model/model.safetensors", "model/config.json"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    list(Trainer(make_config("trainer.checkpoint_every=1")).steps())
    run_dir = Path(make_config().trainer.run_dir)
    rows, model = read_metrics(run_dir), run_dir / "checkpoints" / "step-000002" / "model"
    damaged = run_dir / "checkpoints" / "step-000002" / name
    damaged.write_bytes(damaged.read_bytes()[:100])
    if name.startswith("model/"):
        with pytest.raises(CheckpointError, match=rf"^model\.path=.*{name} has 100 of .*set it to .*step-000001/model"):
            Trainer(make_config(f"model.path={model}", f"trainer.run_dir={tmp_path}/other"))
    notices: list[str] = []
    resumed = Trainer(make_config("resume=auto", "trainer.checkpoint_every=1"), notify=notices.append)
    assert [report.number for report in resumed.steps()] == [2]
    assert f"step-000002 is damaged: {name} has 100 of " in notices[0] and notices[1] == "resuming after step 1"
    assert timeless(read_metrics(run_dir)) == timeless(rows)


def test_a_run_resumed_with_another_config_says_what_changed(make_config: MakeConfig) -> None:
    list(Trainer(make_config()).steps())
    notices: list[str] = []
    longer = make_config("trainer.steps=3", "actor.lr=2e-3", "resume=auto")
    assert [report.number for report in Trainer(longer, notify=notices.append).steps()] == [3]
    assert notices == ["resuming after step 2; actor.lr: 0.001 -> 0.002; trainer.steps: 2 -> 3"]


@pytest.mark.slow
def test_ray_and_two_workers_give_the_same_result(make_config: MakeConfig, tmp_path: Path, ray_session: None) -> None:
    results = {}
    for name, overrides in {
        "local": [],
        "ray": ["controller.backend=ray"],
        "two": ["controller.backend=ray", "trainer.num_workers=2"],
    }.items():
        run_dir = tmp_path / name
        config = make_config("data.prompts_per_step=5", "trainer.steps=2", f"trainer.run_dir={run_dir}", *overrides)
        list(Trainer(config).steps())
        results[name] = (timeless(read_metrics(run_dir)), weights(run_dir, 2))
    assert results["ray"][0] == results["local"][0]
    for row, other in zip(results["two"][0], results["local"][0], strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert {saved_names(tmp_path / name, 2) for name in results} == {saved_names(tmp_path / "local", 2)}
    for name, tensor in results["local"][1].items():
        assert torch.equal(tensor, results["ray"][1][name])
        assert (tensor - results["two"][1][name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_a_writer_with_weights_of_its_own_is_as_good_in_this_process(
    make_config: MakeConfig, tmp_path: Path, engine: str
) -> None:
    rows = {}
    for placement in ("hybrid", "standalone"):
        where = [
            f"rollout.engine={engine}",
            f"rollout.placement={placement}",
            f"trainer.run_dir={tmp_path / placement}",
        ]
        assert all(report.kl < 1e-5 for report in Trainer(make_config("trainer.steps=3", *where)).steps())
        rows[placement] = timeless(read_metrics(tmp_path / placement))
    assert [row["reward/mean"] for row in rows["standalone"][1:]] == [row["reward/mean"] for row in rows["hybrid"][1:]]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "standalone"])
def test_writers_in_processes_of_their_own_give_the_same_result(
    make_config: MakeConfig, tmp_path: Path, ray_session: None, placement: str
) -> None:
    short = ("trainer.steps=2", "data.prompts_per_step=5")
    reports = list(Trainer(make_config(*short, f"trainer.run_dir={tmp_path / 'local'}")).steps())
    where = ["controller.backend=ray", f"rollout.placement={placement}", f"trainer.run_dir={tmp_path / 'ray'}"]
    apart = list(Trainer(make_config(*short, *where)).steps())
    assert all(report.kl < 1e-5 for report in apart)
    assert [report.reward for report in apart] == pytest.approx([report.reward for report in reports], abs=1e-6)
    first, second = weights(tmp_path / "local", 2), weights(tmp_path / "ray", 2)
    assert all((tensor - second[name]).abs().max() < 1e-4 for name, tensor in first.items())


def test_ungraded_samples_are_left_out_not_counted_as_zero(make_config: MakeConfig, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "calls = 0\n"  # of the one process below
        "def grade(sample):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls % 8 == 1:\n"
        "        raise ValueError('odd one')\n"
        "    return 2.0 + calls % 2\n"
    )
    config = make_config(
        f"reward.function={reward}:grade",
        "reward.max_failure_share=0.5",
        "reward.processes=1",
        "trainer.steps=1",
        "data.validation=null",
    )
    (report,) = Trainer(config).steps()
    assert report.metrics["reward/failed_share"] == pytest.approx(2 / 16)
    assert 2.0 <= report.reward <= 3.0  # a zero would have pulled it below


def test_long_prompts_are_dropped_and_counted_or_refused(make_config: MakeConfig, write_jsonl: Any) -> None:
    path = write_jsonl({"prompt": "1+1="}, {"prompt": "1" * 40}, {"prompt": "2+2="})
    notices: list[str] = []
    Trainer(make_config(f"data.train={path}", "data.validation=null"), notify=notices.append)
    assert notices == [f"1 of 3 prompts in {path} have more than 16 tokens; they are left out"]
    with pytest.raises(DataError, match=r"1 of 3 prompts in .* more than 16 tokens, the first is .*:2"):
        Trainer(make_config(f"data.train={path}", "data.overlong=error"))
    with pytest.raises(DataError, match=r"raise data\.max_prompt_tokens"):
        Trainer(make_config(f"data.train={path}", "data.max_prompt_tokens=1"))


def test_control_tokens_in_messages_are_told(make_config: MakeConfig, write_jsonl: Any) -> None:
    path = write_jsonl({"prompt": "<user>1+1=<bot>"}, {"prompt": [{"role": "user", "content": "1<end>"}]})
    notices: list[str] = []
    Trainer(make_config(f"data.train={path}", "data.validation=null"), notify=notices.append)
    assert len(notices) == 1
    assert notices[0].startswith(
        f"1 of 2 prompts in {path} have control tokens of the model in their messages, the first"
    )


def test_a_model_with_too_few_positions_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"16 \+ 60 = 76 tokens, but model .* has positions for 64"):
        Trainer(make_config("rollout.max_new_tokens=60", "actor.micro_batch_tokens=80"))


def test_mistakes_are_found_before_anything_starts(make_config: MakeConfig, tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        Trainer(make_config("data.train=nowhere.jsonl"))
    with pytest.raises(ModelError, match="does not exist"):
        Trainer(make_config("model.path=./nowhere"))
    with pytest.raises(RewardError, match="has no function"):
        Trainer(make_config("reward.function=tests/rewards.py:nothing"))
    bare = tmp_path / "bare"
    load_model(str(tiny_model)).save_pretrained(bare)
    with pytest.raises(ModelError, match=r"has no tokenizer"):
        Trainer(make_config(f"model.path={bare}"))
    assert not (tmp_path / "run").exists()


def test_more_workers_than_the_machine_has(make_config: MakeConfig, ray_session: None) -> None:
    config = make_config("controller.backend=ray", "trainer.num_workers=99", "data.prompts_per_step=100")
    with pytest.raises(RolloutError, match=r"trainer\.num_workers=99 needs as many CPUs, and this machine has"):
        Trainer(config)
    assert "# this cannot start\ntrainer.num_workers=99 needs" in explanation(config)
    with pytest.raises(ResourceError, match="asked for 99 processes"):
        list(Trainer(config, checks_rollout=False).steps())


def test_a_failing_reward_stops_the_run_with_its_reason(make_config: MakeConfig) -> None:
    config = make_config("reward.function=tests/rewards.py:always_raises", "data.validation=null")
    with pytest.raises(RewardError, match=r"(\d+) of 16 samples could not be graded \(\1 invalid\).*on strike"):
        list(Trainer(config).steps())
    # The folder is free again, and the run can be continued once the function is mended.
    mended = make_config("resume=auto")
    assert len(list(Trainer(mended).steps())) == 2
    assert json.loads((Path(mended.trainer.run_dir) / "checkpoints/step-000002/state.json").read_text())["step"] == 2


def test_a_reward_model_grades_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "rm")
    given = ("reward.grader=classifier", "reward.function=null", f"reward.model.path={model}", "trainer.steps=2")
    reports = list(Trainer(make_config(*given)).steps())
    assert all(report.metrics["reward/failed_share"] == 0 for report in reports)
    assert all(report.metrics["reward/std"] > 0 for report in reports)


# Router replay


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_experts_are_replayed_and_the_metrics_tell(make_config: MakeConfig, mode: str) -> None:
    config = make_config(f"actor.router_replay.mode={mode}", "actor.mini_batches=2", "trainer.steps=3")
    list(Trainer(config).steps())
    rows = read_metrics(Path(config.trainer.run_dir))[1:]
    for row in rows:
        assert row["replay/disagreement"] == pytest.approx(
            sum(row[f"replay/disagreement/layer_{n}"] for n in (0, 1)) / 2, abs=1e-9
        )
        assert 0 < row["replay/bytes_per_token"] <= 16
        assert (row["replay/unknown_share"] == 0) == (mode == "R2")  # an answer's last token was never routed
        assert row["rollout/kl"] < 1e-5
    assert any(row["replay/disagreement"] > 0 for row in rows)  # the second update of a step finds other weights
    assert ("replay/kl_with" in rows[0]) == (mode == "R3") and "replay/kl_with" not in rows[1]
    assert (Path(config.trainer.run_dir) / "routes.rec").exists() == (mode == "R2")


def test_with_r2_and_an_engine_that_records_their_disagreement_is_told(make_config: MakeConfig) -> None:
    config = make_config("actor.router_replay.mode=R2", "rollout.enable_rollout_routing_replay=True")
    for report in Trainer(config).steps():
        assert report.metrics["replay/rollout_disagreement"] == 0.0  # in float32 both choose alike
        assert report.metrics["replay/unknown_share"] == 0.0  # it is the trainer's own choice that is replayed


def test_a_run_recorded_with_r2_is_repeated_from_its_file_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["actor.router_replay.mode=R2", "actor.mini_batches=2", "trainer.steps=3", "actor.lr=5e-3"]
    config = make_config(*overrides)
    list(Trainer(config).steps())
    recorded = Path(config.trainer.run_dir)
    again = make_config(
        *overrides,
        f"actor.router_replay.replay_file={recorded / 'routes.rec'}",
        f"trainer.run_dir={tmp_path / 'again'}",
    )
    assert [report.number for report in Trainer(again).steps()] == [1, 2, 3]
    before, after = read_metrics(recorded)[1:], read_metrics(tmp_path / "again")
    names = ("actor/loss", "actor/grad_norm", "actor/entropy", "rollout/kl", "reward/mean", "replay/disagreement")
    assert [{name: row[name] for name in names} for row in after] == [{n: row[n] for n in names} for row in before]
    first, second = weights(recorded, 3), weights(tmp_path / "again", 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_recording_that_is_too_short_is_refused_before_anything_starts(make_config: MakeConfig) -> None:
    config = make_config("actor.router_replay.mode=R2")
    list(Trainer(config).steps())
    file = Path(config.trainer.run_dir) / "routes.rec"
    for shape in ("data.prompts_per_step=2", "rollout.answers_per_prompt=2"):
        key, _, _ = shape.partition("=")
        other = ["actor.router_replay.mode=R2", f"actor.router_replay.replay_file={file}", shape]
        with pytest.raises(ConfigError, match=rf"{key}=2, but the recording .* was made with 4"):
            Trainer(make_config(*other))
    longer = make_config("actor.router_replay.mode=R2", f"actor.router_replay.replay_file={file}", "trainer.steps=5")
    with pytest.raises(ConfigError, match=r"trainer\.steps=5, but step 3 is not in the recording"):
        Trainer(longer)


def test_a_recording_of_another_run_is_neither_gone_on_with_nor_lost(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["actor.router_replay.mode=R2", f"actor.router_replay.record_file={tmp_path / 'mine.rec'}"]
    list(Trainer(make_config(*overrides)).steps())
    before = (tmp_path / "mine.rec").read_bytes()
    with pytest.raises(ConfigError, match=r"record_file=.*mine\.rec already holds a recording, of 2 steps"):
        Trainer(make_config(*overrides, f"trainer.run_dir={tmp_path / 'other'}"))
    assert (tmp_path / "mine.rec").read_bytes() == before


def test_an_experiment_on_the_same_answers_starts_where_the_run_did(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["actor.router_replay.mode=R2", "actor.mini_batches=2", "trainer.steps=2"]
    config = make_config(*overrides)
    list(Trainer(config).steps())
    file = Path(config.trainer.run_dir) / "routes.rec"
    notices: list[str] = []
    again = make_config(
        *overrides, f"actor.router_replay.replay_file={file}", "actor.lr=1e-2", f"trainer.run_dir={tmp_path / 'again'}"
    )
    list(Trainer(again, notify=notices.append).steps())
    assert any("nothing is validated" in notice for notice in notices)
    first, other = read_metrics(Path(config.trainer.run_dir))[1:], read_metrics(tmp_path / "again")
    assert other[0]["rollout/kl"] == first[0]["rollout/kl"]
    assert other[1]["actor/loss"] != first[1]["actor/loss"]
    assert "replay/bytes_per_token" not in other[0]


def test_a_resumed_run_with_r2_is_the_uninterrupted_one(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["actor.router_replay.mode=R2", "trainer.steps=3", "trainer.checkpoint_every=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(Trainer(make_config(*overrides, f"trainer.run_dir={whole}")).steps())
    steps = Trainer(make_config(*overrides, f"trainer.run_dir={parts}")).steps()
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for report in Trainer(make_config(*overrides, f"trainer.run_dir={parts}", "resume=auto")).steps():
        assert report.number >= 2
    assert timeless(read_metrics(parts)) == timeless(read_metrics(whole))


def test_replay_of_a_dense_model_is_refused_by_name(make_config: MakeConfig, tmp_path: Path) -> None:
    from tests.models import save_family

    folder = save_family("llama", tmp_path / "llama")
    for mode in ("R2", "R3"):
        with pytest.raises(ReplayError, match=r"'llama'\) is dense.*actor\.router_replay\.mode=disabled"):
            Trainer(make_config(f"model.path={folder}", f"actor.router_replay.mode={mode}"))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["hybrid", "colocated"])
def test_routes_reach_the_learners_across_processes(
    make_config: MakeConfig, tmp_path: Path, ray_session: None, placement: str
) -> None:
    overrides = ["actor.router_replay.mode=R3", "trainer.steps=2", "data.prompts_per_step=5"]
    list(Trainer(make_config(*overrides, f"trainer.run_dir={tmp_path / 'local'}")).steps())
    there = ["controller.backend=ray", "trainer.num_workers=2", f"rollout.placement={placement}"]
    list(Trainer(make_config(*overrides, *there, f"trainer.run_dir={tmp_path / 'ray'}")).steps())
    for row, other in zip(read_metrics(tmp_path / "ray")[1:], read_metrics(tmp_path / "local")[1:], strict=True):
        assert row["replay/unknown_share"] == other["replay/unknown_share"] > 0
        assert row["replay/disagreement"] == other["replay/disagreement"] == 0.0  # float32: both compute alike
        assert row["reward/mean"] == other["reward/mean"]
