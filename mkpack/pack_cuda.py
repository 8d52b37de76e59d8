"""The byte order of the CUDA blob: `QTensor` <-> bytes (numpy). Read on the other side by csrc/cuda/layout.cuh.

A bf16 page is 8 rows x 1024 columns, an NVFP4 tile 16 rows x K columns; docs/CUDA.md has both in words.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import numpy as np

from mkpack.formats import QTensor
from mkpack.layout_cuda import CHUNK, EXPERTS, PAGE_COLUMNS, PAGE_ROWS, CudaLayout, tile_bytes
from mkpack.spec import Format

_NAME = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(\w+)")
_SLAB = 4096  # rows packed at a time: bounds the scratch of a matrix as large as the head
_RUN = np.dtype("V64")  # 64 bytes that stay together, the unit in which pages and tiles are reordered


def pack_pages(data: np.ndarray) -> np.ndarray:
    """bf16 bits uint16 [rows, K] -> uint8 [rows * K * 2]: pages in row unit order, then along K."""
    rows, cols = data.shape
    # Runs of 32 columns: [unit, row, page of K, warp, half] -> [unit, page of K, warp, half, row]
    runs = data.view(_RUN).reshape(rows // PAGE_ROWS, PAGE_ROWS, cols // PAGE_COLUMNS, 16, 2)
    return np.ascontiguousarray(runs.transpose(0, 2, 3, 4, 1)).reshape(-1).view(np.uint8)


def unpack_pages(pages: np.ndarray, cols: int) -> np.ndarray:
    """The inverse of pack_pages: uint16 [rows, cols]."""
    runs = pages.view(_RUN).reshape(-1, cols // PAGE_COLUMNS, 16, 2, PAGE_ROWS).transpose(0, 4, 1, 2, 3)
    return np.ascontiguousarray(runs).reshape(-1).view(np.uint16).reshape(-1, cols)


def code_bits(row: int, column: int, code: np.ndarray) -> np.ndarray:
    """Codes uint32 of (row of a tile, column) in place inside their 32-bit word: layout.cuh, tile_code_bits."""
    slot, half = row // 8 + 2 * (column % 4 // 2), 16 * (column % 2)
    sign, magnitude = ((15, 6), (12, 3), (14, 9), (13, 0))[slot]
    return code >> 3 << (half + sign) | (code & 7) << (half + magnitude)


@cache
def _word_tables() -> tuple[np.ndarray, np.ndarray]:
    """uint32 [65536] for rows g and g + 8 of a tile: four neighbouring codes, as a QTensor holds them in 16 bits, in
    place inside their word."""
    four = np.arange(1 << 16, dtype=np.uint32)
    columns = [four >> 4 * column & 15 for column in range(4)]
    words = np.zeros((2, 1 << 16), np.uint32)
    for column, codes in enumerate(columns):
        words[0] |= code_bits(0, column, codes)
        words[1] |= code_bits(8, column, codes)
    return words[0], words[1]


@cache
def _code_table() -> np.ndarray:
    """uint32 [65536]: a half-word of even columns -> the codes of row g in the low 16 bits, of row g + 8 above, where a
    QTensor has its even columns. A half-word of odd columns gives the same, four bits too low."""
    table = np.zeros(1 << 16, np.uint32)
    for row, tables in ((0, _word_tables()[0]), (8, _word_tables()[1])):
        even = np.arange(1 << 16, dtype=np.uint32) & 0x0F0F
        mask = code_bits(row, 0, np.full(1, 15, np.uint32)) | code_bits(row, 2, np.full(1, 15, np.uint32))
        back = np.zeros(1 << 16, np.uint32)
        back[tables[even]] = even
        table |= back[np.arange(1 << 16, dtype=np.uint32) & mask] << 2 * row
    return table


def pack_nvfp4(low: QTensor, high: QTensor) -> np.ndarray:
    """uint8 [tiles, tile_bytes]: rows 0..7 of tile u are rows 8 u .. of `low`, rows 8..15 the same rows of `high`."""
    cols = low.shape[1]
    tiles, chunks = low.shape[0] // 8, cols // CHUNK
    first, second = _word_tables()
    out = np.empty((tiles, tile_bytes(cols)), np.uint8)
    assert low.scale is not None and high.scale is not None
    # [tile, row, chunk, 16 words] -> [tile, chunk, row, 16 words]
    words = first[low.data.view(np.uint16)]
    words |= second[high.data.view(np.uint16)]
    runs = words.view(_RUN).reshape(tiles, 8, chunks).transpose(0, 2, 1)
    out[:, : chunks * 512].view(_RUN).reshape(tiles, chunks, 8)[...] = runs
    # [tile, row, chunk, t], twice -> [tile, chunk, row, t, low or high]
    scales = np.stack([q.scale.reshape(tiles, 8, chunks, 4) for q in (low, high)], -1)  # type: ignore[union-attr]
    out[:, chunks * 512 :] = scales.transpose(0, 2, 1, 3, 4).reshape(tiles, -1)
    return out


def unpack_nvfp4(tiles: np.ndarray, cols: int, scale2: np.ndarray) -> tuple[QTensor, QTensor]:
    """The inverse of pack_nvfp4: (low, high), both with the tensor scale float32 [1]."""
    n, chunks = len(tiles), cols // CHUNK
    runs = np.ascontiguousarray(tiles[:, : chunks * 512]).view(_RUN).reshape(n, chunks, 8).transpose(0, 2, 1)
    words = np.ascontiguousarray(runs).reshape(-1).view(np.uint32)
    codes = _code_table()[words & 0xFFFF] | _code_table()[words >> 16] << 4
    scales = tiles[:, chunks * 512 :].reshape(n, chunks, 8, 4, 2).transpose(4, 0, 2, 1, 3).reshape(2, n * 8, -1)
    found = []
    for half, scale in zip((codes & 0xFFFF, codes >> 16), scales, strict=True):
        data = half.astype(np.uint16).view(np.uint8).reshape(n * 8, cols // 2)
        found.append(QTensor("nvfp4", (n * 8, cols), data, np.ascontiguousarray(scale), scale2))
    return found[0], found[1]


def _halves(q: QTensor) -> tuple[QTensor, QTensor]:
    """Rows 0..7 of every 16, and rows 8..15."""
    assert q.scale is not None

    def half(i: int) -> QTensor:
        data, scale = (
            np.ascontiguousarray(a.reshape(-1, 2, 8, a.shape[1])[:, i]).reshape(-1, a.shape[1])
            for a in (q.data, q.scale)
            if a is not None
        )
        return QTensor("nvfp4", (q.shape[0] // 2, q.shape[1]), data, scale, q.scale2)

    return half(0), half(1)


class CudaBlobWriter:
    """Writes the CUDA blob in one pass over the tensors; the counterpart of pack.BlobWriter.

    An expert's gate and up share tiles, so the first of the two waits in memory for the other. Norms and scales are
    written when the `with` block that holds the writer ends without an error.
    """

    def __init__(self, layout: CudaLayout, path: Path) -> None:
        self.layout = layout
        layers = len(layout.spec.layers)
        self._norms = np.zeros(layers * layout.norm_layer + layout.spec.hidden_size, np.float32)
        self._scales = np.zeros((layers, EXPERTS, 2), np.float32)
        self._waiting: dict[str, QTensor] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.truncate(self._file, layout.nbytes)

    def put(self, tensor: str, q: QTensor, fmt: Format) -> None:
        """Stores `q` where the layout keeps the canonical `tensor`; fmt is q.format."""
        layout = self.layout
        if tensor in ("embed", "lm_head"):
            if tensor == "embed":
                self._write("embedding", 0, q.data)
            if tensor == "lm_head" or layout.spec.tie_word_embeddings:
                self._pages("head", 0, q.data)
            return
        at, size = place_of_norm(layout, tensor)
        if size:
            self._norms[at : at + size] = q.data
            return
        layer, expert, part = parse(tensor)
        if expert is not None:
            self._expert(layer, expert, part, q)
        elif part == "router":
            self._write("routers", layer * layout.router_bytes, q.data)
        else:
            self._pages("dense", layer * layout.dense_layer_bytes + dense_offset(layout, part), q.data)

    def _expert(self, layer: int, expert: int, part: str, q: QTensor) -> None:
        layout, at = self.layout, (layer * EXPERTS + expert) * self.layout.expert_bytes
        assert q.scale2 is not None
        if part == "down":
            self._write("experts", at + layout.pair_bytes, pack_nvfp4(*_halves(q)))
            self._scales[layer, expert, 1] = q.scale2[0]
            return
        prefix = f"layers.{layer}.experts.{expert}."
        other = self._waiting.pop(prefix + ("up" if part == "gate" else "gate"), None)
        if other is None:
            self._waiting[prefix + part] = q
            return
        gate, up = (q, other) if part == "gate" else (other, q)
        assert gate.scale2 is not None and up.scale2 is not None
        if gate.scale2[0] != up.scale2[0]:
            raise ValueError(
                f"{prefix}gate and up have the tensor scales {gate.scale2[0]} and {up.scale2[0]}: must share"
            )
        self._write("experts", at, pack_nvfp4(gate, up))
        self._scales[layer, expert, 0] = gate.scale2[0]

    def _pages(self, section: str, at: int, data: np.ndarray) -> None:
        for row in range(0, len(data), _SLAB):
            self._write(section, at + row * data.shape[1] * 2, pack_pages(data[row : row + _SLAB]))

    def _write(self, section: str, at: int, data: np.ndarray) -> None:
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        offset = self.layout.offset(section) + at
        while view:
            n = os.pwrite(self._file, view, offset)
            view, offset = view[n:], offset + n

    def __enter__(self) -> CudaBlobWriter:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                if self._waiting:
                    raise ValueError(f"only one of gate and up was given: {', '.join(sorted(self._waiting)[:4])}")
                self._write("norms", 0, self._norms)
                self._write("expert_scales", 0, self._scales)
        finally:
            os.close(self._file)


def parse(tensor: str) -> tuple[int, int | None, str]:
    """(layer, expert or None, part) of a canonical name inside a layer. KeyError when it is none."""
    found = _NAME.fullmatch(tensor)
    if found is None:
        raise KeyError(tensor)
    layer, expert, part = found.groups()
    return int(layer), None if expert is None else int(expert), part


def place_of_norm(layout: CudaLayout, tensor: str) -> tuple[int, int]:
    """(first float, floats) of a norm in its section; no floats when the tensor is no norm."""
    hidden = layout.spec.hidden_size
    if tensor == "final_norm":
        return len(layout.spec.layers) * layout.norm_layer, hidden
    layer, _, part = parse(tensor)
    if part not in layout.norm_offsets:
        return 0, 0
    size = layout.spec.head_dim if part in ("q_norm", "k_norm") else hidden
    return layer * layout.norm_layer + layout.norm_offsets[part], size


def dense_offset(layout: CudaLayout, part: str) -> int:
    """Byte of a layer's dense run where the pages of q, k, v or o begin."""
    spec, row_bytes = layout.spec, layout.spec.hidden_size * 2
    starts = {"q": 0, "k": spec.q_size, "v": spec.q_size + spec.kv_size, "o": layout.qkv_rows}
    return starts[part] * row_bytes


