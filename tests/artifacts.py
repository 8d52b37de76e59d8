"""Small artifacts for tests: real manifests over made-up bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mkpack import __version__
from mkpack.artifact import open_artifact, write_artifact
from mkpack.digest import Digester
from mkpack.errors import UserError
from mkpack.manifest import FORMAT_VERSION, Entry, Manifest

FILES: dict[str, bytes] = {
    "kernels/x86-64-v3.so": b"\x7fELF" + bytes(range(256)) * 8,
    "weights/rank-0.bin": bytes(i * 7 % 251 for i in range(3 * 4096)),
    "weights/rank-1.bin": bytes(i * 11 % 253 for i in range(3 * 4096)),
    "tokenizer/tokenizer.json": b'{"model": {}}',
    "recipe.yaml": b"name: tiny\n",
    "LICENSE.txt": b"Apache-2.0\n",
    "empty.txt": b"",
}

SECTIONS: list[dict[str, Any]] = [
    {"name": "embed", "format": "bf16", "rows": 48, "cols": 48, "offset": 0, "nbytes": 4608, "tensors": ["embed"]},
    {"name": "norm", "format": "f32", "rows": 48, "cols": 1, "offset": 8192, "nbytes": 192, "tensors": ["norm"]},
]


def manifest(entries: dict[str, Entry], **changes: Any) -> Manifest:
    """A manifest that lists `entries`; every weights/ entry becomes a rank. `changes` replace fields."""
    weights = sorted(name for name in entries if name.startswith("weights/"))
    kernels = sorted(name for name in entries if name.startswith("kernels/"))
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "minimum_runtime": __version__,
        "name": "tiny",
        "license": "apache-2.0",
        "producer": {
            "mkpack": __version__,
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "dirty": False,
            "python": "3.11.7",
            "torch": "2.13.0",
            "modelopt": "0.47.0",
            "compilers": {"g++": "12.2.0"},
        },
        "source": {"kind": "folder", "repo": None, "commit": None, "files": {"config.json": "0" * 64}},
        "recipe": "name: tiny\n",
        "build_key": "f" * 64,
        "spec": {
            "family": "mixtral",
            "vocab_size": 33,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope": {"inv_freq": [1.0, 0.1, 1 / 3], "attention_factor": 1.0},
            "qk_norm": False,
            "qkv_bias": False,
            "o_bias": False,
            "layers": [{"moe": True, "sliding_window": None}],
            "moe": {"num_experts": 5, "top_k": 2, "intermediate_size": 48, "norm_topk_prob": True},
            "dense_intermediate_size": None,
        },
        "precision": {"experts": "nvfp4", "attention": "bf16"},
        "limits": {"context": 128, "tokens_per_step": 16},
        "tp": max(1, len(weights)),
        "kernels": {
            Path(name).stem: {
                "path": name,
                "layout": "cpu",
                "description": '{"abi": 1}',
                "compiler": "g++ 12.2.0",
                "requires": {},
            }
            for name in kernels
        },
        "weights": [
            {"layout": "cpu", "rank": i, "path": name, "nbytes": entries[name].size} for i, name in enumerate(weights)
        ],
        "sections": {"cpu": SECTIONS},
        "tokenizer_files": [name for name in entries if name.startswith("tokenizer/")],
        "quality": {"kl": 0.01},
        "entries": {name: entry.model_dump() for name, entry in entries.items()},
    }
    return Manifest.model_validate(fields | changes)


def write(path: Path, files: dict[str, bytes] | None = None) -> Path:
    """Writes an artifact of `files` (FILES by default) to `path`."""
    write_artifact(path, list((FILES if files is None else files).items()), manifest)
    return path


def digests(files: dict[str, bytes]) -> dict[str, Entry]:
    """The entries of `files`."""
    entries = {}
    for name, data in files.items():
        digester = Digester(len(data))
        list(digester.through([data]))
        entries[name] = digester.entry()
    return entries


def refused(path: Path, *texts: str) -> str:
    """Text of the UserError that opening `path` raises; it must name the file and hold every one of `texts`."""
    with pytest.raises(UserError) as e:
        open_artifact(path)
    for text in (path.name, *texts):
        assert text in str(e.value)
    return str(e.value)


def damage(path: Path, name: str) -> None:
    """Flips one bit in an entry of a file or folder."""
    if path.is_dir():
        data = bytearray((path / name).read_bytes())
        data[3] ^= 1
        (path / name).write_bytes(data)
        return
    data = bytearray(path.read_bytes())
    data[data.index(FILES[name]) + 3] ^= 1
    path.write_bytes(data)
