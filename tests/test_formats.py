"""Formats against independent readings of the same bits: tables by hand, torch's float8 and bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkpack import formats
from mkpack.formats import QTensor

torch = pytest.importorskip("torch")


def make(kind: str, n: int = 3, k: int = 20, **changes: object) -> QTensor:
    blocks = -(-k // 16)
    arrays = {
        "f32": dict(data=np.zeros((n, k), np.float32)),
        "bf16": dict(data=np.zeros((n, k), np.uint16)),
        "fp8": dict(data=np.zeros((n, k), np.uint8), scale2=np.ones(n, np.float32)),
        "nvfp4": dict(
            data=np.zeros((n, blocks * 8), np.uint8),
            scale=np.zeros((n, blocks), np.uint8),
            scale2=np.ones(1, np.float32),
        ),
    }[kind]
    return QTensor(**{"format": kind, "shape": (n, k), **arrays, **changes})


def test_e2m1_values():
    assert formats.e2m1_values().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert formats.e2m1_values().dtype == np.float32
    assert np.signbit(formats.e2m1_values()[8:]).all()


def test_e4m3_is_what_torch_reads():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    got = formats.e4m3_to_f32(codes.reshape(16, 16))
    assert got.shape == (16, 16) and got.dtype == np.float32
    np.testing.assert_array_equal(got.ravel(), expected)
    np.testing.assert_array_equal(np.signbit(got.ravel()[:255]), np.signbit(expected[:255]))
    assert formats.e4m3_to_f32(np.uint8([0x7E, 0x01, 0x08])).tolist() == [448.0, 2**-9, 2**-6]


def test_bf16_reads_every_pattern_as_torch_does():
    bits = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(formats.bf16_to_f32(bits).view(np.uint32), expected.view(np.uint32))


def test_every_bf16_survives_a_round_trip():
    bits = np.arange(65536, dtype=np.uint16)
    back = formats.f32_to_bf16(formats.bf16_to_f32(bits))
    nan = (bits & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    np.testing.assert_array_equal(back[nan], bits[nan] | 0x40)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_f32_to_bf16_rounds_as_torch_does(patterns: list[int]):
    values = np.array(patterns, np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = formats.f32_to_bf16(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(got[number], expected[number])
    assert np.isnan(formats.bf16_to_f32(got[~number])).all()


@pytest.mark.parametrize(
    "pattern, expected",
    [
        (0x3F808000, 0x3F80),  # half way, even below
        (0x3F818000, 0x3F82),  # half way, even above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # beyond the largest bfloat16
        (0x7F800001, 0x7FC0),  # a NaN whose payload the cut would lose
        (0xFFFFFFFF, 0xFFFF),
        (0x80000000, 0x8000),
    ],
)
def test_f32_to_bf16_edges(pattern: int, expected: int):
    assert formats.f32_to_bf16(np.array([pattern], np.uint32).view(np.float32)).tolist() == [expected]


def test_f32_to_bf16_takes_strided_and_scalar_input():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(formats.f32_to_bf16(values.T), formats.f32_to_bf16(values).T)
    assert formats.f32_to_bf16(np.float32(1)).shape == ()


def test_nvfp4_by_hand():
    data = np.zeros((2, 16), np.uint8)
    data[0, 0] = 0x2F  # column 0: code 15 = -6, column 1: code 2 = 1
    data[1, 8] = 0x07  # column 16: code 7 = 6
    scale = np.array([[0x38, 0x00], [0x00, 0x7E]], np.uint8)  # 1 and 448
    q = QTensor("nvfp4", (2, 18), data, scale, np.array([0.5], np.float32))
    expected = np.zeros((2, 18), np.float32)
    expected[0, :2] = -3, 0.5
    expected[1, 16] = 6 * 448 * 0.5
    got = formats.dequantise(q)
    np.testing.assert_array_equal(got, expected)
    assert got.shape == (2, 18) and got.dtype == np.float32 and got.flags.c_contiguous
    assert formats.nbytes(q) == 2 * 16 + 2 * 2 + 4


def test_fp8_by_hand():
    q = QTensor("fp8", (2, 2), np.array([[0x38, 0xB8], [0x7E, 1]], np.uint8), None, np.array([3, 0.25], np.float32))
    np.testing.assert_array_equal(formats.dequantise(q), np.array([[3, -3], [112, 2**-11]], np.float32))
    assert formats.nbytes(q) == 4 + 8


def test_plain_formats():
    values = np.array([[1.5, -2.0]], np.float32)
    assert formats.dequantise(QTensor("f32", (1, 2), values)).tolist() == [[1.5, -2.0]]
    assert formats.dequantise(QTensor("bf16", (1, 2), formats.f32_to_bf16(values))).tolist() == [[1.5, -2.0]]
    assert formats.nbytes(QTensor("f32", (2,), values[0])) == 8
    assert formats.nbytes(make("bf16")) == 3 * 20 * 2


@pytest.mark.parametrize("format", ["f32", "bf16", "fp8", "nvfp4"])
def test_good_arrays_are_accepted(format: str):
    assert formats.dequantise(make(format)).shape == (3, 20)


@pytest.mark.parametrize(
    "format, changes, message",
    [
        ("f32", dict(data=np.zeros((3, 20))), r"data must be float32 \[3, 20\], found float64 \[3, 20\]"),
        ("f32", dict(shape=(60,)), r"data must be float32 \[60\], found float32 \[3, 20\]"),
        ("f32", dict(shape=()), r"shape \[\], expected \[n\] or \[N, K\]"),
        ("bf16", dict(data=np.zeros((3, 20), np.int16)), "must be uint16"),
        ("bf16", dict(shape=(60,), data=np.zeros(60, np.uint16)), r"shape \[60\], expected \[N, K\]"),
        ("bf16", dict(scale2=np.ones(3, np.float32)), r"scale2 must be None, found float32 \[3\]"),
        ("fp8", dict(scale2=None), r"scale2 must be float32 \[3\], found None"),
        ("fp8", dict(scale2=np.ones(1, np.float32)), r"scale2 must be float32 \[3\], found float32 \[1\]"),
        ("nvfp4", dict(data=np.zeros((3, 10), np.uint8)), r"data must be uint8 \[3, 16\], found uint8 \[3, 10\]"),
        ("nvfp4", dict(scale=np.zeros((3, 1), np.uint8)), r"scale must be uint8 \[3, 2\]"),
        ("nvfp4", dict(scale=np.zeros((3, 2), np.float32)), "scale must be uint8"),
        ("nvfp4", dict(scale2=np.float32(1).reshape(())), r"scale2 must be float32 \[1\], found float32 \[\]"),
        ("nvfp4", dict(format="int4"), "unknown format 'int4', expected one of f32, bf16, fp8, nvfp4"),
    ],
)
def test_bad_arrays_are_refused(format: str, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(format, **changes)
