"""Payloads of quantised matrices: MXFP4 as NVFP4, exact where it can be; scales and codes that mean no weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mkpack import formats, payload
from mkpack.errors import UserError
from mkpack.formats import dequantise, e2m1_values, source_values
from mkpack.quantize import quantise, tensor_error


def nearest(value: float) -> float:
    """The e2m1 value nearest to a value, ties to the even code."""
    grid = e2m1_values()[:8]
    distance = np.abs(grid - abs(value))
    best = [i for i in range(8) if distance[i] == distance.min()]
    return float(np.copysign(grid[next((i for i in best if i % 2 == 0), best[0])], value))


@settings(max_examples=60)
@given(
    exponents=st.lists(st.integers(0, 252), min_size=4, max_size=4)
    | st.lists(st.integers(100, 130), min_size=4, max_size=4),
    zeros=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_mxfp4_is_exact_where_the_exponents_allow_and_nearest_below(exponents, zeros, seed):
    codes = np.random.default_rng(seed).integers(0, 256, (2, 32)).astype(np.uint8)  # [2, 64]: four blocks of 32
    codes = codes.reshape(4, 16)
    codes[list(zeros)] &= 0x88
    scales = np.array(exponents, np.uint8).reshape(2, 2)
    found = payload.mxfp4(codes.reshape(2, 32), scales)
    exact = e2m1_values()[np.stack([codes & 15, codes >> 4], -1).reshape(4, 32)].astype(np.float64)
    exact = exact * 2.0 ** (scales.reshape(4, 1).astype(float) - 127)
    stored = dequantise(found.q).reshape(4, 32).astype(np.float64)
    used = [e for i, e in enumerate(exponents) if i not in zeros and (codes[i] & 0x77).any()]
    top = max(used, default=127)
    step = 2.0 ** (max(top - 8, 127 - 116) - 127 - 9)  # the smallest block scale
    for block, exponent in enumerate(exponents):
        if exponent - 127 >= np.log2(step) or not exact[block].any():
            np.testing.assert_array_equal(stored[block], exact[block])
        else:
            np.testing.assert_array_equal(stored[block], [step * nearest(v / step) for v in exact[block]])
    assert (found.codes is found.q.data) == bool((stored == exact).all() or (found.codes == found.q.data).all())


def test_what_mxfp4_lost_is_measured():
    codes = np.full((1, 32), 0x77, np.uint8)  # 6 everywhere
    far = payload.mxfp4(codes, np.array([[127, 109]], np.uint8))  # 18 apart: 6/2 = 3 is a code
    assert tensor_error(far.q, far).error == 0 and far.q.data[0, 16] == 0x55
    far = payload.mxfp4(codes, np.array([[127, 107]], np.uint8))  # 20 apart: 6/8 is none
    assert 0 < tensor_error(far.q, far).relative < 1e-6
    near = payload.mxfp4(codes, np.array([[127, 110]], np.uint8))
    assert tensor_error(near.q, near).error == 0 and near.codes is near.q.data
    assert source_values(far).max() == 6 and source_values(far)[0, -1] == 6 * 2.0**-20


def test_mxfp4_that_cannot_be_built_is_refused():
    codes = np.full((1, 16), 0x11, np.uint8)
    for exponent, said in ((255, "1 of 1 block scales are NaN"), (253, "a block scale is 2^126")):
        with pytest.raises(UserError, match=f"w: {said.replace('^', '.')}"):
            payload.mxfp4(codes, np.array([[exponent]], np.uint8), name="w")


def test_decoders_agree():
    """The fast and the slow one, on every byte: a matrix [16, 32] whose codes are 0 to 255, scales of all sorts."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scale = np.arange(1, 33, dtype=np.uint8).reshape(16, 2) * 3
    for divides in (False, True):
        found = payload.nvfp4(codes, scale, np.float32(1.7), divides=divides)
        np.testing.assert_array_equal(dequantise(quantise(found, "f32")), source_values(found))
        expected = (
            formats.e4m3_to_f32(scale) / np.float32(1.7) if divides else formats.e4m3_to_f32(scale) * np.float32(1.7)
        )
        np.testing.assert_array_equal(found.factors, expected)


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0**-117, 2.0**117, np.inf, np.nan])
def test_a_scale_of_the_whole_that_is_none_is_refused(factor):
    codes, scale = np.zeros((1, 8), np.uint8), np.full((1, 1), 0x38, np.uint8)
    for divides in (False, True):
        with pytest.raises(UserError, match="^w: its scale for the whole matrix is"):
            payload.nvfp4(codes, scale, np.float32(factor), divides=divides, name="w")


def test_every_fault_of_block_scales_is_in_one_line():
    codes, scale = np.full((1, 32), 0x11, np.uint8), np.array([[0x7F, 0xFF, 0x80, 0]], np.uint8)
    with pytest.raises(UserError, match="^w: 2 of 4 block scales are NaN and 1 of 4 .* negative and 1 of 4 .* zero"):
        payload.nvfp4(codes, scale, np.float32(1), name="w")
    codes[0, 24:] = 0x08  # zero and minus zero
    assert payload.lost_blocks(codes, scale).tolist() == [[False, False, False, False]]
