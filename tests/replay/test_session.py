"""One rank's part in router replay, on a tiny model without a trainer around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.data import pack
from practicum.errors import ReplayError
from practicum.models import load_model, load_tokenizer
from practicum.replay import Placed, Recording, ReplaySession, ReplaySettings, ReplayStats, RouteRecorder
from practicum.replay.session import laid_out, model_fingerprint, tokenizer_fingerprint
from practicum.types import Sample, Score
from tests.models import save_family
from tests.samples import make_sample, with_routes

SAMPLES = [
    replace(make_sample(2 + i, 3 + i % 2, advantage=1.0, seed=i, id=f"4/{i}/0"), score=Score(float(i)))
    for i in range(5)
]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_family("qwen3_moe", tmp_path / "model")


def of_step(step: int) -> list[Sample]:
    return [replace(sample, id=f"{step}/{i}/0") for i, sample in enumerate(SAMPLES)]


def opened(folder: Path, settings: ReplaySettings) -> tuple[Any, ReplaySession]:
    model = load_model(str(folder))
    return model, ReplaySession(model, load_tokenizer(str(folder)), settings, device=CPU)


def placed(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, Placed]:
    packed = pack(samples)
    tokens, positions = torch.from_numpy(packed.input_ids), torch.from_numpy(packed.position_ids)
    return tokens, positions, Placed(samples, packed.starts, tokens.numel(), "batch 7")


def perturb(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std() * torch.randn_like(parameter)


@torch.no_grad()
def chosen(model: Any, context: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The experts of each sample's tokens in a pass inside of the context."""
    tokens, positions, where = placed(samples)
    recorder = RouteRecorder(model)
    with context(where):
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    experts = recorder.take()
    recorder.close()
    return [experts[start : start + item.num_tokens] for start, item in zip(where.starts, where.samples, strict=True)]


