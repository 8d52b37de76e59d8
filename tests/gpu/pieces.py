"""The demo's artifact in pieces that are small enough to carry to a machine with a GPU but without a network.

Its blobs are 368 MB, but every weight comes from a GGUF file of 98 MB. A folder of pieces holds the experts as they are
stored (45 MB), the other matrices as the GGUF file has them (47 MB), and the artifact without its blobs. assemble()
makes the blobs again; their digests are those of the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jobs import layouts

from mkpack.artifact import open_artifact
from mkpack.formats import QTensor, f32_to_bf16
from mkpack.pack import BlobWriter, unpack
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.spec import ModelSpec, SourceNames, tensors

if TYPE_CHECKING:
    from gguf import GGUFReader

EXPERTS, OTHERS = "experts", "others"  # folders, each of which fits in one transfer
_GGUF = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def split(artifact: Path, gguf: Path, folder: Path) -> None:
    """Writes the pieces of an unpacked artifact."""
    import gguf as library

    reader = library.GGUFReader(gguf)
    with open_artifact(artifact) as opened:
        manifest = opened.manifest
        (entry,) = manifest.weights_in("cpu")
        blob = np.frombuffer(opened.map(entry.path), np.uint8)
        layout, _ = layouts(manifest)
        roles = list(tensors(layout.spec, SourceNames()))
        shapes = {role.name: role.shape for role in roles}
        for name in (EXPERTS, OTHERS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        table: dict[str, list[dict[str, Any]]] = {EXPERTS: [], OTHERS: []}
        with open(folder / EXPERTS / "data", "wb") as experts, open(folder / OTHERS / "data", "wb") as others:
            for role in roles:
                if role.precision == "experts":
                    q = unpack(layout, [blob], shapes, role.name)
                    assert q.scale is not None and q.scale2 is not None
                    experts.write(q.data.tobytes() + q.scale.tobytes())
                    table[EXPERTS].append({"name": role.name, "scale": float(q.scale2[0])})
                elif role.precision:
                    raw, kind = _blocks(reader, role.name, layout.spec)
                    others.write(raw.tobytes())
                    table[OTHERS].append({"name": role.name, "kind": kind, "bytes": raw.nbytes})
                else:  # vectors and routers
                    q = unpack(layout, [blob], shapes, role.name)
                    others.write(q.data.tobytes())
                    table[OTHERS].append({"name": role.name, "kind": q.format, "bytes": q.data.nbytes})
        for name, rows in table.items():
            (folder / name / "table.json").write_text(json.dumps(rows))


def _blocks(reader: GGUFReader, name: str, spec: ModelSpec) -> tuple[np.ndarray, str]:
    """A matrix as the GGUF file stores it, its rows in a checkpoint's order; and in which of GGUF's formats."""
    layer, _, part = name.removeprefix("layers.").partition(".")
    wanted = "token_embd.weight" if name == "embed" else f"blk.{layer}.{_GGUF[part]}.weight"
    (found,) = (t for t in reader.tensors if t.name == wanted)
    raw = np.asarray(found.data).reshape(int(found.shape[1]), -1).view(np.uint8)
    if part in ("q", "k"):  # the two halves of a rotary pair lie in adjacent rows there
        heads = spec.num_attention_heads if part == "q" else spec.num_key_value_heads
        raw = raw.reshape(heads, -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
    return np.ascontiguousarray(raw), found.tensor_type.name


def _values(raw: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of GGUF blocks of 32: Q8_0 and Q4_1."""
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        return blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)
    assert kind == "Q4_1", kind
    blocks = raw.reshape(-1, 20)
    factor, offset = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return codes * factor[:, None] + offset[:, None]


def _read(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, QTensor]]:
    data, at = np.fromfile(folder / EXPERTS / "data", np.uint8), 0
    for row in json.loads((folder / EXPERTS / "table.json").read_text()):
        rows, cols = shape = shapes[row["name"]]
        codes = data[at:][: rows * cols // 2].reshape(rows, -1)
        scales = data[at + codes.size :][: rows * cols // 16].reshape(rows, -1)
        at += codes.size + scales.size
        yield row["name"], QTensor("nvfp4", shape, codes, scales, np.array([row["scale"]], np.float32))
    data, at = np.fromfile(folder / OTHERS / "data", np.uint8), 0
    for row in json.loads((folder / OTHERS / "table.json").read_text()):
        raw, shape = data[at : at + row["bytes"]], shapes[row["name"]]
        at += row["bytes"]
        if row["kind"] in ("f32", "bf16"):
            dtype = np.float32 if row["kind"] == "f32" else np.uint16
            yield row["name"], QTensor(row["kind"], shape, raw.copy().view(dtype).reshape(shape))
        else:
            yield row["name"], QTensor("bf16", shape, f32_to_bf16(_values(raw, row["kind"]).reshape(shape)))


def assemble(folder: Path) -> Path:
    """The artifact's folder, with the blobs made again from its pieces beside it. Raises ValueError when they are not
    those of its manifest."""
    artifact = folder / "artifact"
    with open(artifact / "manifest.json", encoding="utf-8") as file:
        entries = {entry["path"] for entry in json.load(file)["weights"]}
    if all((artifact / path).exists() for path in entries):
        return artifact
    from mkpack.manifest import Manifest

    manifest = Manifest.model_validate_json((artifact / "manifest.json").read_bytes())
    (cpu,), (cuda,) = manifest.weights_in("cpu"), manifest.weights_in("cuda")
    layout, cuda_layout = layouts(manifest)
    shapes = {role.name: role.shape for role in tensors(layout.spec, SourceNames())}
    made = {path: artifact / f"{path}.part" for path in (cpu.path, cuda.path)}
    made[cpu.path].parent.mkdir(parents=True, exist_ok=True)
    with (
        BlobWriter(layout, [made[cpu.path]]) as first,
        CudaBlobWriter(cuda_layout, made[cuda.path]) as second,
    ):
        for name, q in _read(folder, shapes):
            first.put(name, q, q.format)
            second.put(name, q, q.format)
    for path, partial in made.items():
        partial.rename(artifact / path)
    with open_artifact(artifact) as opened:
        if problems := opened.verify():
            raise ValueError("; ".join(problems))
    return artifact
