"""What the CUDA kernel can do, and where each section lies in its blob. Pure arithmetic, no bytes.

Mirrors csrc/cuda/layout.cuh; docs/CUDA.md says the same in words, and model.cu asserts that the sizes agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from mkpack.layout import SECTION_ALIGN, align, ceil_div
from mkpack.manifest import Manifest, Section
from mkpack.spec import Format, LayerSpec, ModelSpec, MoeSpec, Precision, SourceNames, TensorRole, tensors

# Blocks of the resident kernel, one an SM: what the smallest GPU of that architecture that it is meant for has (an H200
# or H100 SXM, a B200).
GRID = {"sm_90a": 132, "sm_100a": 148}

HEAD_DIMS = (64, 128)
MAX_GROUP = 16  # query heads of one KV head
MAX_EXPERTS, MAX_TOP_K = 512, 32
MAX_MASK_WORDS = 4096  # of 32 of a step's choices, for every expert
PAGE_ROWS = 8  # of a dense matrix's page
SHARE_ROW_BYTES = 128  # of a page's row that one warp reads: 64 columns of bf16 or 128 of fp8
OWNED_ROWS = 16  # of a down tile
PAIR_ROWS = 8  # gate rows, and as many up rows, of a gate/up tile
CHUNK = 64  # columns of an NVFP4 tile that lie together
CHUNK_CODES, CHUNK_SCALES = 512, 64  # bytes of a chunk
PAGE_CHUNKS = 32  # at most, of an NVFP4 page

_ROUTERS = ("router", "routers")  # sections, of CPUs one a layer

_WIDTH: dict[Format, int] = {"bf16": 2, "fp8": 1, "f32": 4}  # bytes of an element of a dense matrix or router


def cuda_refusals(
    spec: ModelSpec, precision: Mapping[Precision, Format], tp: int = 1, router_format: Format = "bf16"
) -> list[str]:
    """Everything that this version of the kernel cannot do of a model, by name; empty when it can run it."""
    return [f"{name} is {value}, the kernel takes {takes}" for name, value, takes in _limits(spec, tp)] + [
        f"{name} is {value}, the kernel takes {' or '.join(allowed)}"
        for name, value, allowed in (
            ("quantise.experts", precision["experts"], ["nvfp4"]),
            ("quantise.attention", precision["attention"], ["bf16", "fp8"]),
            ("quantise.lm_head", precision["lm_head"], ["bf16", "fp8"]),
            ("quantise.embeddings", precision["embeddings"], ["bf16"]),
            ("the routers' dtype", router_format, ["bf16", "f32"]),
        )
        if value not in allowed
    ]


def _limits(spec: ModelSpec, tp: int) -> Iterator[tuple[str, object, object]]:
    """(name, value, what the kernel takes) of everything in a model's shape and features that it does not take."""
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if tp != 1:
        yield "parallel.tp", tp, 1
    if spec.hidden_size % CHUNK:
        yield "hidden_size", spec.hidden_size, f"multiples of {CHUNK}"
    if spec.head_dim not in HEAD_DIMS:
        yield "head_dim", spec.head_dim, " or ".join(map(str, HEAD_DIMS))
    if spec.q_size % CHUNK:
        yield "num_attention_heads * head_dim", spec.q_size, f"multiples of {CHUNK}"
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        yield (
            "num_attention_heads / num_key_value_heads",
            f"{heads} / {kv_heads}",
            f"1 to {MAX_GROUP} query heads a KV head",
        )
    if not 0 < 2 * len(spec.rope.inv_freq) <= spec.head_dim:
        yield "rotary dimensions", 2 * len(spec.rope.inv_freq), f"2 to head_dim ({spec.head_dim})"
    if spec.moe:
        if spec.moe.num_experts > MAX_EXPERTS:
            yield "num_experts", spec.moe.num_experts, f"at most {MAX_EXPERTS}"
        if spec.moe.top_k > min(MAX_TOP_K, spec.moe.num_experts):
            yield "top_k", spec.moe.top_k, f"at most {min(MAX_TOP_K, spec.moe.num_experts)}"
        if spec.moe.num_experts * ceil_div(spec.moe.top_k, 2) > MAX_MASK_WORDS:
            most = f"at most {2 * MAX_MASK_WORDS}"
            yield "num_experts * top_k", spec.moe.num_experts * spec.moe.top_k, most
        if spec.moe.intermediate_size % CHUNK:
            yield "moe intermediate_size", spec.moe.intermediate_size, f"multiples of {CHUNK}"
        yield from _features(spec.moe, "moe ")
    if dense := [i for i, layer in enumerate(spec.layers) if not layer.moe]:
        yield f"mlp of layers {_few(dense)}", "dense", "experts in every layer"
    yield from _features(spec)
    found: dict[tuple[str, str, str], list[int]] = {}
    for i, layer in enumerate(spec.layers):
        for feature in _features(layer, taken=("sliding_window",)):
            found.setdefault(feature, []).append(i)
    for (name, value, takes), layers in found.items():
        yield f"{name} of layers {_few(layers)}", value, takes


