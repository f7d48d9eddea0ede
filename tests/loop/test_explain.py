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


def test_parameters_are_counted_without_loading(make_config: Callable[..., Config]) -> None:
    path = make_config().model.path
    assert count_parameters(load_config(path)) == sum(p.numel() for p in load_model(path).parameters())
