"""The byte order of a tile, and blobs made of tiles. Read on the other side by csrc/cpu/tile.h.

A tile is 16 rows; lane r of every 16-lane vector is row r. Columns come in blocks of 16. DESIGN.md says it in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mkpack.blobfile import BlobFile, Seal
from mkpack.formats import QTensor
from mkpack.layout import BLOCK_COLS, TILE_ROWS, Layout, Piece, align, ceil_div, scale_floats, tile_bytes
from mkpack.spec import Format

SLAB = 1 << 20  # bytes of a matrix packed at a time: they stay in the cache between one pass and the next

# dtype of QTensor.data, stored columns a block of 16 columns takes in it, and how many share a 32-bit lane.
_STORED = {"nvfp4": (np.uint8, 8, 4), "fp8": (np.uint8, 16, 4), "bf16": (np.uint16, 16, 2), "f32": (np.float32, 16, 1)}


def pack_tiles(fmt: Format, data: np.ndarray, scale: np.ndarray | None, cols: int) -> np.ndarray:
    """Stored rows [n, stored cols] (and NVFP4 block scales [n, blocks]) -> uint8 [tiles, tile_bytes]."""
    dtype, per_block, per_lane = _STORED[fmt]
    blocks = ceil_div(cols, BLOCK_COLS)
    tiles = ceil_div(len(data), TILE_ROWS)
    rows = np.zeros((tiles * TILE_ROWS, blocks * per_block), dtype)
    rows[: len(data), : data.shape[1]] = data
    # [tile, row, block, vector] -> [tile, block, vector, row]; the values of a lane move as the 32 bits they are.
    body = rows.view(np.uint32).reshape(tiles, TILE_ROWS, blocks, per_block // per_lane).transpose(0, 2, 3, 1)
    out = np.zeros((tiles, tile_bytes(fmt, cols)), np.uint8)
    head = 0
    if fmt == "nvfp4":
        assert scale is not None
        head = align(blocks * 16, 64)
        scales = np.zeros((tiles * TILE_ROWS, blocks), np.uint8)
        scales[: len(scale)] = scale
        out[:, : blocks * 16] = scales.reshape(tiles, TILE_ROWS, blocks).transpose(0, 2, 1).reshape(tiles, -1)
    out[:, head:] = np.ascontiguousarray(body).reshape(tiles, -1).view(np.uint8)
    return out


def unpack_tiles(fmt: Format, tiles: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The inverse of pack_tiles for the first `rows` rows: (data, NVFP4 block scales or None)."""
    dtype, per_block, per_lane = _STORED[fmt]
    blocks, n = ceil_div(cols, BLOCK_COLS), len(tiles)
    head = align(blocks * 16, 64) if fmt == "nvfp4" else 0
    body = np.ascontiguousarray(tiles[:, head:]).view(dtype)
    body = body.reshape(n, blocks, per_block // per_lane, TILE_ROWS, per_lane).transpose(0, 3, 1, 2, 4)
    data = body.reshape(n * TILE_ROWS, blocks * per_block)[:rows]
    stored_cols = data.shape[1] if fmt == "nvfp4" else cols
    scale = None
    if fmt == "nvfp4":
        scale = tiles[:, : blocks * 16].reshape(n, blocks, TILE_ROWS).transpose(0, 2, 1).reshape(-1, blocks)[:rows]
        scale = np.ascontiguousarray(scale)
    return np.ascontiguousarray(data[:, :stored_cols]), scale


def _tile_scales(fmt: Format, scale2: np.ndarray, piece: Piece) -> np.ndarray:
    """float32 [tiles, scale_floats]: one value a tile for nvfp4, one a row for fp8."""
    if fmt == "nvfp4":
        return np.full((piece.tiles, 1), scale2.reshape(-1)[0], np.float32)
    rows = np.zeros(piece.tiles * TILE_ROWS, np.float32)
    rows[: piece.rows] = scale2[piece.row : piece.row + piece.rows]
    return rows.reshape(piece.tiles, TILE_ROWS)


class BlobWriter:
    """Writes every rank's blob in one pass over the tensors, in any order and by several threads at once.

    resume: what an earlier writer wrote stays, so that its tensors need not be put again.
    """

    def __init__(self, layout: Layout, paths: list[Path], resume: bool = False):
        self.layout = layout
        self._files = [BlobFile(p, layout.nbytes, resume) for p in paths]

    @property
    def blobs(self) -> int:
        """How many seals a put() gives."""
        return len(self._files)

    def put(self, tensor: str, q: QTensor, fmt: Format) -> list[Seal]:
        """Stores `q` wherever the layout keeps `tensor` in format `fmt` (a tied embedding may have two formats).
        Returns a seal for every rank, of what it got."""
        seals = [Seal() for _ in self._files]
        for section, rank, piece in self.layout.homes(tensor):
            s = self.layout.section(section)
            if s.cols == 1:
                values = q.data.reshape(-1)[piece.row : piece.row + piece.rows]
                self._put_tiles(rank, seals[rank], s.offset, piece, values, TILE_ROWS)
            elif s.format == fmt:
                self._put_matrix(section, rank, seals[rank], piece, q)
        return seals

    def holds(self, seals: list[Seal]) -> bool:
        """Whether what put() returned these for is in the blobs."""
        return len(seals) == len(self._files) and all(
            file.holds(seal) for file, seal in zip(self._files, seals, strict=True)
        )

    def _put_matrix(self, section: str, rank: int, seal: Seal, piece: Piece, q: QTensor) -> None:
        s, size = self.layout.section(section), tile_bytes(q.format, q.shape[1])
        tiles = max(SLAB // size, 1)
        for tile in range(0, ceil_div(piece.rows, TILE_ROWS), tiles):
            rows = slice(piece.row + tile * TILE_ROWS, piece.row + min((tile + tiles) * TILE_ROWS, piece.rows))
            data = pack_tiles(q.format, q.data[rows], None if q.scale is None else q.scale[rows], q.shape[1])
            at = replace(piece, tile=piece.tile + tile * piece.stride)
            self._put_tiles(rank, seal, s.offset, at, data, size)
        if n := scale_floats(q.format):
            assert q.scale2 is not None
            offset = self.layout.section(section + ".scale").offset
            self._put_tiles(rank, seal, offset, piece, _tile_scales(q.format, q.scale2, piece), n)

    def _put_tiles(self, rank: int, seal: Seal, offset: int, piece: Piece, data: np.ndarray, size: int) -> None:
        """The tiles of a piece, of `size` elements each (the last may have fewer), in a section at `offset`."""
        data = data.reshape(-1)
        step = len(data) if piece.stride == 1 else size
        for start in range(0, len(data), max(step, 1)):
            place = (piece.tile + start // size * piece.stride) * size
            self._files[rank].write(offset + place * data.itemsize, data[start : start + step], seal)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def _places(piece: Piece) -> np.ndarray:
    """Where in a vector section the rows of a piece lie: int64 [rows]."""
    row = np.arange(piece.rows)
    return (piece.tile + row // TILE_ROWS * piece.stride) * TILE_ROWS + row % TILE_ROWS


def unpack(layout: Layout, blobs: list[np.ndarray], shapes: Mapping[str, tuple[int, ...]], tensor: str) -> QTensor:
    """A canonical tensor, bit for bit as it was packed, from every rank's blob (uint8 [nbytes]).

    shapes: canonical tensor name -> shape. Raises KeyError for a tensor that the layout does not hold.
    """
    shape = shapes[tensor]
    first = layout.homes(tensor)[0][0]
    s = layout.section(first)
    if s.cols == 1:
        values = np.zeros(shape, np.float32)
        for section, rank, piece in layout.homes(tensor):
            t = layout.section(section)
            stored = blobs[rank][t.offset : t.offset + t.nbytes].view(np.float32)
            values[piece.row : piece.row + piece.rows] = stored[_places(piece)]
        return QTensor("f32", shape, values)
    dtype, per_block, _ = _STORED[s.format]
    blocks, size = ceil_div(shape[1], BLOCK_COLS), tile_bytes(s.format, shape[1])
    data = np.zeros((shape[0], blocks * per_block if s.format == "nvfp4" else shape[1]), dtype)
    scale = np.zeros((shape[0], blocks), np.uint8) if s.format == "nvfp4" else None
    scale2 = {"nvfp4": np.zeros(1, np.float32), "fp8": np.zeros(shape[0], np.float32)}.get(s.format)
    for section, rank, piece in layout.homes(tensor):
        if section != first or piece.rows == 0:
            continue
        at = s.offset + piece.tile * size
        tiles = blobs[rank][at:][: ((piece.tiles - 1) * piece.stride + 1) * size]
        tiles = np.stack([tiles[i * piece.stride * size :][:size] for i in range(piece.tiles)])
        rows = slice(piece.row, piece.row + piece.rows)
        data[rows], part = unpack_tiles(s.format, tiles, piece.rows, shape[1])
        if scale is not None and part is not None:
            scale[rows] = part
        if scale2 is not None:
            n, t = scale_floats(s.format), layout.section(section + ".scale")
            floats = blobs[rank][t.offset : t.offset + t.nbytes].view(np.float32).reshape(-1, n)
            found = floats[piece.tile : piece.tile + piece.tiles * piece.stride : piece.stride].reshape(-1)
            if s.format == "nvfp4":
                scale2[0] = found[0]
            else:
                scale2[rows] = found[: piece.rows]
    return QTensor(s.format, shape, data, scale, scale2)