def _features(
    spec: ModelSpec | MoeSpec | LayerSpec, prefix: str = "", taken: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, str]]:
    """(name, value, default) of a spec's features that are not `taken`. They are the fields with a default, and a model
    that has one differs from it; so a feature that is new to the spec is refused until the kernel has it."""
    for name, field in type(spec).model_fields.items():
        value: Any = getattr(spec, name)
        if field.is_required() or name in taken or value == field.default:
            continue
        shown = "given" if isinstance(value, BaseModel) else str(value)
        yield prefix + name, shown, "none" if field.default is None else str(field.default)


def _few(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (f", ... ({len(layers)} in all)" if len(layers) > 4 else "")


class CudaLayout:
    """The section table of the one blob that every CUDA architecture shares. Offsets inside sections in bytes.

    precision maps a recipe key to a format; router_format is the checkpoint's own router dtype, bf16 or f32. Raises
    ValueError for a model that cuda_refusals() names something of: ask it first, to tell the user.
    """

    tp = 1

    def __init__(self, spec: ModelSpec, precision: Mapping[Precision, Format], router_format: Format = "bf16") -> None:
        if refused := cuda_refusals(spec, precision, self.tp, router_format):
            raise ValueError("; ".join(refused))
        assert spec.moe
        self.spec, self.precision, self.router_format = spec, dict(precision), router_format
        self.tied = spec.tie_word_embeddings and precision["lm_head"] == precision["embeddings"]
        hidden, inner, experts = spec.hidden_size, spec.moe.intermediate_size, spec.moe.num_experts
        attention = precision["attention"]
        self.num_experts = experts
        # Rows of q, k and v lie as one matrix, those of the output projection behind it.
        self.qkv_rows = spec.q_size + 2 * spec.kv_size
        self.dense_rows = {"q": 0, "k": spec.q_size, "v": spec.q_size + spec.kv_size, "o": self.qkv_rows}
        self.qkv_bytes = matrix_bytes(attention, self.qkv_rows, hidden)
        self.dense_layer_bytes = self.qkv_bytes + matrix_bytes(attention, hidden, spec.q_size)
        self.dense_scale_layer = self.qkv_rows + hidden if attention == "fp8" else 0  # floats
        self.head_rows = align(spec.vocab_size, PAGE_ROWS)
        self.head_bytes = matrix_bytes(precision["lm_head"], spec.vocab_size, hidden)
        self.pair_bytes = inner // PAIR_ROWS * tile_bytes(hidden)
        self.expert_bytes = self.pair_bytes + hidden // OWNED_ROWS * tile_bytes(inner)
        self.router_bytes = experts * hidden * _WIDTH[router_format]
        self.vectors, self.norm_layer = self._vectors()
        self.sections = self._sections()
        self._offsets = {s.name: s.offset for s in self.sections}
        self.nbytes = align(self.sections[-1].offset + self.sections[-1].nbytes, SECTION_ALIGN)

    def offset(self, section: str) -> int:
        return self._offsets[section]

    def __contains__(self, section: str) -> bool:
        return section in self._offsets

    def format_of(self, role: TensorRole) -> Format:
        """Storage format of a tensor (of the first place it is stored at; a tied head may add a second one)."""
        if role.precision:
            return self.precision[role.precision]
        return self.router_format if role.name.endswith(".router") else "f32"

    def _vectors(self) -> tuple[dict[str, tuple[int, int]], int]:
        """(first float, floats) of every vector that a layer may have, without floats where it has not; floats of a
        layer."""
        spec = self.spec
        sizes = {"attn_norm": spec.hidden_size, "mlp_norm": spec.hidden_size}
        sizes |= dict.fromkeys(("q_norm", "k_norm"), spec.head_dim if spec.qk_norm else 0)
        for part, n in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
            sizes[part + "_bias"] = n if spec.qkv_bias else 0
        sizes["o_bias"] = spec.hidden_size if spec.o_bias else 0
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = (end, size)
            end += size
        return places, end

    def _sections(self) -> list[Section]:
        spec, precision, layers, hidden = self.spec, self.precision, len(self.spec.layers), self.spec.hidden_size
        assert spec.moe
        experts = layers * self.num_experts
        norms, scales = layers * self.norm_layer + hidden, layers * self.dense_scale_layer
        names: dict[str, list[str]] = {}
        for role in tensors(spec, SourceNames()):
            for section in self._homes(role.name):
                names.setdefault(section, []).append(role.name)
        dense_rows = layers * (self.qkv_rows + spec.q_size)  # the output projection counted as its transpose
        rows: dict[str, tuple[Format, int, int, int]] = {  # format, rows, columns, bytes
            "dense": (precision["attention"], dense_rows, hidden, layers * self.dense_layer_bytes),
            "head": (precision["lm_head"], spec.vocab_size, hidden, self.head_bytes),
            "experts": ("nvfp4", experts * 3 * spec.moe.intermediate_size, hidden, experts * self.expert_bytes),
            "expert_scales": ("f32", experts * 4, 1, experts * 16),
            "dense_scales": ("f32", scales, 1, scales * 4),
            "head_scales": ("f32", self.head_rows, 1, self.head_rows * 4),
            "routers": (self.router_format, experts, hidden, layers * self.router_bytes),
            "embedding": ("bf16", spec.vocab_size, hidden, spec.vocab_size * hidden * 2),
            "norms": ("f32", norms, 1, norms * 4),
        }
        found: list[Section] = []
        end = 0
        for name, (fmt, n, cols, size) in rows.items():
            if name not in names:  # scales of matrices that have none
                continue
            offset = align(end, SECTION_ALIGN)
            found.append(
                Section(
                    name=name, format=fmt, rows=n, cols=cols, offset=offset, nbytes=size, tensors=tuple(names[name])
                )
            )
            end = offset + size
        return found

    def _homes(self, tensor: str) -> tuple[str, ...]:
        """Sections that hold bytes of a tensor. A tied head is stored twice: as rows to look up and as pages."""
        part = tensor.rpartition(".")[2]
        head = ("head", "head_scales") if self.precision["lm_head"] == "fp8" else ("head",)
        if tensor == "embed":
            return ("embedding", *head) if self.spec.tie_word_embeddings else ("embedding",)
        if tensor == "lm_head":
            return head
        if tensor == "final_norm" or part in self.vectors:
            return ("norms",)
        if ".experts." in tensor:
            return ("experts", "expert_scales")
        if part == "router":
            return ("routers",)
        return ("dense", "dense_scales") if self.precision["attention"] == "fp8" else ("dense",)


def cuda_layout_of(m: Manifest) -> CudaLayout | None:
    """The CUDA layout of an artifact, made again from its manifest; None for a model that this version refuses."""
    routers = [s.format for table in m.sections.values() for s in table if s.name.rpartition(".")[2] in _ROUTERS]
    try:
        return CudaLayout(m.spec, m.precision, *routers[:1])
    except (ValueError, AssertionError, ArithmeticError, LookupError):
        return None


def row_bytes(fmt: Format, cols: int) -> int:
    """Bytes of a dense matrix's row, bf16 or fp8, in its pages: padded to whole shares of a warp."""
    return align(cols * _WIDTH[fmt], SHARE_ROW_BYTES)


def matrix_bytes(fmt: Format, rows: int, cols: int) -> int:
    """Bytes of a dense matrix, bf16 or fp8: whole units of 8 rows."""
    return align(rows, PAGE_ROWS) * row_bytes(fmt, cols)


def tile_bytes(cols: int) -> int:
    """Bytes of an NVFP4 tile of 16 rows: 512 of codes and 64 of scales for every 64 columns."""
    return ceil_div(cols, CHUNK) * (CHUNK_CODES + CHUNK_SCALES)
