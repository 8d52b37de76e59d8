"""The compiled NVFP4 encoder beside modelopt, to the bit: random bits of any magnitude, ties, zeros, subnormals, and
the search over block scales beside the same search by modelopt. The GPU's path with a fake for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from mkpack import nvfp4_kernel, quantize
from mkpack.formats import dequantise, e4m3_to_f32
from mkpack.quantize import SEARCH, load_modelopt, quantise, quantise_measured, tensor_error

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt")


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    assert nvfp4_kernel.nvfp4_kernel() is not None


def both(w: torch.Tensor, scale2: float, algorithm: str = "max") -> None:
    """The kernel's codes, scales and sums are modelopt's. Also of parts of a row that is no whole block."""
    n, blocks = len(w), -(-w.shape[1] // 16)
    found, expected = (
        (np.zeros((n, blocks * 8), np.uint8), np.zeros((n, blocks), np.uint8)) for _ in ("kernel", "modelopt")
    )
    search = SEARCH[algorithm]
    kernel = nvfp4_kernel.nvfp4_kernel()
    assert kernel
    error, of_max, squares = kernel(w, scale2, search, *found)
    stats = quantize._nvfp4_modelopt(w.clone(), torch.tensor(scale2), search, *expected, "cpu")
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])
    sums = pytest.approx([stats.error, stats.error_max, stats.reference], rel=1e-9)  # blocks are added in another order
    assert [error, of_max, squares] == sums
    if algorithm == "max":
        plain, scale, _ = load_modelopt().NVFP4QTensor.quantize(w.clone(), 16, None, torch.tensor(scale2))
        np.testing.assert_array_equal(found[0], plain._quantized_data.numpy())
        np.testing.assert_array_equal(found[1], scale.view(torch.uint8).numpy())


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    low=st.integers(-149, 120),
    spread=st.integers(0, 60),
    cols=st.integers(1, 70),
    bf16=st.booleans(),
    headroom=st.sampled_from([1.0, 1.0, 1.75, 1e3]),
    algorithm=st.sampled_from(["max", "mse"]),
)
def test_any_weights_give_modelopts_bits(seed, low, spread, cols, bf16, headroom, algorithm):
    rng = np.random.default_rng(seed)
    # Blocks of their own magnitude, values far below their block's, zeros of both signs, subnormals.
    exponent = np.repeat(rng.integers(low, low + spread + 1, (5, 5)), 16, axis=1)[:, :cols]
    exponent = exponent - rng.integers(0, 9, (5, cols))
    values = np.ldexp(rng.uniform(1, 2, (5, cols)), exponent) * rng.choice([-1, 1], (5, cols))
    values[rng.random((5, cols)) < 0.1] = rng.choice([0.0, -0.0])
    w = torch.from_numpy(values.clip(-3e38, 3e38).astype(np.float32))
    w = w.bfloat16() if bf16 else w
    if not w.isfinite().all():
        w = w.clamp(-1e38, 1e38)
    both(w, quantize._scale2(float(w.abs().max())) * headroom, algorithm)


@pytest.mark.parametrize("scale_code", [1, 5, 7, 8, 9, 0x38, 0x7D, 0x7E])
def test_every_tie_and_its_neighbours(scale_code):
    """Values at, just below and just above every bound between two codes, under scales from subnormal to largest."""
    step = np.float32(e4m3_to_f32(np.array([scale_code], np.uint8))[0])
    bounds = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5], np.float32) * step
    rows = []
    for one in (bounds, np.nextafter(bounds, np.float32(9e9)), np.nextafter(bounds, np.float32(-9e9))):
        rows += [np.concatenate([one, [6 * step, 0]]), np.concatenate([-one, [6 * step, -0.0]])]
    w = torch.from_numpy(np.array(rows, np.float32))
    for scale2 in (1.0, float(np.float32(1 / 3)), 2.0**-116, 2.0**100):
        both((w * scale2).contiguous(), scale2)


@pytest.mark.parametrize("bf16", [False, True])
def test_every_value_of_bfloat16_in_a_block(bf16):
    """All finite bit patterns, so that maxima round to every block scale, ties of e4m3 among them."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    w = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    w = w[w.isfinite() & (w.abs() < 2.0**100)]
    w = w[: len(w) // 64 * 64].reshape(-1, 64)
    for scale2 in (2.0**90, 1.0, float(np.float32(0.1)), 2.0**-60):
        part = w[w.float().abs().amax(1) <= 2688 * scale2]
        both(part if bf16 else part.float(), scale2)


def test_the_search_lowers_the_error_of_every_block_or_leaves_it():
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    plain, (q, error) = quantise(w, "nvfp4"), quantise_measured(w, "nvfp4", algorithm="mse")
    source = w.double().numpy()
    off, least = (np.square(dequantise(x) - source).reshape(64, 32, 16).sum(-1) for x in (plain, q))
    assert (least <= off * (1 + 1e-6)).all() and (least < off * 0.9).mean() > 0.2
    assert error.relative == pytest.approx(tensor_error(q, w).relative, rel=1e-6)
    assert error.relative_max == pytest.approx(tensor_error(plain, w).relative, rel=1e-6)
    assert error.relative < 0.083 < 0.094 < error.relative_max
    steps = q.scale.astype(int) - plain.scale
    assert steps.min() == -SEARCH["mse"][0] and steps.max() == SEARCH["mse"][1]


def test_a_machine_without_a_compiler_gets_the_same_bits(monkeypatch):
    w = torch.randn(40, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = {a: quantise(w, "nvfp4", algorithm=a) for a in SEARCH}
    monkeypatch.setenv("CXX", "/nonexistent")
    assert nvfp4_kernel.nvfp4_kernel() is None
    for algorithm, q in expected.items():
        found = quantise(w, "nvfp4", algorithm=algorithm)
        np.testing.assert_array_equal(found.data, q.data)
        np.testing.assert_array_equal(found.scale, q.scale)


def test_a_compiler_that_makes_nothing_is_done_without(tmp_path, monkeypatch):
    broken = tmp_path / "broken-cxx"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0\nexit 0\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert nvfp4_kernel.nvfp4_kernel() is None


def test_a_gpu_is_used_where_there_is_one(monkeypatch):
    """The GPU here is a name for the CPU: what is sent there, computed there and fetched back is real."""
    w = torch.randn(3000, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, error = quantise_measured(w, "nvfp4", algorithm="mse")
    sent, to = [], torch.Tensor.to

    def fake(tensor, target, *words, **keys):
        if target == "cuda":
            sent.append(tuple(tensor.shape))
            return to(tensor, "cpu", *words, **keys)
        return to(tensor, target, *words, **keys)

    monkeypatch.setattr(torch.Tensor, "to", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvfp4_kernel, "nvfp4_kernel", lambda: pytest.fail("the CPU's kernel was asked for"))
    found, gpu_error = quantise_measured(w, "nvfp4", algorithm="mse")
    np.testing.assert_array_equal(found.data, expected.data)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert gpu_error.relative == pytest.approx(error.relative, rel=1e-9)
    assert sum(shape[0] for shape in sent if shape) == 3000


def test_a_gpu_without_memory_is_done_without(monkeypatch):
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, to = quantise(w, "nvfp4"), torch.Tensor.to

    def full(tensor, target, *words, **keys):
        if target == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to(tensor, target, *words, **keys)

    monkeypatch.setattr(torch.Tensor, "to", full)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = quantise(w, "nvfp4")
    np.testing.assert_array_equal(found.data, expected.data)
    np.testing.assert_array_equal(found.scale, expected.scale)


def test_compiling_leaves_nothing_and_needs_no_modelopt(tmp_path):
    code = "import mkpack.nvfp4_kernel as k, sys; assert k.nvfp4_kernel(); assert 'modelopt' not in sys.modules"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, env=env)
    assert list(tmp_path.iterdir()) == []