def test_with_r2_the_trainers_own_choice_is_recorded_and_chosen_again(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    model, session = opened(folder, ReplaySettings("R2", record_file=str(file)))
    assert session.records
    session.begin_step(4, SAMPLES)
    before = chosen(model, session.old_pass, SAMPLES)
    session.sync()
    perturb(model)
    live = chosen(model, lambda _: torch.no_grad(), SAMPLES)
    assert any((one != other).any() for one, other in zip(before, live, strict=True))
    # In another order, and not all of them: a sample is found by its name.
    some = [SAMPLES[3], SAMPLES[0], SAMPLES[4]]
    after = chosen(model, session.update_pass, some)
    for item, own in zip(some, after, strict=True):
        assert np.array_equal(own, before[SAMPLES.index(item)])
    stats = session.take_stats()
    assert stats.num_known == stats.num_rows == sum(item.num_tokens for item in some)
    assert sum(stats.differing) > 0
    assert stats.num_bytes > 0 and stats.num_recorded == sum(item.num_tokens for item in SAMPLES)
    assert session.take_stats() == ReplayStats(layers=[0, 1, 2], differing=[0.0, 0.0, 0.0])
    session.close()
    recording = Recording(file)
    assert recording.steps == [4] and len(recording) == 5
    found = recording.samples(4)[2]
    assert found.id == "4/2/0" and found.score == Score(2.0)
    assert np.array_equal(found.token_ids, SAMPLES[2].token_ids)


def test_with_r2_the_choice_of_the_rollout_is_compared_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    model, session = opened(folder, ReplaySettings("R2", record_file=str(tmp_path / "routes.rec")))
    own = chosen(model, lambda _: torch.no_grad(), SAMPLES)
    same, other, last = (with_routes(item, 3, 2, 8) for item in SAMPLES[:3])
    for sample, experts in zip((same, other, last), own, strict=False):
        sample.routes.experts[:] = experts  # type: ignore[union-attr]
    other.routes.experts[1, 2] = [0, 1] if tuple(own[1][1, 2]) != (0, 1) else [2, 3]  # type: ignore[union-attr]
    last.routes.experts[-1] = 7  # type: ignore[union-attr]  # of which nothing is known
    batch = [same, other, last, *SAMPLES[3:]]
    session.begin_step(4, batch)
    for before, after in zip(own, chosen(model, session.old_pass, batch), strict=True):
        assert np.array_equal(before, after)
    stats = session.take_stats()
    assert stats.num_rollout_differing == 1
    assert stats.num_rollout_known == sum(3 * (item.num_tokens - 1) for item in SAMPLES[:3])
    session.close()


def test_a_sample_that_was_never_recorded_is_named(folder: Path, tmp_path: Path) -> None:
    model, session = opened(folder, ReplaySettings("R2", record_file=str(tmp_path / "routes.rec")))
    session.begin_step(4, SAMPLES)
    chosen(model, session.old_pass, SAMPLES[:2])
    with pytest.raises(ReplayError, match=r"sample 4/3/0 is not in .*routes\.rec"):
        chosen(model, session.update_pass, [SAMPLES[3]])
    session.close()


def test_with_r3_the_rollouts_choice_is_chosen_again_where_it_is_known(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rollout.rec"
    model, session = opened(folder, ReplaySettings("R3", record_file=str(file)))
    assert not session.records
    routed = [with_routes(item, 3, 2, 8) for item in SAMPLES]
    without = SAMPLES[1]
    batch = [routed[0], without, routed[2]]
    session.begin_step(4, batch)
    for context in (session.old_pass, session.update_pass):
        found = chosen(model, context, batch)
        for item, own in zip(batch, found, strict=True):
            routes = item.routes
            if routes is not None:
                assert np.array_equal(own[:-1], routes.experts[:-1])
    stats = session.take_stats()
    num_tokens = sum(item.num_tokens for item in batch)
    assert stats.num_rows == num_tokens
    assert stats.num_known == num_tokens - without.num_tokens - 2
    session.close()
    assert Recording(file).ids == [routed[0].id, routed[2].id]


def test_routes_of_another_model_are_refused_with_both_shapes(folder: Path) -> None:
    model, session = opened(folder, ReplaySettings("R3"))
    wrong = [with_routes(SAMPLES[0], 2, 2, 8)]
    with pytest.raises(ReplayError, match=r"2 of 8 experts in layers \[0, 1\], but .* 2 of 8 in \[0, 1, 2\]"):
        chosen(model, session.update_pass, wrong)
    session.close()


def test_a_recording_takes_the_place_of_what_would_be_recorded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    model, session = opened(folder, ReplaySettings("R2", record_file=str(file)))
    session.begin_step(4, SAMPLES)
    before = chosen(model, session.old_pass, SAMPLES)
    session.close()
    size = file.stat().st_size
    model, session = opened(folder, ReplaySettings("R2", replay_file=str(file)))
    perturb(model)
    for context in (session.old_pass, session.update_pass):  # or old and new log-probs would be of other experts
        for own, other in zip(chosen(model, context, SAMPLES), before, strict=True):
            assert np.array_equal(own, other)
    session.close()
    assert file.stat().st_size == size


def test_a_recording_of_another_model_names_both(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    _, session = opened(folder, ReplaySettings("R2", record_file=str(file)))
    session.close()
    other = save_family("olmoe", tmp_path / "other")
    names = [model_fingerprint(load_model(str(path)).config) for path in (folder, other)]
    assert names[0].startswith("qwen3_moe-") and names[1].startswith("olmoe-")
    for settings in (ReplaySettings("R2", replay_file=str(file)), ReplaySettings("R2", record_file=str(file))):
        with pytest.raises(ReplayError, match=f"routes.rec.*{names[0]}, not {names[1]}"):
            opened(other, settings)


def test_what_is_redone_takes_the_place_of_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    model, session = opened(folder, ReplaySettings("R2", record_file=str(file), made={"data.prompts_per_step": "5"}))
    for step in (1, 2, 3):
        batch = of_step(step)
        session.begin_step(step, batch, 5)
        chosen(model, session.old_pass, batch)
    session.begin_at(2)  # the run was stopped after step 1, and went on
    session.begin_step(2, of_step(2)[:2], 2)
    chosen(model, session.old_pass, of_step(2)[:2])
    session.close()
    with Recording(file) as recording:
        assert recording.steps == [1, 2] and recording.header.made == {"data.prompts_per_step": "5"}
        assert [sample.id for sample in recording.samples(2)] == ["2/0/0", "2/1/0"]
        assert len(recording.samples(1)) == 5


def test_a_step_of_which_some_is_missing_is_not_whole(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes.rec"
    model, session = opened(folder, ReplaySettings("R2", record_file=str(file)))
    for half in (SAMPLES[:3], SAMPLES[3:]):
        session.begin_step(4, half, 5)
        chosen(model, session.old_pass, half)
    session.close()
    with Recording(file) as recording:
        recording.check_whole(4)
        second = recording.files[0].chunks[-1].head.offset
    with file.open("r+b") as cut:
        cut.truncate(second)
    with Recording(file) as recording, pytest.raises(ReplayError, match=r"has 3 of the 5 samples of step 4"):
        recording.samples(4)


def test_fingerprints_are_the_same_for_the_same_model_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    again = save_family("qwen3_moe", tmp_path / "again")
    one, other = (load_model(str(path)).config for path in (folder, again))
    assert model_fingerprint(one) == model_fingerprint(other)
    tokenizer = load_tokenizer(str(folder))
    name = tokenizer_fingerprint(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != name


def test_padding_and_batches_without_samples_are_left_to_the_live_router(folder: Path) -> None:
    model, session = opened(folder, ReplaySettings("R3"))
    assert chosen(model, session.update_pass, []) == []
    stats = session.take_stats()
    assert (stats.num_known, stats.num_rows) == (0, 0)
    routed = [with_routes(item, 3, 2, 8) for item in SAMPLES[:2]]
    _, _, where = placed(routed)
    experts, known = laid_out([item.routes for item in routed], where, session.shape)  # type: ignore[misc]
    assert experts.shape == (3, where.num_positions, 2)
    assert known.sum() == sum(item.num_tokens - 1 for item in routed) < where.num_positions
    session.close()


def test_sums_over_ranks_are_sums() -> None:
    ranks = [
        ReplayStats([0, 1], [1.0, 2.0], 5, 6, 70, 6, 0.5, 1.5, 3),
        ReplayStats([0, 1], [0.0, 4.0], 3, 3, 30, 3, 0.5, 0.5, 2),
    ]
    assert ReplayStats.combined(ranks) == ReplayStats([0, 1], [1.0, 6.0], 8, 9, 100, 9, 1.0, 2.0, 5)


def test_samples_are_read_back_by_group_number_and_context(folder: Path, tmp_path: Path) -> None:
    """Whatever the order they were recorded in, and whatever their ids are as texts."""
    file = tmp_path / "routes.rec"
    model, session = opened(folder, ReplaySettings("R2", record_file=str(file)))
    ids = ["7/2/0", "7/2/10", "7/2/10/1", "7/10/1", "7/10/2"]
    samples = [replace(sample, id=id) for sample, id in zip(SAMPLES, ids, strict=True)]
    for part in (samples[3:], samples[1:2], samples[2:3], samples[:1]):
        session.begin_step(7, part, 5)
        chosen(model, session.old_pass, part)
    session.close()
    with Recording(file) as recording:
        assert [sample.id for sample in recording.samples(7)] == ids
        assert [recording.entry(id).place for id in ids] == [2, 2, 2, 10, 10]
