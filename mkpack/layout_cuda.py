"""What the CUDA kernel can do, and where each section lies in its blob. Pure arithmetic, no bytes.

Mirrors csrc/cuda/layout.cuh; docs/CUDA.md says the same in words, and model.cu asserts that the sizes agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from mkpack.errors import UserError
from mkpack.layout import SECTION_ALIGN, align, ceil_div, split_heads
from mkpack.manifest import Manifest, Section
from mkpack.spec import Format, LayerSpec, ModelSpec, MoeSpec, PrecisionKey, SourceNames, TensorRole, tensors

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
VECTOR_FLOATS = 4  # every vector begins at a multiple of so many

EXPERT_BIASES = ("gate_bias", "up_bias", "down_bias")

# Features that step_kernel has, by the fields of the spec. decode_kernel has none of them.
_TAKEN: dict[type[BaseModel], tuple[str, ...]] = {
    ModelSpec: (
        "attention_gate",
        "attention_out_norm",
        "attention_sinks",
        "centered_norms",
        "embed_norm",
        "logit_scale",
        "logit_softcap",
        "qk_norm_over",
        "qk_norm_weight",
        "qk_scale",
        "sandwich",
    ),
    MoeSpec: (
        "choice_bias",
        "expert_bias",
        "expert_norm_eps",
        "hidden_size",
        "norm_topk_eps",
        "routed_scaling_factor",
        "router_bias",
        "router_scale",
        "scoring",
        "swiglu",
    ),
    LayerSpec: ("rope", "sliding_window"),
}

_ROUTERS = ("router", "routers")  # sections, of CPUs one a layer

_WIDTH: dict[Format, int] = {"bf16": 2, "fp8": 1, "f32": 4}  # bytes of an element of a dense matrix or router


def cuda_refusals(
    spec: ModelSpec, precision: Mapping[PrecisionKey, Format], tp: int = 1, router_format: Format = "bf16"
) -> list[str]:
    """Everything that this version of the kernel cannot do of a model, by name; empty when it can run it."""
    return [f"{name} is {value}, the kernel takes {takes}" for name, value, takes in _limits(spec, tp)] + [
        f"{name} is {value}, the kernel takes {' or '.join(allowed)}"
        for name, value, allowed in (
            ("quantise.experts", precision["experts"], ["nvfp4"]),
            ("quantise.attention", precision["attention"], ["bf16", "fp8"]),
            *([("quantise.dense", precision["dense"], ["bf16", "fp8"])] if _has_mlp_matrices(spec) else []),
            ("quantise.lm_head", precision["lm_head"], ["bf16", "fp8"]),
            ("quantise.embeddings", precision["embeddings"], ["bf16"]),
            ("quantise.down_input", precision.get("down_input", "bf16"), ["bf16"]),
            ("the routers' dtype", router_format, ["bf16", "f32"]),
        )
        if value not in allowed
    ]


def _limits(spec: ModelSpec, tp: int) -> Iterator[tuple[str, object, object]]:
    """(name, value, what the kernel takes) of everything in a model's shape and features that it does not take."""
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    try:
        split_heads(spec, tp)
    except UserError as e:
        yield "parallel.tp", tp, str(e).rpartition("runs on ")[2]
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
        if (spec.moe.hidden_size or 0) % CHUNK:
            yield "moe hidden_size", spec.moe.hidden_size, f"multiples of {CHUNK}"
        if spec.moe.scoring == "softmax" and spec.moe.choice_bias:
            yield "moe choice_bias", True, "False where scoring is softmax"
        if spec.moe.scoring == "softmax" and spec.moe.norm_topk_eps:
            yield "moe norm_topk_eps", spec.moe.norm_topk_eps, "0.0 where scoring is softmax"
        yield from _features(spec.moe, "moe ", _TAKEN[MoeSpec])
    else:
        yield "mlp of every layer", "dense", "models with experts"
    if any(not layer.moe for layer in spec.layers) and (spec.dense_intermediate_size or 0) % PAGE_ROWS:
        yield "dense intermediate_size", spec.dense_intermediate_size, f"multiples of {PAGE_ROWS}"
    yield from _features(spec, taken=_TAKEN[ModelSpec])
    found: dict[tuple[str, str, str], list[int]] = {}
    for i, layer in enumerate(spec.layers):
        for feature in _features(layer, taken=_TAKEN[LayerSpec]):
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


