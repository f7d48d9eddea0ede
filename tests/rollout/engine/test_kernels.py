from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from practicum.rollout.engine.cpu.kernels import BLOCK, CannotBuild, Kernels, Projection, build, load_kernels

MACHINES = ["native", "x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else ["native"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module", params=MACHINES)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    try:
        return Kernels(ctypes.CDLL(str(build(tmp_path_factory.mktemp("kernels"), request.param))))
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 4, 7, 70])
@pytest.mark.parametrize(("width", "num"), [(64, 64), (37, 5), (1, 1), (600, 130)])
def test_products(kernels: Kernels, rows: int, width: int, num: int) -> None:
    x, weight, bias, up = (
        torch.randn(1, rows, width),
        torch.randn(num, width),
        torch.randn(num),
        torch.randn(num, width),
    )
    assert torch.allclose(kernels.linear(x, weight), linear(x, weight), atol=1e-4)
    assert torch.allclose(kernels.linear(x, weight, bias), linear(x, weight, bias), atol=1e-4)
    x /= width**0.5
    assert torch.allclose(kernels.gated(x, weight, up), silu(linear(x, weight)) * linear(x, up), atol=1e-5)
    scale = torch.randn(width)
    assert torch.allclose(kernels.rms_norm(x, scale, 1e-6), rms_norm(x, (width,), scale, 1e-6), atol=1e-5)


def test_a_row_comes_out_the_same_whatever_else_is_in_the_batch(kernels: Kernels) -> None:
    x, weight = torch.randn(9, 70), torch.randn(33, 70)
    assert torch.equal(kernels.linear(x, weight)[3:6], kernels.linear(x[3:6], weight))


def test_what_is_no_number_stays_so_and_large_numbers_do_no_harm(kernels: Kernels) -> None:
    x = torch.tensor([[1e30, 0.0], [float("nan"), 0.0], [-1e30, 0.0], [float("inf"), 0.0]])
    one = torch.ones(3, 2)
    got = kernels.gated(x, one, one / 1e30)
    assert got[1].isnan().all()
    assert torch.allclose(got[0], torch.full((3,), 1e30)) and torch.allclose(got[2], torch.zeros(3))


@pytest.mark.parametrize("tokens", [1, 10, 300])
def test_experts(kernels: Kernels, tokens: int) -> None:
    gate_up, down, x = torch.randn(5, 24, 20) / 4, torch.randn(5, 20, 12) / 4, torch.randn(tokens, 20)
    shares, chosen = torch.rand(tokens, 4).topk(2)  # the last expert gets nothing
    expected = torch.zeros_like(x)
    for i in range(2):
        gate, up = torch.einsum("tw,tiw->ti", x, gate_up[chosen[:, i]]).chunk(2, -1)
        expected += shares[:, i, None] * torch.einsum("ti,twi->tw", silu(gate) * up, down[chosen[:, i]])
    assert torch.allclose(kernels.experts(x, chosen, shares, gate_up, down), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("width", [64, 24, 128])
def test_attention_to_what_each_row_has(kernels: Kernels, width: int, window: int | None) -> None:
    positions = torch.tensor([0, 3, 29, 7, 16])
    positions = positions * 5 + torch.tensor([0, 1, 0, 0, 0])  # over three blocks
    query, keys, values = torch.randn(5, 4, 1, width), torch.randn(16, 2, BLOCK, width), torch.randn(16, 2, BLOCK, 16)
    tables = torch.randperm(15).view(5, 3) + 1
    keys[0] = values[0] = float("nan")  # nobody reads there
    tables[0, 1:] = 0
    new, rows = torch.randn(5, 2, width), torch.arange(5)
    places = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
    kernels.keep(new, places, keys)
    assert torch.equal(keys[places // BLOCK, :, places % BLOCK], new)
    columns = torch.arange(3 * BLOCK)[None]
    seen = columns <= positions[:, None]
    if window is not None:
        seen &= columns > positions[:, None] - window
    kept = [part[tables].transpose(1, 2).flatten(2, 3).nan_to_num() for part in (keys, values)]
    expected = scaled_dot_product_attention(query, *kept, attn_mask=seen[:, None, None], scale=0.3, enable_gqa=True)
    got = kernels.attend(query, keys, values, tables, positions, window, 0.3)
    assert torch.allclose(got, expected[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("turned", [16, 8])
@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_keys_and_values_are_made_as_a_layer_makes_them(kernels: Kernels, turned: int, has_norm: bool) -> None:
    x, places, angles = torch.randn(3, 40), torch.tensor([4, BLOCK, 2 * BLOCK + 9]), torch.randn(1, 3, turned)
    weights = torch.randn(4 * 16, 40), torch.randn(2 * 16, 40), torch.randn(2 * 16, 40)
    biases = [torch.randn(len(weight)) for weight in weights]
    norms = [torch.randn(16), torch.randn(16), None] if has_norm else [None] * 3
    made = []
    for number, (weight, bias, norm) in enumerate(zip(weights, biases, norms, strict=True)):
        own = linear(x, weight, bias).unflatten(1, (-1, 16))
        own = own if norm is None else rms_norm(own, (16,), norm, 1e-6)
        if number < 2:
            first, second = own[..., :turned].chunk(2, -1)
            half = torch.cat([-second, first], -1)
            rotated = own[..., :turned] * angles.cos()[0, :, None] + half * angles.sin()[0, :, None]
            own = torch.cat([rotated, own[..., turned:]], -1)
        made.append(own)
    parts = [Projection.of(*one, width=16) for one in zip(weights, biases, norms, strict=True)]
    keys, values = torch.zeros(3, 2, BLOCK, 16), torch.zeros(3, 2, BLOCK, 16)
    query = kernels.project(x, parts, 1e-6, (angles.cos(), angles.sin()), places, keys, values)
    got = query[:, :, 0], keys[torch.arange(3), :, places % BLOCK], values[torch.arange(3), :, places % BLOCK]
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(got, made, strict=True))


@pytest.fixture
def anew() -> Iterator[None]:
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.usefixtures("anew")
def test_they_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if load_kernels() is None:
        pytest.skip("this machine's compiler will not do")
    (library,) = (tmp_path / "practicum").iterdir()
    written = library.stat().st_mtime_ns
    load_kernels.cache_clear()
    assert load_kernels() is not None and library.stat().st_mtime_ns == written


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_there_are_none_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level("INFO"):
        assert load_kernels() is None
    assert "there is no C compiler" in caplog.text
