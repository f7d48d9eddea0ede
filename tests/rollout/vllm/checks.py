"""What the engine `vllm` must do with vLLM itself, wherever that runs: derive from `VllmChecks` and `VllmContract`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.adapters import LoneAdapters, LoraSettings, adapters_alone, adapters_of
from practicum.errors import RolloutError
from practicum.models import export_model, load_model
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.vllm.engine import VllmRollout
from practicum.types import PromptGroup, Sample, SamplingParams
from practicum.weights import Fingerprint, WeightUpdate
from tests.rollout import asking
from tests.rollout.asking import run, written
from tests.rollout.contract import EngineContract
from tests.test_adapters import save, stirred

SEQUENCES = [np.arange(2, 14, dtype=np.int32), np.array([3, 9, 3, 9, 4], np.int32)]


def save_model(folder: Path, family: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from practicum.demo.arithmetic import make_tokenizer

    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.3,  # so that log-probs are far apart
    }
    torch.manual_seed(0)
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, mlp_only_layers=[], decoder_sparse_step=1))
    model.save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    return folder / family


def started(path: Path, **settings: Any) -> VllmRollout:
    options = {"enforce_eager": True}
    engine = VllmRollout(str(path), options=options, cache_gb=1, start_timeout_s=280, **settings)
    run(engine.resume())
    return engine


def ask(params: SamplingParams, seed: int = 0) -> PromptGroup:
    return asking.ask(params, range(2, 6 + seed), seed)


def log_probs_of(model: Any, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1].float() / temperature
    found: np.ndarray = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
    return found


def gap(engine: VllmRollout, model: Any) -> float:
    pairs = zip(run(engine.log_probs(SEQUENCES)), SEQUENCES, strict=True)
    return float(max(np.abs(found - log_probs_of(model, ids)).max() for found, ids in pairs))


def answer_gap(sample: Sample, model: Any, temperature: float) -> float:
    ids = np.concatenate([sample.prompt_ids, sample.token_ids])
    expected = log_probs_of(model, ids, temperature)[len(sample.prompt_ids) - 1 :]
    return float(np.abs(sample.log_probs - expected).max())


def aborted(engine: VllmRollout, group: PromptGroup) -> Sample:
    """As soon as its first token is there."""
    sequence = Sequence.of(group, group.trajectories[0], lambda *_: engine.abort([sequence]))
    return run(engine.collect_samples([sequence]))[0]


async def reload_as_vllm_does(engine: VllmRollout, folder: str) -> None:
    """Without what vllm/worker.py does about it: wrong for mixtures of experts on the CPU."""
    await engine._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})


def check_routes(path: Path, **settings: Any) -> None:
    """That routed experts are those of transformers."""
    model = load_model(str(path)).eval()
    engine = started(path, keep_routes=True, **settings)
    try:
        samples = written(engine, *(ask(SamplingParams(6, num_answers=2, ignore_eos=True), seed) for seed in range(2)))
    finally:
        run(engine.close())
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    for sample in samples:
        chosen.clear()
        assert answer_gap(sample, model, 1.0) < 5e-5
        assert sample.routes is not None
        assert sample.routes.known.tolist() == [True] * (sample.num_tokens - 1) + [False]
        expected = torch.stack(chosen, 1).sort(-1).values.numpy()
        assert np.array_equal(np.sort(sample.routes.experts, -1)[:-1], expected[: sample.num_tokens - 1])


def check_adapters(path: Path, folder: Path, **settings: Any) -> None:
    """That it computes with the newest adapters that it was given alone, from the first ones of a run that goes on.

    The model they belong to is made of another one and adapters itself.
    """
    base = save(stirred(path, LoraSettings(2, 4)), path, folder / "base")
    lone = LoneAdapters(str(base), LoraSettings(4, 6))
    learner = stirred(base, lone.settings)
    engine = started(save(learner, base, folder / "first"), adapters=lone, **settings)
    try:
        assert gap(engine, learner) < 5e-5
        for version in (1, 2, 3):
            before = copy.deepcopy(learner)
            for parameter in adapters_of(learner).values():
                torch.nn.init.normal_(parameter, std=0.1)
            run(
                engine.update_weights(WeightUpdate(version, adapters_alone(learner, torch.Tensor.detach), shared=False))
            )
            assert gap(engine, learner) < 5e-5 < 0.01 < gap(engine, before)
            for params in (SamplingParams(12, num_answers=2, ignore_eos=True), SamplingParams(12, 0.0)):
                for sample in written(engine, ask(params)):
                    assert answer_gap(sample, learner, 1.0) < 5e-5 and set(sample.versions.tolist()) == {version}
        run(engine.release())
        run(engine.resume())
        assert gap(engine, learner) < 5e-5
    finally:
        run(engine.close())


class VllmContract(EngineContract):
    draws_like_us = False
    where: dict[str, Any]
    """Settings that say where vLLM runs."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_model: Path) -> Iterator[VllmRollout]:
        engine = started(tiny_model, **cls.where)
        yield engine
        run(engine.close())


