from __future__ import annotations

from collections.abc import Callable

from practicum import Config
from practicum.loop.explain import count_parameters, explanation
from practicum.models import load_config, load_model


def test_it_tells_config_placement_algebra_and_memory(make_config: Callable[..., Config]) -> None:
    text = explanation(make_config("controller.backend=ray", "trainer.num_workers=2", "actor.mini_batches=2"))
    assert "prompts_per_step: 4" in text
    assert "learners: 2 x (actor + rollout fused in one process)" in text
    assert "4 prompts x 4 answers = 16 samples a step" in text
    assert "/ 2 mini-batches = 8 samples an update" in text
    assert "/ 2 workers = 4 samples each" in text
    assert "GiB  rollout's copy of the weights\n" in text
    assert "(shared with the actor)" in explanation(make_config())


def test_it_tells_what_overlaps(make_config: Callable[..., Config]) -> None:
    ahead = ("trainer.staleness=2", "algorithm.correction.kind=truncated")
    assert "hybrid rollout takes turns with the learners" in explanation(make_config(*ahead))
    text = explanation(make_config(*ahead, "rollout.placement=standalone"))
    assert "# overlap\nthe batches of 2 later steps" in text and "rollout, grading and learning go on at once" in text
    assert "no token is staler than 2 updates; importance weights are truncated" in text
    assert "# overlap" not in explanation(make_config())


def test_it_says_where_rollout_is(make_config: Callable[..., Config]) -> None:
    def told(*overrides: str) -> str:
        return explanation(make_config("controller.backend=ray", *overrides))

    assert "rollout:  in the learners' processes, with their weights: one native engine in each" in told()
    apart = told("rollout.placement=colocated", "trainer.num_workers=2", "rollout.engine=native")
    assert "learners: 2 x actor, cpu" in apart
    assert "rollout:  2 x native engine, in the same pool, asleep while the learners learn" in apart
    assert "(shared with the actor)" not in told("rollout.placement=standalone")
    assert "rollout:  1 x native engine, on places of their own" in told("rollout.placement=standalone")
    assert "rollout:  3 x native engine" in told("rollout.placement=standalone", "rollout.replicas=3")
    servers = told(
        "rollout.engine=openai", "rollout.placement=standalone", "rollout.openai.servers=[http://a:1, http://b:2]"
    )
    assert "servers at http://a:1, http://b:2, asked by one process beside the pool; a router in front" in servers
    assert "rollout (standalone, native, with weights of its own)" in explanation(
        make_config("rollout.placement=standalone")
    )


def test_parameters_are_counted_without_loading(make_config: Callable[..., Config]) -> None:
    path = make_config().model.path
    assert count_parameters(load_config(path)) == sum(p.numel() for p in load_model(path).parameters())


def test_it_tells_whose_experts_are_replayed_and_what_that_takes(make_config: Callable[..., Config]) -> None:
    assert "# router replay" not in explanation(make_config())
    rollout = explanation(make_config("actor.router_replay.mode=R3"))
    assert "R3: those of the native engine; 2 of 8 experts in 2 layers" in rollout
    assert "about 1.2 bytes a token" in rollout and "recorded in" not in rollout
    own = explanation(make_config("actor.router_replay.mode=R2"))
    assert "R2: the trainer's own" in own and "routes.rec" in own


def test_it_tells_of_all_roles_and_what_they_hold(make_config: Callable[..., Config]) -> None:
    told = ["algorithm.advantage=gae", "algorithm.kl.coefficient=0.1", "actor.epochs=2"]
    text = explanation(make_config("controller.backend=ray", *told))
    assert "learners: 1 x (actor + critic + reference + rollout fused in one process)" in text
    placed = ("critic.placement=colocated", "algorithm.kl.placement=standalone")
    apart = explanation(make_config("controller.backend=ray", *told, *placed))
    assert "(actor + rollout fused in one process)" in apart and "critics:  1 x critic, in the same pool" in apart
    assert "references: 1 x reference, on places of their own" in apart and "GiB  reference" not in apart
    assert "GiB  reference, frozen" in text and "GiB  critic, its gradients, AdamW" in text
    assert "16 samples a step, learnt from 2 times" in text
    assert "this process: actor + critic + reference + rollout" in explanation(make_config(*told))
    assert "reference" not in explanation(make_config()).partition("# memory")[2]
