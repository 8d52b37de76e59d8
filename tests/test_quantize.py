"""The quantiser against modelopt's plain call, a numpy encoder written from the format, and hostile values."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from mkpack import formats
from mkpack.errors import UserError
from mkpack.formats import dequantise
from mkpack.quantize import MAX_CHUNK, MIN_SCALE2, ErrorStats, load_modelopt, quantise, tensor_error, tensor_scale

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gaussian(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nearest_code(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, a tie to the even index, the last for anything larger."""
    distance = np.abs(values.astype(np.float64)[..., None] - table.astype(np.float64))
    low = distance.argmin(-1)  # the lower index of a tie
    high = table.size - 1 - distance[..., ::-1].argmin(-1)
    return np.where(low % 2 == 0, low, high)


def encode_nvfp4(w: np.ndarray, scale2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """data and scale of a float32 [N, K] tensor, from the definition of the format."""
    n, k = w.shape
    blocks = -(-k // 16)
    w = np.pad(w, ((0, 0), (0, blocks * 16 - k))).reshape(n, blocks, 16)
    e4m3 = formats.e4m3_to_f32(np.arange(127, dtype=np.uint8))
    wanted = np.abs(w).max(-1) / (np.float32(6) * scale2)
    wanted[wanted == 0] = 1
    scale = nearest_code(np.clip(wanted, 2.0**-9, 448), e4m3).astype(np.uint8)
    scaled = w / (e4m3[scale] * scale2)[..., None]
    codes = nearest_code(np.abs(scaled), formats.e2m1_values()[:8]) + 8 * (scaled < 0)
    codes = codes.reshape(n, -1).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


def assert_sound(q: formats.QTensor) -> np.ndarray:
    """No NaN, Inf or zero scale anywhere; returns the values."""
    for codes in [q.scale] if q.scale is not None else []:
        values = formats.e4m3_to_f32(codes)
        assert np.isfinite(values).all() and (values > 0).all()
    if q.scale2 is not None:
        assert np.isfinite(q.scale2).all() and (q.scale2 >= MIN_SCALE2).all()
    values = dequantise(q)
    assert np.isfinite(values).all()
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 16), (5, 7), (33, 200), (2 * MAX_CHUNK // 1024 + 3, 1024)])
def test_nvfp4_is_modelopts_whole_tensor_call_and_the_numpy_twin(shape: tuple[int, int], dtype: torch.dtype):
    w = gaussian(*shape, dtype=dtype) * 0.02
    q = quantise(w, "nvfp4")
    whole, scale, scale2 = load_modelopt().NVFP4QTensor.quantize(w.clone(), 16)
    np.testing.assert_array_equal(q.data, whole._quantized_data.numpy())
    np.testing.assert_array_equal(q.scale, scale.view(torch.uint8).numpy())
    assert q.scale2.tolist() == [scale2.item()]

    values = w.float().numpy()
    twin_scale2 = np.abs(values).max() / np.float32(2688)
    data, scale = encode_nvfp4(values[:64], twin_scale2)
    assert q.scale2[0] == twin_scale2
    np.testing.assert_array_equal(q.data[:64], data)
    np.testing.assert_array_equal(q.scale[:64], scale)


def test_nvfp4_rounds_ties_to_even():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    w = torch.cat([ties, -ties])[None] * 448  # block scale 448 and scale2 1
    rounded = [0.0, 1, 1, 2, 2, 4, 4, 6]
    q = quantise(w, "nvfp4")
    assert q.scale2[0] == 1 and q.scale.tolist() == [[0x7E]]
    assert dequantise(q)[0].tolist() == [448 * x for x in rounded] + [-448 * x for x in rounded]


def test_a_group_shares_its_scale():
    gate, up = gaussian(8, 32, seed=1), gaussian(8, 32, seed=2) * 3
    joint = tensor_scale(gate, up)
    assert joint == np.float32(up.abs().max()) / np.float32(2688) == tensor_scale(up)
    q = quantise(gate, "nvfp4", scale2=joint)
    assert q.scale2.tolist() == [joint]
    data, scale = encode_nvfp4(gate.numpy(), np.float32(joint))
    np.testing.assert_array_equal(q.data, data)
    np.testing.assert_array_equal(q.scale, scale)


@pytest.mark.parametrize("scale2", [tensor_scale(torch.ones(1, 16)) / 2, 0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_hold_the_tensor_is_refused(scale2: float):
    with pytest.raises(ValueError, match="w: scale2 .* cannot express values up to 1"):
        quantise(torch.ones(2, 16), "nvfp4", name="w", scale2=scale2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (9, 50), (2 * MAX_CHUNK // 1024 + 3, 1024)])
def test_fp8_is_the_nearest_e4m3_of_every_row(shape: tuple[int, int], dtype: torch.dtype):
    w = gaussian(*shape, dtype=dtype)
    q = quantise(w, "fp8")
    values = w.float().numpy()
    scale2 = np.abs(values).max(1) / np.float32(448)
    np.testing.assert_array_equal(q.scale2, scale2)
    e4m3 = formats.e4m3_to_f32(np.arange(127, dtype=np.uint8))
    scaled = values[:40] / scale2[:40, None]
    codes = nearest_code(np.abs(scaled), e4m3) + 128 * np.signbit(scaled)
    np.testing.assert_array_equal(q.data[:40], codes)


def test_bf16_and_f32_are_exact_or_nearest():
    w = gaussian(7, 33)
    np.testing.assert_array_equal(quantise(w, "bf16").data, formats.f32_to_bf16(w.numpy()))
    for dtype in DTYPES:
        w = gaussian(7, 33, dtype=dtype)
        np.testing.assert_array_equal(dequantise(quantise(w, "f32")), w.float().numpy())
    w = gaussian(7, 33, dtype=torch.bfloat16)
    np.testing.assert_array_equal(dequantise(quantise(w, "bf16")), w.float().numpy())
    assert quantise(gaussian(5), "f32").shape == (5,)


def test_layout_in_memory_does_not_matter():
    w = gaussian(64, 48)
    for fmt in ("f32", "bf16", "fp8", "nvfp4"):
        plain = quantise(w, fmt)
        strided = quantise(torch.nn.Parameter(w.t().contiguous().t()), fmt)
        np.testing.assert_array_equal(plain.data, strided.data)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_zero_tensors_and_zero_rows(fmt: str):
    zero = quantise(torch.zeros(4, 40), fmt)
    assert not zero.data.any() and not assert_sound(zero).any()
    w = gaussian(4, 40)
    w[1] = 0
    w[2, 16:32] = 0
    values = assert_sound(quantise(w, fmt))
    assert not values[1].any() and not values[2, 16:32].any() and values[0].any()


def test_scale_of_zeros_is_usable():
    assert tensor_scale(torch.zeros(2, 16)) == 1.0
    assert tensor_scale(torch.zeros(2, 16), torch.ones(2, 16)) == tensor_scale(torch.ones(2, 16))


def test_the_source_is_left_alone():
    w = gaussian(8, 32)
    before = w.clone()
    for fmt in ("f32", "bf16", "fp8", "nvfp4"):
        tensor_error(quantise(w, fmt), w)
    assert torch.equal(w, before)


@settings(max_examples=60)
@given(
    exponents=st.lists(st.integers(-149, 127), min_size=6, max_size=6),
    fmt=st.sampled_from(["fp8", "nvfp4"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_huge_and_tiny_blocks_survive(exponents: list[int], fmt: str, dtype: torch.dtype, seed: int):
    """2 x 3 blocks, each of its own magnitude, from the smallest subnormal to the largest float."""
    unit = gaussian(2, 3, 16, seed=seed).clamp(-1.99, 1.99).double()
    w = unit * (2.0 ** torch.tensor(exponents, dtype=torch.float64).reshape(2, 3, 1))
    w = w.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype).reshape(2, 48)
    q = quantise(w, fmt)
    values = assert_sound(q)
    # A value is off by at most half a step of the coarsest code (a sixth of the block's maximum for e2m1, 1/28 of the
    # row's for e4m3) and of the block scale (1/16), or by half the smallest step the scale allows.
    source = w.double().numpy().reshape(2, 3, 16)
    error = np.abs(values.reshape(2, 3, 16) - source)
    if fmt == "nvfp4":
        bound = np.abs(source).max(-1, keepdims=True) / 4 + float(q.scale2[0]) * 2.0**-9
    else:
        bound = np.abs(source) / 16 + q.scale2.astype(np.float64)[:, None, None] * 2.0**-10
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    "amax", [1e-45, 1e-40, 1e-38, 1e-36, 1e-33, 3e-32, 1e-30, 1e30, float(np.finfo(np.float32).max)]
)
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_extreme_tensors(amax: float, fmt: str):
    w = gaussian(3, 32).clamp(-1, 1) * amax
    w[0, 0] = -amax
    q = quantise(w, fmt)
    values = assert_sound(q)
    if amax > 1e-36:  # below, less than a step of the smallest scale is left
        assert tensor_error(q, w).relative < 0.15
        assert values[0, 0] == pytest.approx(-amax, rel=0.07)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(fmt: str, bad: float):
    w = gaussian(4, 32, dtype=torch.bfloat16)
    expected = quantise(w, fmt)
    broken = w.clone()
    broken[2, 17] = bad
    broken[3, 1] = bad
    message = r"layers\.0\.q: 2 of 128 values are NaN or Inf, the first at \[2, 17\]"
    with pytest.raises(UserError, match=message):
        quantise(broken, fmt, name="layers.0.q")
    with pytest.raises(UserError, match=message):
        tensor_scale(w, broken, names=["other", "layers.0.q"])
    # A failure leaves nothing behind that changes a later result.
    again = quantise(w, fmt)
    np.testing.assert_array_equal(again.data, expected.data)


def test_other_mistakes_are_named():
    with pytest.raises(UserError, match="w: dtype is float8_e4m3fn, expected float32, float16 or bfloat16"):
        quantise(torch.zeros(2, 16).to(torch.float8_e4m3fn), "nvfp4", name="w")
    with pytest.raises(UserError, match="w: its largest value, 3.4028e[+]38, is beyond bfloat16"):
        quantise(torch.full((2, 2), 3.4028e38), "bf16", name="w")
    with pytest.raises(ValueError, match=r"w: nvfp4 needs a matrix, found shape \[16\]"):
        quantise(torch.zeros(16), "nvfp4", name="w")
    with pytest.raises(ValueError, match="w: fp8 has no tensor scale"):
        quantise(torch.zeros(2, 16), "fp8", name="w", scale2=1.0)
    with pytest.raises(ValueError, match=r"stored tensor of shape \[2, 16\] beside a source of shape \[16, 2\]"):
        tensor_error(quantise(torch.zeros(2, 16), "f32"), torch.zeros(16, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(7, 50), (2 * MAX_CHUNK // 1024 + 3, 1024)])
def test_error_statistics_are_those_of_the_slow_decoder(fmt: str, shape: tuple[int, int], dtype: torch.dtype):
    w = gaussian(*shape, dtype=dtype)
    q = quantise(w, fmt)
    source = w.double().numpy()
    expected = ((dequantise(q).astype(np.float64) - source) ** 2).sum()
    stats = tensor_error(q, w)
    assert stats.error == pytest.approx(expected, rel=1e-4)
    assert stats.reference == pytest.approx((source**2).sum(), rel=1e-4)
    assert stats.relative == pytest.approx(np.sqrt(expected / (source**2).sum()), rel=1e-4)


def test_error_of_gaussian_weights_is_what_the_formats_give():
    w = gaussian(256, 512)
    assert tensor_error(quantise(w, "nvfp4"), w).relative == pytest.approx(0.095, abs=0.002)
    assert tensor_error(quantise(w, "fp8"), w).relative == pytest.approx(0.0265, abs=0.001)


def test_error_statistics_add_up():
    total = ErrorStats()
    for i, size in enumerate((1e-25, 1.0, 1e30)):  # the squares of the outer two do not fit a float32
        w = gaussian(4, 32, seed=i) * size
        stats = tensor_error(quantise(w, "nvfp4"), w)
        assert 0.05 < stats.relative < 0.15
        total += stats
    assert total.reference == pytest.approx(stats.reference)
    assert ErrorStats().relative == 0.0
    assert ErrorStats(1.0, 0.0).relative == float("inf")
    assert (ErrorStats(1.0, 2.0) + ErrorStats(3.0, 14.0)).relative == 0.5
    vector = gaussian(300)
    assert tensor_error(quantise(vector, "f32"), vector) == ErrorStats(
        0.0, pytest.approx(float((vector.double() ** 2).sum()))
    )


def test_modelopt_is_imported_quietly_and_only_when_needed():
    code = (
        "import sys, mkpack.quantize as q; assert not {'torch', 'modelopt'} & sys.modules.keys();"
        "import torch; q.quantise(torch.ones(2, 2), 'bf16'); assert 'modelopt' not in sys.modules;"
        "assert q.load_modelopt() is q.load_modelopt()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_results_are_the_same_on_any_number_of_cpus():
    code = (
        "import os, sys; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:int(sys.argv[1])]);"
        "import torch, mkpack.quantize as q; before = torch.get_num_threads();"
        "w = torch.randn(700, 512, generator=torch.Generator().manual_seed(0));"
        "s = q.tensor_error(q.quantise(w, 'bf16'), w); print(s.error.hex(), s.reference.hex());"
        "assert torch.get_num_threads() == before"
    )
    one, two = (
        subprocess.run([sys.executable, "-c", code, n], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        for n in ("1", "2")
    )
    assert one.stdout == two.stdout != ""


def test_absent_modelopt_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    load_modelopt.cache_clear()
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization.qtensor", None)
    with pytest.raises(UserError, match=r"(?s)needs torch and nvidia-modelopt.*pip install 'mkpack\[build\]'"):
        quantise(torch.ones(2, 16), "fp8")
    monkeypatch.undo()
    assert assert_sound(quantise(torch.ones(2, 16), "fp8")).all()