class VllmChecks:
    where: dict[str, Any]

    @pytest.fixture(scope="class", params=["llama", "qwen3_moe"])
    @classmethod
    def real(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[VllmRollout, Any]]:
        path = save_model(tmp_path_factory.mktemp("vllm"), request.param)
        engine = started(path, **cls.where)
        yield engine, load_model(str(path)).eval()
        run(engine.close())

    @pytest.mark.parametrize(
        "drawing",
        [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.7}],
        ids=str,
    )
    def test_log_probs_equal_those_of_transformers(
        self, real: tuple[VllmRollout, Any], drawing: dict[str, Any]
    ) -> None:
        engine, model = real
        params = SamplingParams(24, num_answers=4, **drawing)
        samples = written(engine, *(ask(params, seed) for seed in range(4)))
        assert max(answer_gap(sample, model, params.temperature or 1.0) for sample in samples) < 5e-5
        again = written(engine, *(ask(params, seed) for seed in range(4)))
        assert [s.token_ids.tolist() for s in again] == [s.token_ids.tolist() for s in samples]

    def test_greedy_answers_equal_those_of_generate(self, real: tuple[VllmRollout, Any]) -> None:
        engine, model = real
        for sample in written(engine, *(ask(SamplingParams(16, 0.0), seed) for seed in range(4))):
            ids = torch.from_numpy(sample.prompt_ids.astype(np.int64))[None]
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
            assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()

    def test_stops_and_what_is_left_of_an_abort(self, real: tuple[VllmRollout, Any]) -> None:
        engine, model = real
        free = SamplingParams(24, 0.0, ignore_eos=True)
        (whole,) = written(engine, ask(free))
        token = int(whole.token_ids[5])
        first = whole.token_ids.tolist().index(token)
        (cut,) = written(engine, ask(SamplingParams(24, 0.0, ignore_eos=True, stop_token_ids=(token,))))
        assert cut.finish_reason == "stop" and cut.token_ids.tolist() == whole.token_ids[: first + 1].tolist()
        stop = whole.text[:3]
        (text,) = written(engine, ask(SamplingParams(24, 0.0, ignore_eos=True, stop=(stop,))))
        assert text.finish_reason == "stop" and text.text.endswith(stop) and len(text.token_ids) < 24

        free_long = SamplingParams(200, 0.0, ignore_eos=True)
        parts = (
            aborted(engine, ask(free_long)) for _ in range(10)
        )  # on a busy machine vLLM may be done before we hear of it
        part = next(part for part in parts if part.finish_reason == "abort")
        assert 0 < len(part.token_ids) < 200
        long = ask(free_long)
        long.trajectories[0].add(part)
        (rest,) = written(engine, long)
        assert len(rest.token_ids) == 200 and answer_gap(rest, model, 1.0) < 5e-5
        assert rest.token_ids[: len(part.token_ids)].tolist() == part.token_ids.tolist()

    def test_new_weights_are_the_trainers_also_where_vllms_own_reload_is_wrong(
        self, real: tuple[VllmRollout, Any], tmp_path: Path
    ) -> None:
        engine, model = real
        other = copy.deepcopy(model)
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        assert gap(engine, model) < 5e-5 < 0.1 < gap(engine, other)
        export_model(tmp_path, engine._path, other.named_parameters())
        run(reload_as_vllm_does(engine, str(tmp_path)))
        is_moe = "moe" in model.config.model_type
        # If the first of these fails, vLLM has mended it and our worker need not.
        assert (gap(engine, other) > 0.1) == is_moe
        for version, weights in ((3, other), (4, model), (5, other), (6, model)):
            run(engine.update_weights(WeightUpdate(version, weights.named_parameters(), shared=False)))
            assert gap(engine, weights) < 5e-5
            (sample,) = written(engine, ask(SamplingParams(12, 0.0, ignore_eos=True)))
            assert answer_gap(sample, weights, 1.0) < 5e-5 and set(sample.versions.tolist()) == {version}
        run(engine.release())
        run(engine.resume())
        assert gap(engine, model) < 5e-5

    def test_the_fingerprint_tells_vllms_own_reload_from_a_right_one(
        self, real: tuple[VllmRollout, Any], tmp_path: Path
    ) -> None:
        engine, model = real
        fingerprint = Fingerprint(model.config.vocab_size)
        expected = [log_probs_of(model, ids) for ids in fingerprint.sequences]

        def update(version: int) -> None:
            run(engine.update_weights(WeightUpdate(version, model.named_parameters(), shared=False)))

        def found() -> list[np.ndarray]:
            return run(engine.log_probs(fingerprint.sequences))

        update(7)
        fingerprint.calibrate("vllm", 7, expected, found())
        export_model(tmp_path, engine._path, model.named_parameters())
        run(reload_as_vllm_does(engine, str(tmp_path)))
        if "moe" in model.config.model_type:
            with pytest.raises(RolloutError, match=r"version 8 is not the model that the trainer has"):
                fingerprint.compare("vllm", 8, expected, found())
        else:
            fingerprint.compare("vllm", 8, expected, found())
        update(9)
        fingerprint.compare("vllm", 9, expected, found())
