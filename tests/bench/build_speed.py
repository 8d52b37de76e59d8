"""Peak memory and speed of a build from a synthetic checkpoint of any size, and what they come to for larger ones.

    python tests/bench/build_speed.py [--gigabytes 20] [--experts nvfp4] [--tp 1] [--algorithm max] [--folder FOLDER]

The checkpoint is Mixtral in bfloat16 with the matrices of a 30B model (hidden_size 2048, experts of 768 rows) and as
many layers as fill the size; it is written once and used again. The build runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SHARD = 1 << 30
SPEC = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
}
# Prints the resident size after the imports that a build has anyway, and the peak at the end. VmHWM, for ru_maxrss
# remembers the size of the process that this one was forked from.
BUILD = """
import os, sys, time
from pathlib import Path
import torch, mkpack.build, mkpack.quantize
show = lambda key: int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024
imports = show("VmRSS")
start, before = time.monotonic(), sum(os.times()[:2])
from rich.console import Console
mkpack.build.build(Path(sys.argv[1]), output=Path(sys.argv[2]), force=True, console=Console(stderr=True, width=200))
import json
spent = sum(os.times()[:2]) - before
print(json.dumps({"imports": imports, "peak": show("VmHWM"), "seconds": time.monotonic() - start, "cpu": spent}))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=20)
    options.add_argument("--experts", default="nvfp4", choices=["nvfp4", "fp8", "bf16"])
    options.add_argument("--algorithm", default="max", choices=["max", "mse"])
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mkpack-build-speed")
    given = options.parse_args()
    source = given.folder / f"{given.gigabytes:g}GB"
    if not (source / "model.safetensors.index.json").exists():
        make_checkpoint(source, given.gigabytes * 1e9)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    recipe = given.folder / "recipe.yaml"
    recipe.write_text(
        f"name: speed\nlicense: none\nsource:\n  folder: {source}\n"
        f"quantise:\n  experts: {given.experts}\n  algorithm: {given.algorithm}\n"
        f"parallel:\n  tp: {given.tp}\nlimits:\n  context: 128\n"
    )
    command = [sys.executable, "-c", BUILD, str(recipe), str(given.folder / "speed.mkpack")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (given.folder / "speed.mkpack").unlink()
    found = json.loads(done.stdout)
    rate = size / found["seconds"]
    print(f"source {size / 1e9:.2f} GB, {found['seconds']:.1f} s with digests and compiling, {rate / 1e6:.0f} MB/s")
    free = 2 * size / found["cpu"]
    print(f"{found['cpu']:.1f} s of CPU time without the compiler: {free / 1e6:.0f} MB/s if two cores did nothing else")
    print(f"peak {found['peak'] / 2**20:.0f} MiB, of which {found['imports'] / 2**20:.0f} MiB before the build")
    for other in (60e9, 1.6e12):
        print(
            f"{other / 1e9:,.0f} GB: {other / rate / 60:,.0f} min at this speed, "
            f"{other / free / 60:,.0f} min on two free cores"
        )


def make_checkpoint(folder: Path, nbytes: float) -> None:
    """Normal weights of 0.02, drawn once and shifted from matrix to matrix: only their size is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    h, n, e = SPEC["hidden_size"], SPEC["intermediate_size"], SPEC["num_local_experts"]
    q, kv, vocab = 4096, 512, SPEC["vocab_size"]
    layer = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "block_sparse_moe.gate.weight": (e, h),
        **{
            f"block_sparse_moe.experts.{i}.{w}.weight": (h, n) if w == "w2" else (n, h)
            for i in range(e)
            for w in ("w1", "w2", "w3")
        },
    }
    each = sum(2 * int(np.prod(shape)) for shape in layer.values())
    layers = max(round((nbytes - 4 * vocab * h) / each), 1)
    shapes = {"model.embed_tokens.weight": (vocab, h)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (h,), "lm_head.weight": (vocab, h)}
    values = np.random.default_rng(0).normal(0, 0.02, (4 * vocab * h) // 3).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    ones = np.full(h, 0x3F80, np.uint16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * int(np.prod(s)) for s in shards[-1].values()) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    weight_map, shift = {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for tensor, shape in shard.items():
            size = 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for shape in shard.values():
                count = int(np.prod(shape))
                shift = (shift + 7919) % (len(bits) - count)
                file.write((ones if len(shape) == 1 else bits[shift : shift + count]).data)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "config.json").write_text(json.dumps({**SPEC, "num_hidden_layers": layers}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()
