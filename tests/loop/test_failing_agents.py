"""Runs with environments that fail, and whose model is not shown what it should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from practicum import Config, Message, Prompt, Trainer
from practicum.errors import RewardError
from practicum.loop.notices import unseen
from practicum.reward.centre import check_reward
from practicum.rollout.agent.tools import describe_tools
from tests.rollout import talks
from tests.rollout.tokenizers import byte_tokenizer

MakeConfig = Callable[..., Config]
SHORT = ("rollout.max_new_tokens=20", "rollout.agent.max_turns=2", "data.validation=null", "trainer.steps=2")


def environment(name: str) -> str:
    return f"rollout.agent.environment={talks.__file__}:{name}"


@pytest.mark.parametrize("policy", ["mask", "drop_group"])
def test_conversations_whose_environment_fails_are_left_out_counted_and_named(
    make_config: MakeConfig, tmp_path: Path, policy: str
) -> None:
    reward = tmp_path / "reward.py"  # a zero would pull the mean below 2
    reward.write_text("def grade(sample):\n    return 2.0 + len(sample.text) % 2\n")
    given = (environment("BreaksOnEven"), f"reward.function={reward}:grade", f"reward.on_failure={policy}")
    config = make_config(*SHORT, *given, "reward.max_failure_share=0.9")
    notices: list[str] = []
    reports = list(Trainer(config, notify=notices.append).steps())
    share = [report.metrics["reward/failed_share"] for report in reports]
    assert share == [report.metrics["agent/failed_share"] for report in reports]
    assert any(share) and all(report.reward >= 2.0 for report in reports)
    assert sum(report.metrics.get("reward/failed/infra_error", 0) for report in reports) == sum(share) * 16
    (notice,) = [text for text in notices if "could not be graded" in text][:1]
    assert "BreaksOnEven.step raised ConnectionError: the world is gone (talks.py" in notice
    assert f"reward.on_failure={policy}" in notice
    assert "[model] " in Path(config.trainer.run_dir, "answers", "step-000001.txt").read_text()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("BreaksOnEven", r"BreaksOnEven\.step raised ConnectionError: the world is gone \(talks\.py, line \d+\)"),
        ("NeverResets", r"NeverResets\.reset raised FileNotFoundError: levels\.json"),
    ],
)
def test_a_run_whose_environments_fail_ends_with_class_method_and_error(
    make_config: MakeConfig, name: str, why: str
) -> None:
    paragraph = rf"samples could not be graded \(\d+ infra_error\).*reward\.max_failure_share=0\.1 allows.*{why}"
    with pytest.raises(RewardError, match=paragraph):
        list(Trainer(make_config(*SHORT, environment(name))).steps())


def test_answers_that_teach_nothing_are_named_once(make_config: MakeConfig, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def grade(sample):\n    return 0.0\n")
    config = make_config(f"reward.function={reward}:grade", "data.validation=null", "trainer.steps=7")
    notices: list[str] = []
    list(Trainer(config, notify=notices.append).steps())
    (notice,) = notices
    assert notice.startswith("step 3: for 3 steps all answers to each prompt have had the same score, 0.000")


def test_tools_that_the_chat_template_leaves_out_are_named_before_anything_starts(make_config: MakeConfig) -> None:
    config = make_config(f"rollout.agent.tools=[{talks.__file__}:shout]", "data.validation=null")
    notices: list[str] = []
    Trainer(config, notify=notices.append)
    (notice,) = notices
    assert notice.startswith("rollout.agent.tools are not shown to the model: the chat template of model.path=")
    assert config.model.path in notice
    rubric, tools = check_reward(config.reward), [tool.schema for tool in describe_tools(config.rollout.agent.tools)]
    chat, plain = Prompt("p", messages=(Message("user", "?"),), answer=1), Prompt("p", text="?", answer=1)
    assert not list(unseen(config, byte_tokenizer(), [chat], tools, rubric))
    assert not list(unseen(config, byte_tokenizer(), [plain], [], rubric))
    (notice,) = unseen(config, byte_tokenizer(), [plain], tools, rubric)
    assert "a prompt of plain text goes past the chat template" in notice


def test_pictures_and_a_missing_ground_truth_are_named_before_anything_starts(
    make_config: MakeConfig, write_jsonl: Any
) -> None:
    rows = [{"prompt": "1+1=", "images": ["sums/1.png"], "solution": "2"}, {"prompt": "2+2=", "solution": "4"}]
    path = write_jsonl(*rows)
    notices: list[str] = []
    Trainer(make_config(f"data.train={path}", "data.validation=null"), notify=notices.append)
    picture, truth = notices
    assert picture.startswith(f"data.train={path}: the field 'images' of 1 records holds pictures")
    assert "no record has the field 'answer' (data.answer_key)" in truth and "images, solution" in truth
    notices.clear()
    rows[0].pop("images")
    path = write_jsonl(*rows)
    keys = (f"data.train={path}", "data.answer_key=solution", "data.validation=null")
    Trainer(make_config(*keys), notify=notices.append)
    assert not notices
