from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from practicum import Config
from practicum.adapters import LoneAdapters, LoraSettings
from practicum.loop.settings import actor_settings, reference_path, sent_adapters

MakeConfig = Callable[..., Config]
LORA = ("actor.lora.rank=4", "actor.lr=1e-2")


def test_settings_of_the_actor_are_those_of_the_config(make_config: MakeConfig) -> None:
    settings = actor_settings(make_config("actor.mini_batches=2", "trainer.steps=7", "actor.lr=0.5"), "there", "cpu")
    assert (settings.model_path, settings.device, settings.num_updates, settings.lr) == ("there", "cpu", 14, 0.5)


def test_a_reference_is_loaded_only_if_it_is_another_model(make_config: MakeConfig, tmp_path: Path) -> None:
    def path(*overrides: str) -> str | None:
        return reference_path(make_config(*overrides))

    own, kl = make_config().model.path, "algorithm.kl.coefficient=0.1"
    assert path(kl) == own
    assert path(*LORA, kl) is None
    assert path(*LORA, kl, f"algorithm.kl.reference={own}") is None
    assert path(*LORA, kl, f"algorithm.kl.reference={tmp_path}") == str(tmp_path)
    # On places of its own it is another model in any case.
    assert path(*LORA, kl, "controller.backend=ray", "algorithm.kl.placement=standalone") == own


def test_engines_know_of_adapters_only_if_they_are_sent_alone(make_config: MakeConfig) -> None:
    alone = ("actor.lora.send=adapters", "rollout.placement=standalone")
    config = make_config(*LORA, *alone)
    assert sent_adapters(config) == LoneAdapters(config.model.path, LoraSettings(4, 8))
    assert actor_settings(config, "there", "cpu").sends_adapters
    assert sent_adapters(make_config(*LORA)) is sent_adapters(make_config()) is None
