"""Tiles and blobs: every canonical tensor comes back bit for bit, and the bytes lie where the kernel looks for them."""

from __future__ import annotations

import os

import kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Weights, random_qtensor
from test_layout import FORMATS, layouts

from mkpack import formats
from mkpack.formats import QTensor
from mkpack.layout import TILE_ROWS, Layout, ceil_div, scale_floats, tile_bytes
from mkpack.pack import BlobWriter, pack_tiles, unpack, unpack_tiles

QUICK = settings(max_examples=60)


def equal(a: QTensor, b: QTensor) -> bool:
    def same(x: np.ndarray | None, y: np.ndarray | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()

    arrays = ((a.data, b.data), (a.scale, b.scale), (a.scale2, b.scale2))
    return a.format == b.format and a.shape == b.shape and all(same(x, y) for x, y in arrays)


@QUICK
@given(FORMATS, st.integers(1, 50), st.integers(1, 90), st.integers(0, 2**32))
def test_tiles_round_trip_and_pad_with_zero(fmt, rows, cols, seed):
    q = random_qtensor(np.random.default_rng(seed), fmt, (rows, cols))
    tiles = pack_tiles(fmt, q.data, q.scale, cols)
    assert tiles.shape == (ceil_div(rows, TILE_ROWS), tile_bytes(fmt, cols))
    data, scale = unpack_tiles(fmt, tiles, rows, cols)
    assert equal(q, QTensor(fmt, q.shape, data, scale, q.scale2))
    padded, padded_scale = unpack_tiles(fmt, tiles, len(tiles) * TILE_ROWS, ceil_div(cols, 16) * 16)
    assert not padded[rows:].any() and (padded_scale is None or not padded_scale[rows:].any())
    if fmt != "nvfp4":
        assert not padded[:, cols:].any()


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "nvfp4"])
def test_every_value_lies_where_the_design_says(fmt):
    """The words of DESIGN.md, one value at a time."""
    rows, cols = 37, 53
    q = random_qtensor(np.random.default_rng(5), fmt, (rows, cols))
    tiles = pack_tiles(fmt, q.data, q.scale, cols)
    blocks = ceil_div(cols, 16)
    head = ceil_div(blocks * 16, 64) * 64 if fmt == "nvfp4" else 0
    for row in range(rows):
        tile, lane = tiles[row // 16], row % 16
        for col in range(cols):
            block, c = divmod(col, 16)
            if fmt == "nvfp4":
                at = head + block * 128 + c // 8 * 64 + lane * 4
                word = int(tile[at : at + 4].view(np.uint32)[0])
                assert word >> 4 * (c % 8) & 15 == q.data[row, col // 2] >> 4 * (col % 2) & 15
                assert tile[block * 16 + lane] == q.scale[row, block]
            elif fmt == "fp8":
                assert tile[block * 256 + c // 4 * 64 + lane * 4 + c % 4] == q.data[row, col]
            elif fmt == "bf16":
                at = block * 512 + c // 2 * 64 + lane * 4 + c % 2 * 2
                assert tile[at : at + 2].view(np.uint16)[0] == q.data[row, col]
            else:
                at = block * 1024 + c * 64 + lane * 4
                assert tile[at : at + 4].view(np.float32)[0] == q.data[row, col]


@QUICK
@given(layouts(), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_blobs_give_every_tensor_back(tmp_path, layout, seed, shuffle):
    weights = Weights.random(layout, seed)
    order = list(weights.tensors)
    shuffle.shuffle(order)
    blobs = weights.blobs(tmp_path, order)
    assert [len(b) for b in blobs] == [layout.nbytes] * layout.tp
    shapes = {name: q.shape for name, q in weights.tensors.items()}
    shapes |= {r.name: r.shape for r in kernels.roles(layout.spec)}
    for name, q in weights.tensors.items():
        assert equal(unpack(layout, blobs, shapes, name), q), name
    if weights.head is not None:
        assert equal(head_of(layout, blobs), weights.head)


def head_of(layout: Layout, blobs: list[np.ndarray]) -> QTensor:
    """The second copy of a tied embedding, put together from the ranks by hand."""
    s, shape = layout.section("lm_head"), (layout.spec.vocab_size, layout.spec.hidden_size)
    data, scales, floats = [], [], []
    for rank, blob in enumerate(blobs):
        tiles = blob[s.offset : s.offset + s.nbytes].reshape(-1, tile_bytes(s.format, s.cols))
        rows = layout.pieces("lm_head", rank)[0].rows
        part, scale = unpack_tiles(s.format, tiles, rows, s.cols)
        data.append(part)
        scales.append(scale)
        if n := scale_floats(s.format):
            t = layout.section("lm_head.scale")
            floats.append(blob[t.offset : t.offset + t.nbytes].view(np.float32).reshape(-1, n).reshape(-1)[:rows])
    scale2 = np.concatenate(floats) if floats else None
    if s.format == "nvfp4":
        assert scale2 is not None and (scale2 == scale2[0]).all()
        scale2 = scale2[:1]
    return QTensor(
        s.format,
        shape,
        np.concatenate(data).astype(data[0].dtype),
        np.concatenate(scales) if scales[0] is not None else None,
        scale2,
    )


@QUICK
@given(layouts())
def test_bytes_that_belong_to_no_tensor_are_zero(tmp_path, layout):
    """Padding of rows, tiles and sections."""
    blobs = Weights.random(layout).blobs(tmp_path)
    for rank, blob in enumerate(blobs):
        used = np.zeros(layout.nbytes, bool)
        for s in layout.sections:
            used[s.offset : s.offset + s.nbytes] = True
            if s.cols == 1:
                continue
            tiles = blob[s.offset : s.offset + s.nbytes].reshape(-1, tile_bytes(s.format, s.cols))
            filled = np.zeros((len(tiles), TILE_ROWS), bool)
            for piece in layout.pieces(s.name, rank):
                rows = np.arange(piece.tiles * TILE_ROWS).reshape(-1, TILE_ROWS) < piece.rows
                filled[piece.tile : piece.tile + piece.tiles * piece.stride : piece.stride] = rows
            data, scale = unpack_tiles(s.format, tiles, len(tiles) * TILE_ROWS, s.cols)
            assert not data[~filled.reshape(-1)].any()
            assert scale is None or not scale[~filled.reshape(-1)].any()
        assert not blob[~used].any()


def test_rows_of_the_biases_follow_their_heads(tmp_path):
    spec = kernels.tiny_spec(qkv_bias=True, head_dim=6, num_attention_heads=6, num_key_value_heads=3)
    layout = Layout(spec, kernels.precision("bf16"), 3)
    weights = Weights.random(layout)
    blobs = weights.blobs(tmp_path)
    s = layout.section("layers.1.qkv_bias")
    for rank, blob in enumerate(blobs):
        values = blob[s.offset : s.offset + s.nbytes].view(np.float32)
        q, k, v = (weights.tensors[f"layers.1.{x}_bias"].data for x in "qkv")
        expected = np.zeros(48, np.float32)
        expected[:12] = q[rank * 12 : rank * 12 + 12]
        expected[16:22] = k[rank * 6 : rank * 6 + 6]
        expected[32:38] = v[rank * 6 : rank * 6 + 6]
        assert (values == expected).all()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    """The system may write less than it was asked to."""
    layout = Layout(kernels.tiny_spec(), kernels.precision("nvfp4"), 2)
    weights = Weights.random(layout)
    (tmp_path / "whole").mkdir()
    whole = weights.blobs(tmp_path / "whole")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(1, len(data) // 2)], at))
    (tmp_path / "short").mkdir()
    short = weights.blobs(tmp_path / "short")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(whole, short, strict=True))


def test_a_file_that_was_there_is_replaced(tmp_path):
    layout = Layout(kernels.tiny_spec(), kernels.precision("bf16"))
    path = tmp_path / "blob"
    path.write_bytes(b"\xff" * (layout.nbytes + 999))
    with BlobWriter(layout, [path]):
        pass
    assert path.read_bytes() == bytes(layout.nbytes)


def test_unpacked_values_are_what_was_meant(tmp_path):
    layout = Layout(kernels.tiny_spec(), kernels.precision("nvfp4", attention="fp8"), 2)
    weights = Weights.random(layout)
    blobs = weights.blobs(tmp_path)
    shapes = {r.name: r.shape for r in kernels.roles(layout.spec)}
    for name in ("embed", "layers.0.k", "layers.1.experts.3.up", "final_norm"):
        found = formats.dequantise(unpack(layout, blobs, shapes, name))
        assert (found == formats.dequantise(weights.tensors[name])).all()
    with pytest.raises(KeyError, match="layers.7.q"):
        unpack(layout, blobs, {**shapes, "layers.7.q": (2, 2)}, "layers.7.q")
