"""What the CUDA kernel can do, and where each section lies in its blob. Pure arithmetic, no bytes.

Mirrors csrc/cuda/layout.cuh; docs/CUDA.md says the same in words, and the generated header asserts the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from mkpack.layout import SECTION_ALIGN, align, ceil_div
from mkpack.manifest import Section
from mkpack.spec import Format, ModelSpec, Precision, SourceNames, tensors

# Blocks of the resident kernel, one an SM: what the smallest GPU of that architecture that it is meant for has (an H200
# or H100 SXM, a B200).
GRID = {"sm_90a": 132, "sm_100a": 148}

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K = 2048, 32, 4, 128, 128, 8
# Multiples of 256, because a warp of the down phase takes pairs of chunks; at most 768, what its slice of shared memory
# holds; above 396, so that an SM has a gate/up page left to issue after the first two.
MOE_INTERMEDIATE = (512, 768)
PAGE_ROWS, PAGE_COLUMNS = 8, 1024  # of a bf16 page
OWNED_ROWS = 16  # of a down tile
PAIR_ROWS = 8  # gate rows, and as many up rows, of a gate/up tile
CHUNK = 64  # columns of an NVFP4 tile that lie together


def cuda_refusals(
    spec: ModelSpec, precision: Mapping[Precision, Format], tp: int = 1, router_format: Format = "bf16"
) -> list[str]:
    """Everything that this version of the kernel cannot do of a model, by name; empty when it can run it."""
    found: list[str] = []

    def only(name: str, value: object, *allowed: object) -> None:
        if value not in allowed:
            found.append(f"{name} is {value}, the kernel takes {' or '.join(map(str, allowed))}")

    only("parallel.tp", tp, 1)
    only("hidden_size", spec.hidden_size, HIDDEN)
    only("num_attention_heads", spec.num_attention_heads, HEADS)
    only("num_key_value_heads", spec.num_key_value_heads, KV_HEADS)
    only("head_dim", spec.head_dim, HEAD_DIM)
    only("rotary dimensions", 2 * len(spec.rope.inv_freq), HEAD_DIM)
    if spec.vocab_size % PAGE_ROWS:
        found.append(f"vocab_size is {spec.vocab_size}, the kernel takes multiples of {PAGE_ROWS}")
    if spec.moe:
        only("num_experts", spec.moe.num_experts, EXPERTS)
        only("top_k", spec.moe.top_k, TOP_K)
        only("moe intermediate_size", spec.moe.intermediate_size, *MOE_INTERMEDIATE)
        only("norm_topk_prob", spec.moe.norm_topk_prob, True)
    if dense := [i for i, layer in enumerate(spec.layers) if not layer.moe]:
        found.append(f"layers without experts ({_few(dense)}), the kernel takes experts in every layer")
    if windows := [i for i, layer in enumerate(spec.layers) if layer.sliding_window is not None]:
        found.append(f"layers with a sliding window ({_few(windows)}), the kernel takes full attention")
    if not spec.qk_norm:
        found.append("no norm of q and k, the kernel takes models with one")
    for name, bias in (("qkv", spec.qkv_bias), ("output projection", spec.o_bias)):
        if bias:
            found.append(f"a bias of the {name}, the kernel takes none")
    only("quantise.experts", precision["experts"], "nvfp4")
    for key in ("attention", "lm_head", "embeddings"):
        only(f"quantise.{key}", precision[key], "bf16")
    only("the routers' dtype", router_format, "bf16")
    return found


def _few(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (f", ... {len(layers)} in all" if len(layers) > 4 else "")


class CudaLayout:
    """The section table of the one blob that every CUDA architecture shares. Offsets inside sections in bytes.

    Raises ValueError for a model that cuda_refusals() names something of: ask it first, to tell the user.
    """

    tp = 1

    def __init__(self, spec: ModelSpec) -> None:
        precision: dict[Precision, Format] = {p: "nvfp4" if p == "experts" else "bf16" for p in get_args(Precision)}
        if refused := cuda_refusals(spec, precision):
            raise ValueError("; ".join(refused))
        assert spec.moe
        self.spec, self.precision = spec, precision
        layers, hidden, inner = len(spec.layers), spec.hidden_size, spec.moe.intermediate_size
        self.qkv_rows = spec.q_size + 2 * spec.kv_size
        self.qkv_bytes = self.qkv_rows * hidden * 2
        self.dense_layer_bytes = self.qkv_bytes + hidden * spec.q_size * 2
        self.pair_bytes = inner // PAIR_ROWS * tile_bytes(hidden)
        self.expert_bytes = self.pair_bytes + hidden // OWNED_ROWS * tile_bytes(inner)
        self.router_bytes = EXPERTS * hidden * 2
        # Of a layer: input, post-attention, q and k norm, float32 each.
        self.norm_offsets = {
            "attn_norm": 0,
            "mlp_norm": hidden,
            "q_norm": 2 * hidden,
            "k_norm": 2 * hidden + spec.head_dim,
        }
        self.norm_layer = 2 * hidden + 2 * spec.head_dim
        names: dict[str, list[str]] = {}
        for role in tensors(spec, SourceNames()):
            for section in self._homes(role.name):
                names.setdefault(section, []).append(role.name)
        rows: dict[str, tuple[Format, int, int, int]] = {  # format, rows, columns, bytes
            "dense": ("bf16", layers * (self.qkv_rows + spec.q_size), hidden, layers * self.dense_layer_bytes),
            "head": ("bf16", spec.vocab_size, hidden, spec.vocab_size * hidden * 2),
            "experts": ("nvfp4", layers * EXPERTS * 3 * inner, hidden, layers * EXPERTS * self.expert_bytes),
            "expert_scales": ("f32", layers * EXPERTS * 2, 1, layers * EXPERTS * 8),
            "routers": ("bf16", layers * EXPERTS, hidden, layers * self.router_bytes),
            "embedding": ("bf16", spec.vocab_size, hidden, spec.vocab_size * hidden * 2),
            "norms": ("f32", layers * self.norm_layer + hidden, 1, (layers * self.norm_layer + hidden) * 4),
        }
        self.sections: list[Section] = []
        end = 0
        for name, (fmt, n, cols, size) in rows.items():
            offset = align(end, SECTION_ALIGN)
            self.sections.append(
                Section(
                    name=name, format=fmt, rows=n, cols=cols, offset=offset, nbytes=size, tensors=tuple(names[name])
                )
            )
            end = offset + size
        self.nbytes = align(end, SECTION_ALIGN)

    def offset(self, section: str) -> int:
        return next(s.offset for s in self.sections if s.name == section)

    def _homes(self, tensor: str) -> tuple[str, ...]:
        """Sections that hold bytes of a tensor. A tied head is stored twice: as rows to look up and as pages."""
        part = tensor.rpartition(".")[2]
        if tensor == "embed":
            return ("embedding", "head") if self.spec.tie_word_embeddings else ("embedding",)
        if part.endswith("norm"):
            return ("norms",)
        if ".experts." in tensor:
            return ("experts", "expert_scales")
        return ({"lm_head": "head", "router": "routers"}.get(part, "dense"),)


def tile_bytes(cols: int) -> int:
    """Bytes of an NVFP4 tile of 16 rows: 512 of codes and 64 of scales for every 64 columns."""
    return ceil_div(cols, CHUNK) * (512 + 64)