def step_only(spec: ModelSpec) -> bool:
    """Whether a model has any feature of _TAKEN, or dense layers, so that step_kernel alone can run it."""
    parts: list[ModelSpec | MoeSpec | LayerSpec] = [spec, *([spec.moe] if spec.moe else []), *spec.layers]
    return not all(layer.moe for layer in spec.layers) or any(True for part in parts for _ in _features(part))


def _has_mlp_matrices(spec: ModelSpec) -> bool:
    """Whether any matrix of a layer's MLP is neither a router nor an expert's."""
    return not all(layer.moe for layer in spec.layers) or bool(spec.moe and spec.moe.hidden_size)


def _few(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (f", ... ({len(layers)} in all)" if len(layers) > 4 else "")


class CudaLayout:
    """The section table of a rank's blob, which every CUDA architecture and every rank shares. Rows, units and bytes
    are a rank's; offsets inside sections in bytes.

    precision maps a recipe key to a format; router_format is the checkpoint's own router dtype, bf16 or f32; per_device
    is how many of the `tp` ranks may share a device, which decides grids and no byte. Raises ValueError for a model
    that cuda_refusals() names something of: ask it first, to tell the user.
    """

    def __init__(
        self,
        spec: ModelSpec,
        precision: Mapping[PrecisionKey, Format],
        router_format: Format = "bf16",
        tp: int = 1,
        per_device: int = 1,
    ) -> None:
        if refused := cuda_refusals(spec, precision, tp, router_format):
            raise ValueError("; ".join(refused))
        assert spec.moe
        self.spec, self.precision, self.router_format = spec, dict(precision), router_format
        self.tp, self.per_device, self.heads = tp, per_device, split_heads(spec, tp)
        self.down_input = precision.get("down_input")
        self.tied = spec.tie_word_embeddings and precision["lm_head"] == precision["embeddings"]
        hidden, inner, experts = spec.hidden_size, spec.moe.intermediate_size, spec.moe.num_experts
        attention = precision["attention"]
        self.num_experts = experts
        # Of experts that are as wide as the model the second is its width, and there is no first.
        self.narrow, self.expert_hidden = spec.moe.hidden_size or 0, spec.moe.hidden_size or hidden
        # Rows of q, k, v and the attention gate lie as one matrix, those of the output projection behind it.
        self.q_rows, self.kv_rows = self.heads.q_heads * spec.head_dim, self.heads.kv_heads * spec.head_dim
        gate_at = self.q_rows + 2 * self.kv_rows
        self.qkv_rows = gate_at + (self.q_rows if spec.attention_gate else 0)
        self.dense_rows = {"q": 0, "k": self.q_rows, "v": self.q_rows + self.kv_rows, "o": self.qkv_rows}
        if spec.attention_gate:
            self.dense_rows["attn_gate"] = gate_at
        # Equal shares of whole units; the last ranks' may be zeros at the end.
        self.units, self.down_units = (ceil_div(n // OWNED_ROWS, tp) for n in (hidden, self.expert_hidden))
        self.pair_units = ceil_div(inner // PAIR_ROWS, tp)
        self.hidden_rows, self.inner_rows = self.units * OWNED_ROWS, self.pair_units * PAIR_ROWS
        self.head_rows = ceil_div(ceil_div(spec.vocab_size, PAGE_ROWS), tp) * PAGE_ROWS
        self.qkv_bytes = matrix_bytes(attention, self.qkv_rows, hidden)
        self.dense_layer_bytes = self.qkv_bytes + matrix_bytes(attention, self.hidden_rows, spec.q_size)
        self.dense_scale_layer = self.qkv_rows + self.hidden_rows if attention == "fp8" else 0  # floats
        self.head_bytes = matrix_bytes(precision["lm_head"], self.head_rows, hidden)
        self.pair_bytes = self.pair_units * tile_bytes(self.expert_hidden)
        self.expert_bytes = self.pair_bytes + self.down_units * tile_bytes(inner)
        self.dense_inner = 0 if all(layer.moe for layer in spec.layers) else spec.dense_intermediate_size or 0
        # Of the whole model are `narrow` and `dense_inner`; of a rank, padded as above, these.
        self.narrow_rows, self.dense_inner_rows = (
            ceil_div(n // PAGE_ROWS, tp) * PAGE_ROWS for n in (self.narrow, self.dense_inner)
        )
        self.mlp = self._mlp()
        self.router_bytes = experts * hidden * _WIDTH[router_format]
        self.vectors, self.norm_layer, self.norm_moe_only = self._vectors()
        self.sections = self._sections()
        self._offsets = {s.name: s.offset for s in self.sections}
        self.nbytes = align(self.sections[-1].offset + self.sections[-1].nbytes, SECTION_ALIGN)

    def moe_layers(self, before: int | None = None) -> int:
        """How many layers have experts, of all or of those before one: sections of experts count only these."""
        return sum(layer.moe for layer in self.spec.layers[:before])

    def vectors_at(self, layer: int) -> int:
        """Float at which a layer's vectors begin; behind the last layer's lies the final norm."""
        return layer * self.norm_layer - (layer - self.moe_layers(layer)) * self.norm_moe_only

    def mlp_at(self, layer: int) -> tuple[int, int]:
        """Byte at which a layer's matrices begin in the mlp section, and float of their row scales in theirs."""
        moe = self.moe_layers(layer)
        of_moe, of_dense = self.mlp
        return tuple(moe * of_moe[i] + (layer - moe) * of_dense[i] for i in (0, 1))  # type: ignore[return-value]

    def _mlp(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(bytes, floats of row scales) in the mlp sections of a layer with experts, and of a dense layer."""
        hidden, fmt = self.spec.hidden_size, self.precision["dense"]

        def part(*matrices: tuple[int, int]) -> tuple[int, int]:
            nbytes = sum(matrix_bytes(fmt, rows, cols) for rows, cols in matrices)
            return nbytes, sum(rows for rows, _ in matrices) if fmt == "fp8" else 0

        rows, narrow, inner = self.hidden_rows, self.narrow, self.dense_inner
        of_moe = part((self.narrow_rows, hidden), (rows, narrow)) if narrow else (0, 0)
        return of_moe, part((2 * self.dense_inner_rows, hidden), (rows, inner)) if inner else (0, 0)

    def offset(self, section: str) -> int:
        return self._offsets[section]

    def __contains__(self, section: str) -> bool:
        return section in self._offsets

    def format_of(self, role: TensorRole) -> Format:
        """Storage format of a tensor (of the first place it is stored at; a tied head may add a second one)."""
        if role.precision:
            return self.precision[role.precision]
        return self.router_format if role.name.endswith(".router") else "f32"

    def _vectors(self) -> tuple[dict[str, tuple[int, int]], int, int]:
        """(first float, floats) of every vector that a layer may have, without floats where it has not; floats of a
        layer, and those of them, at its end, that dense layers do without."""
        spec = self.spec
        sizes = {"attn_norm": spec.hidden_size, "mlp_norm": spec.hidden_size}
        parts = {"q": self.q_rows, "k": self.kv_rows, "v": self.kv_rows}
        for part in ("q", "k"):
            n = spec.head_dim if spec.qk_norm_over == "head" else parts[part]
            sizes[part + "_norm"] = n if spec.qk_norm and spec.qk_norm_weight else 0
        for part, n in parts.items():
            sizes[part + "_bias"] = n if spec.qkv_bias else 0
        sizes["o_bias"] = spec.hidden_size if spec.o_bias else 0
        sizes["sinks"] = self.heads.q_heads if spec.attention_sinks else 0
        sandwich = spec.hidden_size if spec.sandwich else 0
        sizes |= dict.fromkeys(("attn_residual_gate", "mlp_out_norm", "mlp_residual_gate"), sandwich)
        moe = spec.moe
        assert moe
        of_moe = {
            "pre_norm": self.narrow,
            "expert_norm": self.narrow,
            "router_bias": moe.num_experts if moe.router_bias else 0,
            "choice_bias": moe.num_experts if moe.choice_bias else 0,
            # Of every expert those of its gate and up, then of every expert those of its down projection.
            "gate_up_bias": moe.num_experts * 2 * self.inner_rows if moe.expert_bias else 0,
            "down_bias": moe.num_experts * self.down_units * OWNED_ROWS if moe.expert_bias else 0,
        }
        places, end = {}, 0
        for name, size in {**sizes, **of_moe}.items():
            places[name] = (end, size)
            end += align(size, VECTOR_FLOATS)
        return places, end, end - places["pre_norm"][0]

    def _sections(self) -> list[Section]:
        spec, precision, layers, hidden = self.spec, self.precision, len(self.spec.layers), self.spec.hidden_size
        assert spec.moe
        moe_layers = self.moe_layers()
        experts = moe_layers * self.num_experts
        norms, scales = self.vectors_at(layers) + hidden, layers * self.dense_scale_layer
        mlp_bytes, mlp_scales = self.mlp_at(layers)
        # Every matrix counted as rows of the model's width, those of its height as their transpose.
        of_moe, of_dense = (n * self.hidden_rows // hidden for n in (self.narrow, self.dense_inner))
        mlp_rows = moe_layers * (self.narrow_rows + of_moe)
        mlp_rows += (layers - moe_layers) * (2 * self.dense_inner_rows + of_dense)
        names: dict[str, list[str]] = {}
        for role in tensors(spec, SourceNames(fused="rows")):  # which have biases too
            for section in self._homes(role.name):
                names.setdefault(section, []).append(role.name)
        # The output projection is counted as its transpose.
        dense_rows = layers * (self.qkv_rows + spec.q_size * self.hidden_rows // hidden)
        rows: dict[str, tuple[Format, int, int, int]] = {  # format, rows, columns, bytes
            "dense": (precision["attention"], dense_rows, hidden, layers * self.dense_layer_bytes),
            "head": (precision["lm_head"], min(spec.vocab_size, self.head_rows), hidden, self.head_bytes),
            "experts": ("nvfp4", experts * 3 * self.inner_rows, self.expert_hidden, experts * self.expert_bytes),
            "expert_scales": ("f32", experts * 4, 1, experts * 16),
            "dense_scales": ("f32", scales, 1, scales * 4),
            "head_scales": ("f32", self.head_rows, 1, self.head_rows * 4),
            "routers": (self.router_format, experts, hidden, moe_layers * self.router_bytes),
            "embedding": ("bf16", spec.vocab_size, hidden, spec.vocab_size * hidden * 2),
            "norms": ("f32", norms, 1, norms * 4),
            "mlp": (precision["dense"], mlp_rows, hidden, mlp_bytes),
            "mlp_scales": ("f32", mlp_scales, 1, mlp_scales * 4),
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

    def rows(self, tensor: str, rank: int) -> slice:
        """Rows of a canonical tensor that a rank stores; of a tied head those of "embed"."""
        part = tensor.rpartition(".")[2]
        if self.tp == 1:
            return slice(None)
        if part == "sinks":
            return slice(rank * self.heads.q_heads, (rank + 1) * self.heads.q_heads)
        of_projection = self.spec.qk_norm_over == "projection"
        if part in ("q", "q_bias", "attn_gate") or (part == "q_norm" and of_projection):
            return slice(rank * self.q_rows, (rank + 1) * self.q_rows)
        if part in ("k", "v", "k_bias", "v_bias") or (part == "k_norm" and of_projection):
            first = self.heads.first_kv_head(rank) * self.spec.head_dim
            return slice(first, first + self.kv_rows)
        share = {"o": self.hidden_rows, **dict.fromkeys(("gate", "up", "gate_bias", "up_bias"), self.inner_rows)}
        share |= dict.fromkeys(("down", "down_bias"), self.down_units * OWNED_ROWS)
        share |= {"lm_head": self.head_rows, "embed": self.head_rows}
        share |= {"pre_proj": self.narrow_rows, "post_proj": self.hidden_rows}
        if ".dense." in tensor:
            share |= {"gate": self.dense_inner_rows, "up": self.dense_inner_rows, "down": self.hidden_rows}
        n = share.get(part)
        return slice(None) if n is None else slice(rank * n, (rank + 1) * n)

    def held(self, tensor: str, rank: int) -> slice:
        """Rows of a canonical tensor that a rank's blob is made of: those of "embed" all, since it is whole there."""
        return slice(None) if tensor == "embed" else self.rows(tensor, rank)

    def _homes(self, tensor: str) -> tuple[str, ...]:
        """Sections that hold bytes of a tensor. A tied head is stored twice: as rows to look up and as pages."""
        part = tensor.rpartition(".")[2]
        head = ("head", "head_scales") if self.precision["lm_head"] == "fp8" else ("head",)
        if tensor == "embed":
            return ("embedding", *head) if self.spec.tie_word_embeddings else ("embedding",)
        if tensor == "lm_head":
            return head
        if tensor == "final_norm" or part in self.vectors or part in EXPERT_BIASES:
            return ("norms",)
        if ".experts." in tensor:
            return ("experts", "expert_scales")
        if part == "router":
            return ("routers",)
        if ".dense." in tensor or part in ("pre_proj", "post_proj"):
            return ("mlp", "mlp_scales") if self.precision["dense"] == "fp8" else ("mlp",)
        return ("dense", "dense_scales") if self.precision["attention"] == "fp8" else ("dense",)


def cuda_layout_of(m: Manifest) -> CudaLayout | None:
    """The CUDA layout of an artifact, made again from its manifest; None for a model that this version refuses."""
    routers = [s.format for table in m.sections.values() for s in table if s.name.rpartition(".")[2] in _ROUTERS]
    try:
        return CudaLayout(m.spec, m.precision, routers[0] if routers else "bf16", m.tp, per_device_of(m))
    except (ValueError, AssertionError, ArithmeticError, LookupError):
        return None


def per_device_of(m: Manifest) -> int:
    """How many ranks may share a device, as the kernels' descriptions say it; 1 where they do not."""
    for kernel in m.kernels.values():
        facts = json.loads(kernel.description)
        if kernel.layout == "cuda" and isinstance(facts, dict) and type(found := facts.get("per_device")) is int:
            return found if 1 <= found <= m.tp else 1
    return 1


def row_bytes(fmt: Format, cols: int) -> int:
    """Bytes of a dense matrix's row, bf16 or fp8, in its pages: padded to whole shares of a warp."""
    return align(cols * _WIDTH[fmt], SHARE_ROW_BYTES)


def matrix_bytes(fmt: Format, rows: int, cols: int) -> int:
    """Bytes of a dense matrix, bf16 or fp8: whole units of 8 rows."""
    return align(rows, PAGE_ROWS) * row_bytes(fmt, cols)


def tile_bytes(cols: int) -> int:
    """Bytes of an NVFP4 tile of 16 rows: 512 of codes and 64 of scales for every 64 columns."""
    return ceil_div(cols, CHUNK) * (CHUNK_CODES + CHUNK_SCALES)
