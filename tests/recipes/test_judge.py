"""The recipe's parts fit together: its problems are apart, the judge is taught what it is asked, the config runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from practicum import Config, Trainer
from practicum.demo.arithmetic import Problem, make_model, make_tokenizer
from practicum.models import save_model
from practicum.reward import check_reward
from practicum.reward.graders.judge import Judge
from recipes.judge.prepare import TEMPLATE, batch_of, judged, teach_judge, three_parts, write_problems, wrong_answer

RECIPE = Path(__file__).parents[2] / "recipes" / "judge" / "train.yaml"
SUM = Problem(35, 77)


def test_pupil_judge_and_examiner_have_no_problem_in_common() -> None:
    problems = three_parts(seed=0)
    parts = [set(problems.of_pupil), set(problems.of_judge), set(problems.held_out)]
    assert [len(part) for part in parts] == [4800, 4800, 400] and len(set.union(*parts)) == 10_000


def test_wrong_answers_are_wrong_and_can_be_written() -> None:
    random = np.random.default_rng(0)
    wrong = [wrong_answer(SUM, random) for _ in range(200)]
    assert SUM.answer not in wrong and len(set(wrong)) > 20
    tokenizer = make_tokenizer()
    assert all(tokenizer.decode(tokenizer(answer)["input_ids"]) == answer for answer in wrong)


def test_the_judge_is_taught_what_the_config_asks_and_reads() -> None:
    (term, _) = Config.load(RECIPE).reward.terms
    judge = Judge.model_validate(term.options)
    assert judge.template == TEMPLATE
    for answer, value in ((SUM.answer, 1.0), ("102", 0.0)):
        asked, said = judged(SUM, answer)
        assert asked == f"{answer} 35+77=" and said == f"112 {value:g}"
        assert judge.decide([said], [judge.find(said)]).value == value
    assert judge.decide(["112"], [judge.find("112")]).status == "invalid"
    ids, learnt = batch_of(make_tokenizer(), [judged(SUM, "102"), judged(SUM, "7")])
    assert make_tokenizer().decode(ids[1][learnt[1]]) == "112 0<end>"


def test_the_recipe_runs_as_it_is_and_is_examined_by_the_truth(tmp_path: Path) -> None:
    problems = three_parts(seed=0)
    write_problems(tmp_path / "train.jsonl", problems.of_pupil[:64], "sums")
    write_problems(tmp_path / "held-out.jsonl", problems.held_out[:8], "held-out")
    save_model(make_model(0), make_tokenizer(), tmp_path / "model")
    judge, tokenizer = teach_judge(problems.of_judge, seed=0, num_steps=40, batch_size=16)
    assert all(torch.isfinite(parameter).all() for parameter in judge.parameters())
    save_model(judge, tokenizer, tmp_path / "judge")
    where = [f"model.path={tmp_path / 'model'}", f"reward.model.path={tmp_path / 'judge'}"]
    where += [f"data.{key}={tmp_path / name}.jsonl" for key, name in (("train", "train"), ("validation", "held-out"))]
    # An untaught judge seldom ends with a verdict: here that is no reason to stop.
    short = ["trainer.steps=1", "data.prompts_per_step=4", "reward.max_failure_share=0.99", "controller.backend=local"]
    config = Config.load(RECIPE, [*where, *short, f"trainer.run_dir={tmp_path / 'run'}"])
    rubric = check_reward(config.reward)
    assert [term.weight for term in rubric.default] == [1.0, 0.0]
    (report,) = Trainer(config).steps()
    assert {"reward/part/judge", "reward/part/exact"} <= set(report.metrics)
    assert report.accuracy == pytest.approx(0.0, abs=0.2)  # of random weights, by the truth
