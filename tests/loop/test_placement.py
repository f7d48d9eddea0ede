from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from practicum import Config, Trainer
from practicum.controller import Controller, open_controller
from practicum.errors import RolloutError
from practicum.loop.explain import explanation
from practicum.loop.placement import ActorWeights, open_learners, rollout_problems
from practicum.loop.run_folder import read_metrics
from tests.rollout import talks
from tests.rollout.replicas import groups_of, on_the_loop, written
from tests.rollout.test_openai import ModelServer
from tests.rollout.vllm.test_engine import fake_vllm

MakeConfig = Callable[..., Config]


@pytest.fixture
def local() -> Iterator[Controller]:
    with open_controller("local", num_workers=1, use_gpu=False, max_colocate_count=1) as controller:
        yield controller


@pytest.fixture
def two_servers(tiny_model: Path) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ModelServer(str(tiny_model))).url for _ in range(2)]


@on_the_loop
async def test_hybrid_rollout_is_a_role_of_the_learners(make_config: MakeConfig, local: Controller) -> None:
    config = make_config()
    async with open_learners(config, local, config.model.path) as (groups, manager):
        assert [replica.name for replica in manager.replicas] == [groups.actors.name] == ["learners"]
        await manager.update_weights(3)
        came = await written(manager, groups_of(3))
        assert {int(version) for group in came for version in group.samples[0].versions} == {3}


@on_the_loop
async def test_others_have_the_learners_weights_sent_and_compared(make_config: MakeConfig, local: Controller) -> None:
    config = make_config("rollout.placement=standalone")
    async with open_learners(config, local, config.model.path) as (groups, manager):
        assert [replica.name for replica in manager.replicas] == ["rollout-0"]
        await manager.update_weights(3)
        weights = ActorWeights(groups.actors, "float32", 60.0)
        sequences = [groups_of(1)[0].prompt_ids]
        (trainers,), (own,) = await weights.log_probs(sequences), await manager.replicas[0].log_probs(sequences)
        assert abs(trainers - own).max() < 1e-5


def test_a_run_generates_with_servers_behind_a_router(
    make_config: MakeConfig, two_servers: list[str], tmp_path: Path
) -> None:
    where = ["rollout.engine=openai", "rollout.placement=standalone", f"rollout.openai.servers={two_servers}"]
    short = ["data.prompts_per_step=2", "rollout.answers_per_prompt=2", "validation.max_prompts=1"]
    reports = list(Trainer(make_config(*where, *short)).steps())
    assert all(report.kl < 1e-4 for report in reports)  # every server has the weights of each step
    assert len(read_metrics(tmp_path / "run")) == 3
    assert not list((tmp_path / "run").glob("weights-*"))
    assert (tmp_path / "run" / "logs" / "rollout-router.log").exists()


def test_what_a_vllm_printed_that_does_not_start_is_kept_with_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "raise ValueError('less memory than desired')")
    where = ["rollout.engine=vllm", "rollout.placement=standalone", f"rollout.vllm.python={python}"]
    with pytest.raises(RolloutError, match=r"All that vLLM printed is in .*(?s:.*)ValueError: less memory") as caught:
        list(Trainer(make_config(*where)).steps())
    (log,) = (tmp_path / "run" / "logs").iterdir()
    assert str(log) in str(caught.value) and "ValueError: less memory" in log.read_text()


@pytest.mark.parametrize("placement", ["hybrid", "standalone"])
def test_what_conversations_did_is_told_with_each_step(make_config: MakeConfig, tmp_path: Path, placement: str) -> None:
    environment = Path(talks.__file__)
    agent = [f"rollout.agent.environment={environment}:Once", "rollout.agent.max_turns=2"]
    short = ["rollout.max_new_tokens=20", "data.prompts_per_step=2", "rollout.answers_per_prompt=2"]
    list(Trainer(make_config(f"rollout.placement={placement}", *agent, *short)).steps())
    steps = [row for row in read_metrics(tmp_path / "run") if "agent/turns" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:  # of this step alone: not of those before, nor of validation
        assert 1 <= row["agent/turns"] <= 2 and row["agent/calls"] >= 0


def test_a_run_goes_on_when_one_of_its_servers_dies_and_takes_it_back(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    with ModelServer(str(tiny_model)) as stays:
        comes_and_goes = ModelServer(str(tiny_model)).__enter__()
        servers = [stays.url, comes_and_goes.url]
        where = ["rollout.engine=openai", "rollout.placement=standalone", f"rollout.openai.servers={servers}"]
        short = ["data.prompts_per_step=2", "rollout.answers_per_prompt=2", "validation.max_prompts=1"]
        kls = []
        try:
            for report in Trainer(make_config(*where, *short, "trainer.steps=4")).steps():
                kls.append(report.kl)
                if report.number == 1:
                    comes_and_goes.__exit__()
                elif report.number == 2:
                    comes_and_goes._load({"path": str(tiny_model), "version": 0})  # a new process has no others
                    comes_and_goes.calls.clear()
                    comes_and_goes.__enter__()
        finally:
            comes_and_goes.__exit__()
    assert len(kls) == 4 and all(kl < 1e-4 for kl in kls)  # nobody wrote with old weights
    assert "/update_weights" in [path for path, _ in comes_and_goes.calls]


def test_a_server_that_is_not_there_stops_the_run_with_its_address(make_config: MakeConfig) -> None:
    where = ["rollout.engine=openai", "rollout.placement=standalone", "rollout.openai.servers=[http://127.0.0.1:9]"]
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9"):
        list(Trainer(make_config(*where)).steps())
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9 does not answer .*take it out of rollout\.openai\.servers"):
        Trainer(make_config(*where))  # before anything is started
    told = explanation(make_config(*where))
    assert "# this cannot start\nserver http://127.0.0.1:9 does not answer" in told and "# placement" in told


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["rollout.engine=vllm", "rollout.vllm.python=/no/such/python"], r"rollout\.vllm\.python=/no/such/python"),
        (["controller.backend=ray", "rollout.replicas=3"], r"rollout\.replicas=3, but the trainer has room for 1"),
        (["controller.backend=ray", "rollout.replicas=999", "rollout.placement=standalone"], "needs 999 CPUs"),
    ],
)
def test_what_cannot_start_is_told_before_ray_is_started(
    make_config: MakeConfig, where: list[str], message: str
) -> None:
    import ray

    config = make_config("rollout.placement=colocated", *where)
    before = ray.is_initialized()  # by another test
    with pytest.raises(RolloutError, match=message):
        Trainer(config)
    assert ray.is_initialized() == before
    assert "# this cannot start" in explanation(config)


def test_of_a_cluster_elsewhere_nothing_is_claimed(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = ["controller.backend=ray", "controller.address=10.0.0.1:6379", "rollout.placement=standalone"]
    engine = ["rollout.engine=vllm", "rollout.vllm.python=/on/the/nodes", "rollout.replicas=999"]
    assert rollout_problems(make_config(*joined, *engine)) == []
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    many = ("controller.backend=ray", "trainer.num_workers=99", "data.prompts_per_step=99")
    assert rollout_problems(make_config(*many))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert rollout_problems(make_config(*many)) == []
