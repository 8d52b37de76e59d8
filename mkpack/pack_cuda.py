"""The byte order of the CUDA blob: `QTensor` <-> bytes (numpy). Read on the other side by csrc/cuda/layout.cuh.

A dense page is 8 rows x 2048 bytes, an NVFP4 page 16 rows x 2048 columns; docs/CUDA.md has both in words.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mkpack.blobfile import BlobFile, Seal
from mkpack.formats import QTensor
from mkpack.layout_cuda import (
    CHUNK,
    CHUNK_CODES,
    CHUNK_SCALES,
    EXPERT_BIASES,
    OWNED_ROWS,
    PAGE_CHUNKS,
    PAGE_ROWS,
    PAIR_ROWS,
    CudaLayout,
    matrix_bytes,
    row_bytes,
    tile_bytes,
)
from mkpack.spec import Format

_NAME = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?((?:dense\.)?\w+)")
_SLAB = 1 << 20  # bytes of a dense matrix packed at a time: they stay in the cache between one pass and the next
_RUN = np.dtype("V64")  # 64 bytes that stay together, the unit in which pages and tiles are reordered


def pack_pages(data: np.ndarray) -> np.ndarray:
    """bf16 bits uint16 or e4m3 codes uint8 [rows, K] -> uint8: row units one after the other, along K inside them.

    Missing rows of the last unit and missing columns of the last share are zeros.
    """
    rows, width = data.shape[0], data.shape[1] * data.itemsize
    units, stored = -(-rows // PAGE_ROWS), row_bytes("bf16" if data.itemsize == 2 else "fp8", data.shape[1])
    raw = np.ascontiguousarray(data).view(np.uint8)
    if (units * PAGE_ROWS, stored) != (rows, width):
        raw = np.pad(raw, ((0, units * PAGE_ROWS - rows), (0, stored - width)))
    if data.itemsize == 1:
        raw = swap_middle(raw)
    # Two runs are a warp's share of a row: [unit, row, run] -> [unit, run, row]
    runs = raw.view(_RUN).reshape(units, PAGE_ROWS, -1)
    return np.ascontiguousarray(runs.transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def unpack_pages(pages: np.ndarray, fmt: Format, rows: int, cols: int) -> np.ndarray:
    """The inverse of pack_pages: uint16 or uint8 [rows, cols]."""
    units, stored = -(-rows // PAGE_ROWS), row_bytes(fmt, cols)
    runs = np.ascontiguousarray(pages).view(_RUN).reshape(units, stored // _RUN.itemsize, PAGE_ROWS).transpose(0, 2, 1)
    raw = np.ascontiguousarray(runs).reshape(-1).view(np.uint8)
    if fmt == "fp8":
        return np.ascontiguousarray(swap_middle(raw).reshape(-1, stored)[:rows, :cols])
    return np.ascontiguousarray(raw.view(np.uint16).reshape(-1, stored // 2)[:rows, :cols])


def swap_middle(codes: np.ndarray) -> np.ndarray:
    """uint8, contiguous -> the same with the middle two bytes of every four exchanged. The kernel unpacks a word of fp8
    codes into its even and its odd bytes, so neighbouring columns lie two bytes apart."""
    words = codes.view(np.uint32)
    swapped = words & 0xFF0000FF
    swapped |= words << 8 & 0x00FF0000
    swapped |= words >> 8 & 0x0000FF00
    return swapped.view(np.uint8)


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


def _tile_pages(cols: int) -> Iterator[tuple[slice, slice, slice]]:
    """(chunks of a page, their codes' bytes, their scales' bytes) of every page of a tile."""
    chunks, at = cols // CHUNK, 0
    for first in range(0, chunks, PAGE_CHUNKS):
        n = min(PAGE_CHUNKS, chunks - first)
        scales = at + n * CHUNK_CODES
        end = scales + n * CHUNK_SCALES
        yield slice(first, first + n), slice(at, scales), slice(scales, end)
        at = end


def pack_nvfp4(low: QTensor, high: QTensor) -> np.ndarray:
    """uint8 [tiles, tile_bytes]: rows 0..7 of tile u are rows 8 u .. of `low`, rows 8..15 the same rows of `high`.

    Rows count in eights and columns in chunks.
    """
    cols = low.shape[1]
    tiles, chunks = low.shape[0] // 8, cols // CHUNK
    first, second = _word_tables()
    out = np.empty((tiles, tile_bytes(cols)), np.uint8)
    assert low.scale is not None and high.scale is not None
    # [tile, row, chunk, 16 words] -> [tile, chunk, row, 16 words]
    words = first[np.ascontiguousarray(low.data).view(np.uint16)]
    words |= second[np.ascontiguousarray(high.data).view(np.uint16)]
    runs = words.view(_RUN).reshape(tiles, 8, chunks).transpose(0, 2, 1)
    # [tile, row, chunk, t], twice -> [tile, chunk, row, t, low or high]
    scales = np.stack([scale.reshape(tiles, 8, chunks, 4) for scale in (low.scale, high.scale)], -1)
    scales = scales.transpose(0, 2, 1, 3, 4)
    for page, at, scales_at in _tile_pages(cols):
        out[:, at].view(_RUN).reshape(tiles, page.stop - page.start, 8)[...] = runs[:, page]
        out[:, scales_at] = scales[:, page].reshape(tiles, scales_at.stop - scales_at.start)
    return out


def unpack_nvfp4(tiles: np.ndarray, cols: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The inverse of pack_nvfp4: (data, scale) of low and of high."""
    n, chunks = len(tiles), cols // CHUNK
    runs, scales = np.empty((n, chunks, 8), _RUN), np.empty((n, chunks, 8, 4, 2), np.uint8)
    for page, at, scales_at in _tile_pages(cols):
        runs[:, page] = tiles[:, at].view(_RUN).reshape(n, page.stop - page.start, 8)
        scales[:, page] = tiles[:, scales_at].reshape(n, page.stop - page.start, 8, 4, 2)
    words = np.ascontiguousarray(runs.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
    codes = _code_table()[words & 0xFFFF] | _code_table()[words >> 16] << 4
    found = [
        (
            half.astype(np.uint16).view(np.uint8).reshape(n * 8, cols // 2),
            np.ascontiguousarray(scales[..., i].transpose(0, 2, 1, 3)).reshape(n * 8, cols // 16),
        )
        for i, half in enumerate((codes & 0xFFFF, codes >> 16))
    ]
    return found[0], found[1]


def _halves(q: QTensor) -> tuple[QTensor, QTensor]:
    """Rows 0..7 of every 16, and rows 8..15."""
    assert q.scale is not None

    def half(i: int) -> QTensor:
        data, scale = (
            np.ascontiguousarray(a.reshape(-1, 2, 8, a.shape[1])[:, i]).reshape(len(a) // 2, a.shape[1])
            for a in (q.data, q.scale)
            if a is not None
        )
        return QTensor("nvfp4", (q.shape[0] // 2, q.shape[1]), data, scale, q.scale2)

    return half(0), half(1)


class CudaBlobWriter:
    """Writes the blob of every rank in one pass over the tensors, in any order; the counterpart of pack.BlobWriter.

    paths: of the blobs, rank 0 first. ranks: whose they are, where they are not all. `put` may be called by several
    threads at once; most of its time numpy and the system work without the interpreter's lock. An expert's gate and up
    share tiles, so the first of the two waits in memory for the other; a `with` block that ends without an error has
    seen both. resume: what an earlier writer wrote stays.
    """

    def __init__(
        self,
        layout: CudaLayout,
        paths: Path | Sequence[Path],
        resume: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.layout = layout
        self._ranks = range(layout.tp) if ranks is None else ranks
        self._waiting: dict[str, QTensor] = {}
        self._lock = threading.Lock()  # of _waiting
        found = [paths] if isinstance(paths, Path) else list(paths)
        if len(found) != len(self._ranks):
            raise ValueError(f"{len(self._ranks)} ranks, {len(found)} blobs")
        self._files = [BlobFile(path, layout.nbytes, resume) for path in found]

    @property
    def blobs(self) -> int:
        """How many seals a put() gives."""
        return len(self._files)

    def put(self, tensor: str, q: QTensor, fmt: Format) -> list[Seal]:
        """Stores `q` where the layout keeps the canonical `tensor` in format `fmt`, which is q.format (a tied embedding
        may have two formats). Returns a seal of every rank, of what was written there: of gate and up the second has
        the bytes of both. Raises KeyError for a tensor that the layout does not hold."""
        pair = self._pair(tensor, q)
        ranks = [_RankWriter(self.layout, file, rank) for rank, file in zip(self._ranks, self._files, strict=True)]
        for rank in ranks:
            rank.put(tensor, q, fmt, pair)
        return [rank.seal for rank in ranks]

    def _pair(self, tensor: str, q: QTensor) -> tuple[QTensor, QTensor] | None:
        """Gate and up of an expert when `tensor` is the second of them; the first is kept until then."""
        stem, _, part = tensor.rpartition(".")
        if part not in ("gate", "up") or ".experts." not in tensor:
            return None
        parse(self.layout, tensor)
        other = f"{stem}.{'up' if part == 'gate' else 'gate'}"
        with self._lock:
            found = self._waiting.pop(other, None)
            if found is None:
                self._waiting[tensor] = q
                return None
        return (q, found) if part == "gate" else (found, q)

    def holds(self, seals: list[Seal]) -> bool:
        """Whether what put() returned these for is in the blobs."""
        return len(seals) == len(self._files) and all(f.holds(s) for f, s in zip(self._files, seals, strict=True))

    def __enter__(self) -> CudaBlobWriter:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for file in self._files:
            file.close()
        if failed is None and self._waiting:
            raise ValueError(f"only one of gate and up was given: {', '.join(sorted(self._waiting)[:4])}")


class _RankWriter:
    """One tensor's part of one rank's blob, and its seal."""

    def __init__(self, layout: CudaLayout, file: BlobFile, rank: int) -> None:
        self.layout, self.rank, self.seal, self._file = layout, rank, Seal(), file

    def put(self, tensor: str, q: QTensor, fmt: Format, pair: tuple[QTensor, QTensor] | None) -> None:
        layout, own = self.layout, self.layout.rows(tensor, self.rank)
        if tensor in ("embed", "lm_head"):
            if tensor == "embed" and fmt == "bf16":
                self._write("embedding", 0, q.data)
            if (tensor == "lm_head" or layout.spec.tie_word_embeddings) and fmt == layout.precision["lm_head"]:
                self._matrix("head", 0, 0, _part(q, own))
            return
        at, size = place_of_vector(layout, tensor)
        if size:
            self._write("norms", at * 4, q.data[own])
            return
        layer, expert, part = parse(layout, tensor)
        if expert is not None:
            self._expert(layer, expert, part, q, own, pair)
        elif part == "router":
            self._write("routers", layout.moe_layers(layer) * layout.router_bytes, q.data)
        elif mlp := place_in_mlp(layout, layer, part):
            self._matrix("mlp", mlp.at, mlp.scale_at, _part(q, own), mlp.stride)
        else:
            at = layer * layout.dense_layer_bytes + dense_offset(layout, part)
            self._matrix("dense", at, layer * layout.dense_scale_layer + layout.dense_rows[part], _part(q, own))

    def _expert(
        self, layer: int, expert: int, part: str, q: QTensor, own: slice, pair: tuple[QTensor, QTensor] | None
    ) -> None:
        number = self.layout.moe_layers(layer) * self.layout.num_experts + expert
        at = number * self.layout.expert_bytes
        assert q.scale2 is not None
        self._write("expert_scales", (number * 4 + _SCALE[part]) * 4, q.scale2)
        if part == "down":
            self._write("experts", at + self.layout.pair_bytes, pack_nvfp4(*_halves(_part(q, own))))
        elif pair:
            self._write("experts", at, pack_nvfp4(*(_part(x, own) for x in pair)))

    def _matrix(self, section: str, at: int, scale_at: int, q: QTensor, stride: int = 1) -> None:
        """A matrix whose pages begin at byte `at` of its section and whose row scales at float `scale_at` of theirs.
        stride: 2 where its row units take turns with another's."""
        stored = row_bytes(q.format, q.shape[1])
        if stride > 1:
            unit = PAGE_ROWS * stored
            for i, row in enumerate(range(0, q.shape[0], PAGE_ROWS)):
                rows = slice(row, row + PAGE_ROWS)
                self._write(section, at + stride * i * unit, pack_pages(q.data[rows]))
                if q.scale2 is not None:
                    self._write(f"{section}_scales", (scale_at + stride * row) * 4, q.scale2[rows])
            return
        step = max(_SLAB // stored // PAGE_ROWS, 1) * PAGE_ROWS
        for row in range(0, q.shape[0], step):
            self._write(section, at + row * stored, pack_pages(q.data[row : row + step]))
        if q.scale2 is not None:
            self._write(f"{section}_scales", scale_at * 4, q.scale2)

    def _write(self, section: str, at: int, data: np.ndarray) -> None:
        if data.size:  # the last ranks may have no rows
            self._file.write(self.layout.offset(section) + at, data, self.seal)


def _part(q: QTensor, rows: slice) -> QTensor:
    """Rows of a matrix; those that it does not have are left out."""
    data = q.data[rows]
    if len(data) == len(q.data):
        return q
    scale2 = q.scale2[rows] if q.format == "fp8" and q.scale2 is not None else q.scale2
    return QTensor(q.format, (len(data), q.shape[1]), data, None if q.scale is None else q.scale[rows], scale2)


_SCALE = {"gate": 0, "up": 1, "down": 2}  # of an expert's float4


def parse(layout: CudaLayout, tensor: str) -> tuple[int, int | None, str]:
    """(layer, expert or None, part) of a canonical name inside a layer. KeyError when the model has no such place."""
    found = _NAME.fullmatch(tensor)
    if found is None:
        raise KeyError(tensor)
    layer, expert, part = int(found[1]), None if found[2] is None else int(found[2]), found[3]
    if layer >= len(layout.spec.layers) or (expert or 0) >= layout.num_experts:
        raise KeyError(tensor)
    if not layout.spec.layers[layer].moe and (expert is not None or part in _MOE_ONLY):
        raise KeyError(tensor)
    return layer, expert, part


_MOE_ONLY = ("router", "router_bias", "choice_bias", "pre_norm", "expert_norm", "pre_proj", "post_proj")


@dataclass(frozen=True)
class MlpPlace:
    """Where a matrix of the mlp section lies: first byte, float of its first row scale, and its shape over all ranks;
    stride: 2 where its row units take turns with another's."""

    at: int
    scale_at: int
    rows: int
    cols: int
    stride: int = 1


def place_in_mlp(layout: CudaLayout, layer: int, part: str) -> MlpPlace | None:
    """None for a part that is elsewhere."""
    hidden, narrow, inner, fmt = layout.spec.hidden_size, layout.narrow, layout.dense_inner, layout.precision["dense"]
    narrow_rows, pairs = layout.narrow_rows, 2 * layout.dense_inner_rows
    at, scale_at = layout.mlp_at(layer)
    if part.startswith("dense.") and (layout.spec.layers[layer].moe or not inner):
        raise KeyError(f"layers.{layer}.{part}")
    match part:
        case "pre_proj":
            return MlpPlace(at, scale_at, narrow, hidden)
        case "post_proj":
            return MlpPlace(at + matrix_bytes(fmt, narrow_rows, hidden), scale_at + narrow_rows, hidden, narrow)
        case "dense.gate":
            return MlpPlace(at, scale_at, inner, hidden, 2)
        case "dense.up":
            return MlpPlace(at + matrix_bytes(fmt, PAGE_ROWS, hidden), scale_at + PAGE_ROWS, inner, hidden, 2)
        case "dense.down":
            return MlpPlace(at + matrix_bytes(fmt, pairs, hidden), scale_at + pairs, hidden, inner)
    return None


def place_of_vector(layout: CudaLayout, tensor: str) -> tuple[int, int]:
    """(first float, floats) of a vector in its section; no floats when the tensor is none, or the model has none."""
    if tensor == "final_norm":
        return layout.vectors_at(len(layout.spec.layers)), layout.spec.hidden_size
    layer, expert, part = parse(layout, tensor)
    at, size = (0, 0)
    if expert is None and part not in ("gate_up_bias", "down_bias"):
        at, size = layout.vectors.get(part, (0, 0))
    elif expert is not None and part in EXPERT_BIASES:
        at, size = layout.vectors["down_bias" if part == "down_bias" else "gate_up_bias"]
        at, size = at + size // layout.num_experts * expert, size // layout.num_experts
        if part != "down_bias":
            size //= 2
            at += size * (part == "up_bias")
    return layout.vectors_at(layer) + at, size


def dense_offset(layout: CudaLayout, part: str) -> int:
    """Byte of a layer's dense run where the pages of q, k, v or o begin."""
    if part == "o":
        return layout.qkv_bytes
    return matrix_bytes(layout.precision["attention"], layout.dense_rows[part], layout.spec.hidden_size)


def unpack(layout: CudaLayout, blob: np.ndarray, tensor: str, rank: int = 0) -> QTensor:
    """The rows of a canonical tensor that a rank has, bit for bit as they were packed, from its blob (uint8 [nbytes]).
    KeyError for an unknown one.

    "lm_head" of a tied model is the embedding as the head stores it.
    """
    spec, hidden = layout.spec, layout.spec.hidden_size

    def held(rows: int) -> int:
        """Of a tensor with so many rows, how many this rank has."""
        return len(range(rows)[layout.rows(tensor, rank)])

    def read(section: str, at: int, size: int) -> np.ndarray:
        start = layout.offset(section) + at
        return blob[start : start + size]

    def every(data: np.ndarray, run: int, stride: int) -> np.ndarray:
        """The first of every `stride` runs of bytes."""
        if stride == 1 or not len(data):
            return data
        return np.concatenate([data[first : first + run] for first in range(0, len(data), stride * run)])

    def matrix(section: str, at: int, scale_at: int, fmt: Format, rows: int, cols: int, stride: int = 1) -> QTensor:
        unit, units = matrix_bytes(fmt, PAGE_ROWS, cols), -(-rows // PAGE_ROWS)
        pages, scale2 = every(read(section, at, max(0, stride * (units - 1) + 1) * unit), unit, stride), None
        if fmt == "fp8":
            run = PAGE_ROWS * 4 if stride > 1 else rows * 4
            last = max(0, stride * (units - 1) + 1) * run if stride > 1 else run
            scale2 = every(read(section + "_scales", scale_at * 4, last), run, stride).view(np.float32).copy()
        return QTensor(fmt, (rows, cols), unpack_pages(pages, fmt, rows, cols), None, scale2)

    if tensor == "embed":
        data = read("embedding", 0, spec.vocab_size * hidden * 2).view(np.uint16).reshape(-1, hidden)
        return QTensor("bf16", data.shape, data)
    if tensor == "lm_head":
        return matrix("head", 0, 0, layout.precision["lm_head"], held(spec.vocab_size), hidden)
    at, floats = place_of_vector(layout, tensor)
    assert spec.moe
    if floats:
        whole = {"gate_bias": spec.moe.intermediate_size, "up_bias": spec.moe.intermediate_size}
        whole["down_bias"] = layout.expert_hidden
        if (name := tensor.rpartition(".")[2]) in whole:  # the last ranks' may be padded
            floats = held(whole[name])
        return QTensor("f32", (floats,), read("norms", at * 4, floats * 4).view(np.float32))
    layer, expert, part = parse(layout, tensor)
    if expert is not None:
        rows = held(layout.expert_hidden if part == "down" else spec.moe.intermediate_size)
        number = layout.moe_layers(layer) * layout.num_experts + expert
        return _unpack_expert(layout, read, number, part, rows)
    if part == "router":
        raw = read("routers", layout.moe_layers(layer) * layout.router_bytes, layout.router_bytes)
        values = raw.view(np.uint16 if layout.router_format == "bf16" else np.float32).reshape(-1, hidden)
        return QTensor(layout.router_format, values.shape, values)
    if mlp := place_in_mlp(layout, layer, part):
        return matrix("mlp", mlp.at, mlp.scale_at, layout.precision["dense"], held(mlp.rows), mlp.cols, mlp.stride)
    scale_at = layer * layout.dense_scale_layer + layout.dense_rows[part]
    rows = held({"q": spec.q_size, "attn_gate": spec.q_size, "o": hidden}.get(part, spec.kv_size))
    at = layer * layout.dense_layer_bytes + dense_offset(layout, part)
    return matrix("dense", at, scale_at, layout.precision["attention"], rows, spec.q_size if part == "o" else hidden)


def _unpack_expert(
    layout: CudaLayout, read: Callable[[str, int, int], np.ndarray], number: int, part: str, rows: int
) -> QTensor:
    assert layout.spec.moe
    hidden, inner = layout.expert_hidden, layout.spec.moe.intermediate_size
    start = number * layout.expert_bytes
    scale2 = read("expert_scales", number * 16 + _SCALE[part] * 4, 4).view(np.float32).copy()
    if part != "down":
        tiles = read("experts", start, rows // PAIR_ROWS * tile_bytes(hidden)).reshape(-1, tile_bytes(hidden))
        data, scale = unpack_nvfp4(tiles, hidden)[_SCALE[part]]
        return QTensor("nvfp4", (rows, hidden), data, scale, scale2)
    tiles = read("experts", start + layout.pair_bytes, rows // OWNED_ROWS * tile_bytes(inner))
    halves = unpack_nvfp4(tiles.reshape(-1, tile_bytes(inner)), inner)
    data, scale = (
        np.stack([a.reshape(-1, 8, a.shape[1]) for a in pair], 1).reshape(rows, pair[0].shape[1])
        for pair in zip(*halves, strict=True)
    )
    return QTensor("nvfp4", (rows, inner), data, scale, scale2)