def unpack(layout: CudaLayout, blob: np.ndarray, tensor: str) -> QTensor:
    """A canonical tensor, bit for bit as it was packed, from the blob (uint8 [nbytes]). KeyError for an unknown one."""
    spec, hidden = layout.spec, layout.spec.hidden_size

    def read(section: str, at: int, size: int) -> np.ndarray:
        start = layout.offset(section) + at
        return blob[start : start + size]

    if tensor in ("embed", "lm_head"):
        size = spec.vocab_size * hidden * 2
        if tensor == "embed":
            data = read("embedding", 0, size).view(np.uint16).reshape(-1, hidden)
        else:
            data = unpack_pages(read("head", 0, size), hidden)
        return QTensor("bf16", data.shape, data)
    at, floats = place_of_norm(layout, tensor)
    if floats:
        return QTensor("f32", (floats,), read("norms", at * 4, floats * 4).view(np.float32))
    layer, expert, part = parse(tensor)
    if expert is None:
        if part == "router":
            data = read("routers", layer * layout.router_bytes, layout.router_bytes).view(np.uint16).reshape(-1, hidden)
        else:
            rows = {"q": spec.q_size, "o": hidden}.get(part, spec.kv_size)
            cols = spec.q_size if part == "o" else hidden
            start = layer * layout.dense_layer_bytes + dense_offset(layout, part)
            data = unpack_pages(read("dense", start, rows * cols * 2), cols)
        return QTensor("bf16", data.shape, data)
    assert spec.moe
    start = (layer * EXPERTS + expert) * layout.expert_bytes
    scales = read("expert_scales", (layer * EXPERTS + expert) * 8, 8).view(np.float32)
    if part != "down":
        tiles = read("experts", start, layout.pair_bytes).reshape(-1, tile_bytes(hidden))
        return unpack_nvfp4(tiles, hidden, scales[:1].copy())[part == "up"]
    cols = spec.moe.intermediate_size
    tiles = read("experts", start + layout.pair_bytes, layout.expert_bytes - layout.pair_bytes)
    low, high = unpack_nvfp4(tiles.reshape(-1, tile_bytes(cols)), cols, scales[1:].copy())
    assert low.scale is not None and high.scale is not None
    data, scale = (
        np.stack([a.reshape(-1, 8, a.shape[1]), b.reshape(-1, 8, b.shape[1])], 1).reshape(-1, a.shape[1])
        for a, b in ((low.data, high.data), (low.scale, high.scale))
    )
    return QTensor("nvfp4", (hidden, cols), data, scale, low.scale2)
