"""Products of packed tiles against numpy: the exact order of summation that DESIGN.md writes down."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import kernels
import numpy as np
import pytest
from kernels import random_qtensor

from mkpack import compile, formats, platform
from mkpack.formats import QTensor
from mkpack.pack import pack_tiles

FORMATS = ("f32", "bf16", "fp8", "nvfp4")  # in the order of mk::Fmt
PROGRAM = r"""
#include "cpu/tile.h"
using namespace mk;
template <class Use> static void with(int fmt, Use use) {
  switch (static_cast<Fmt>(fmt)) {
    case Fmt::f32: return use.template operator()<Fmt::f32>();
    case Fmt::bf16: return use.template operator()<Fmt::bf16>();
    case Fmt::fp8: return use.template operator()<Fmt::fp8>();
    case Fmt::nvfp4: return use.template operator()<Fmt::nvfp4>();
  }
}
extern "C" {
int slots(int tokens) { return round_tokens(tokens); }
void dot(int fmt, int ld, const uint8_t* tile, int blocks, const float* x, float* out) {
  with(fmt, [&]<Fmt F>() { tile_dot<F>(ld, tile, blocks, x, out); });
}
void row(int fmt, const uint8_t* matrix, const float* scales, long row, int blocks, float* out) {
  with(fmt, [&]<Fmt F>() { decode_row<F>(matrix, scales, row, blocks, out); });
}
void exponential(const float* x, float* out) { store(out, vexp(load(x))); }
void sums(const float* x, float* out) { out[0] = hsum(load(x)); out[1] = hmax(load(x)); }
void keep(const float* x, int from, int to, float other, float* out) {
  store(out, keep_lanes(load(x), from, to, other));
}
}
"""
if not kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)


@pytest.fixture(scope="module", params=kernels.TARGETS)
def lib(request, tmp_path_factory):
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("tile")
    (folder / "tile.cpp").write_text(PROGRAM)
    target = [f"-march={request.param}", *(["-mprefer-vector-width=512"] if request.param == "x86-64-v4" else [])]
    flags = [f for f in compile.CPU_FLAGS if f != "-fvisibility=hidden"]
    command = [*compiler.command, *flags, *target, f"-I{compile.sources()}", "tile.cpp", "-o", "tile.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "tile.so"))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes, as tiles and activations do."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 fused multiply-add, rounded once: the float64 sum is rounded to odd before it is rounded to float32."""
    product = a.astype(np.float64) * b  # exact
    c = c.astype(np.float64)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)  # exactly what the sum left out
    bits = total.view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def codes_of(q: QTensor) -> np.ndarray:
    """[16, blocks, 16] float32: what a tile's codes mean before any scale, missing columns zero."""
    rows, cols = q.shape
    blocks = -(-cols // 16)
    if q.format == "nvfp4":
        return formats.e2m1_values()[np.stack([q.data & 15, q.data >> 4], -1)].reshape(rows, blocks, 16)
    values = {"f32": lambda d: d, "bf16": formats.bf16_to_f32, "fp8": formats.e4m3_to_f32}[q.format](q.data)
    return np.pad(values, ((0, 0), (0, blocks * 16 - cols))).reshape(rows, blocks, 16)


def documented(q: QTensor, x: np.ndarray) -> np.ndarray:
    """[tokens, 16] of a tile and x [tokens, blocks, 16], summed as DESIGN.md ("Numbers") says, unscaled."""
    codes = codes_of(q)
    rows = np.zeros((len(x), 16), np.float32)
    for b in range(codes.shape[1]):
        block = np.zeros_like(rows)
        for k in range(16):
            block = fma(codes[None, :, b, k], x[:, b, k, None], block)
        if q.format == "nvfp4":
            rows = fma(formats.e4m3_to_f32(q.scale[:, b])[None, :], block, rows)
        else:
            rows = rows + block
    return rows


def product(lib: ctypes.CDLL, q: QTensor, x: np.ndarray) -> np.ndarray:
    """[tokens, 16] by the kernel; slots beyond the tokens hold rubbish."""
    tokens, blocks, _ = x.shape
    ld = lib.slots(tokens)
    slots = np.full((blocks, ld, 16), np.nan, np.float32)
    slots[:, :tokens] = x.transpose(1, 0, 2)
    tile = pack_tiles(q.format, q.data, q.scale, q.shape[1])
    tile, slots, out = aligned(tile), aligned(slots), aligned(np.full((ld, 16), np.nan, np.float32))
    lib.dot(FORMATS.index(q.format), ld, pointer(tile), blocks, pointer(slots), pointer(out))
    return out[:tokens]


def test_the_twin_rounds_once():
    """The sum is a hair below the middle of two float32 values; float64 rounds it into the middle, then up."""
    a, b, c = (np.array([v], np.float32) for v in (2**-12 * (1 + 2**-20), 2**-12 * (1 - 2**-20), 1 + 2**-23))
    assert np.float32(a.astype(np.float64) * b + c) == np.float32(1 + 2**-22)
    assert fma(a, b, c) == c


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 48, 72, 80, 100, 304])
def test_the_documented_order_to_the_last_bit(lib, fmt, cols):
    rng = np.random.default_rng(cols)
    for tokens in range(1, 17):
        q = random_qtensor(rng, fmt, (16, cols))
        x = (rng.standard_normal((tokens, -(-cols // 16), 16)) * 2.0 ** rng.integers(-8, 8)).astype(np.float32)
        found = product(lib, q, x)
        assert (found == documented(q, x)).all(), (fmt, cols, tokens)
        scale = np.ones(16) if q.scale2 is None else np.broadcast_to(q.scale2, 16)
        truth = formats.dequantise(q).astype(np.float64) @ x.reshape(tokens, -1)[:, :cols].T.astype(np.float64)
        size = np.abs(formats.dequantise(q)) @ np.abs(x.reshape(tokens, -1)[:, :cols].T)
        assert (np.abs(found.T * scale[:, None] - truth) <= 1e-6 * size + 1e-30).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_token_is_the_same_in_every_group(lib, fmt):
    rng = np.random.default_rng(1)
    q = random_qtensor(rng, fmt, (16, 208))
    x = rng.standard_normal((16, 13, 16)).astype(np.float32)
    alone = np.concatenate([product(lib, q, x[t : t + 1]) for t in range(16)])
    for tokens in range(1, 17):
        assert product(lib, q, x[16 - tokens :]).tobytes() == alone[16 - tokens :].tobytes()


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_every_code_means_what_the_formats_say(lib, fmt):
    """Column 0 times one: all e4m3 codes but NaN, all e2m1 codes with all block scales."""
    one = np.zeros((1, 1, 16), np.float32)
    one[0, 0, 0] = 1
    if fmt == "fp8":
        codes = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
        codes = np.resize(codes, (16, 16, 1))
        tensors = [QTensor("fp8", (16, 1), c, None, np.ones(16, np.float32)) for c in codes]
    else:
        scales = np.resize(np.arange(0x7F, dtype=np.uint8), (8 * 16, 16, 1))
        data = np.zeros((8 * 16, 16, 8), np.uint8)
        data[:, :, 0] = np.repeat(np.arange(16), 8)[:, None]
        one_scale = np.ones(1, np.float32)
        tensors = [QTensor("nvfp4", (16, 1), d, s, one_scale) for d, s in zip(data, scales, strict=True)]
    for q in tensors:
        assert (product(lib, q, one)[0] == formats.dequantise(q)[:, 0]).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_the_embedding_are_exact(lib, fmt):
    rng = np.random.default_rng(2)
    q = random_qtensor(rng, fmt, (37, 53))
    tiles = aligned(pack_tiles(fmt, q.data, q.scale, 53))
    scales = np.ones(48, np.float32)
    if fmt == "fp8":
        scales[:37] = q.scale2
    elif fmt == "nvfp4":
        scales[:] = q.scale2
    truth = formats.dequantise(q)
    out = aligned(np.zeros(64, np.float32))
    for row in range(37):
        lib.row(FORMATS.index(fmt), pointer(tiles), pointer(scales), ctypes.c_long(row), 4, pointer(out))
        assert (out[:53] == truth[row]).all() and not out[53:].any()


def test_exponential(lib):
    x = np.concatenate([np.linspace(-87, 88, 16 * 2000), [-88, -1000, -np.inf, 0, -0.0, 100, np.inf, np.nan] * 2])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    for at in range(0, len(x), 16):
        lib.exponential(pointer(x[at:]), pointer(out[at:]))
    truth = np.exp(x[:-16].astype(np.float64))
    assert (np.abs(out[:-16] - truth) <= 1.5 * np.spacing(truth.astype(np.float32))).all()
    assert out[-16:-13].tolist() == [0, 0, 0] and out[-13:-11].tolist() == [1, 1]
    assert np.isfinite(out).all()  # above 88 it stays there


def test_sums_and_lanes(lib):
    rng = np.random.default_rng(3)
    for _ in range(50):
        x = rng.standard_normal(16).astype(np.float32)
        out = np.zeros(2, np.float32)
        lib.sums(pointer(x), pointer(out))
        tree = x
        while len(tree) > 1:
            tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
        assert out[0] == tree[0] and out[1] == x.max()
    for start in range(17):
        for end in range(start, 17):
            kept = np.zeros(16, np.float32)
            lib.keep(pointer(x), start, end, ctypes.c_float(-np.inf), pointer(kept))
            lanes = np.arange(16)
            assert (kept == np.where((lanes >= start) & (lanes < end), x, -np.inf)).all()


def test_both_targets_were_built(tmp_path):
    """The AVX2 path is what a v3 build has: a compiler default may not bring AVX-512 in."""
    compiler = platform.compiler()
    assert compiler is not None
    text = '#include "cpu/tile.h"\nstatic_assert(mk::kLanes == LANES);\n'
    Path(tmp_path / "lanes.cpp").write_text(text)
    for target, lanes in (("x86-64-v3", 8), ("x86-64-v4", 16)):
        command = [*compiler.command, "-std=c++20", f"-march={target}", f"-DLANES={lanes}", "-fsyntax-only"]
        subprocess.run([*command, f"-I{compile.sources()}", str(tmp_path / "lanes.cpp")], check=True)
