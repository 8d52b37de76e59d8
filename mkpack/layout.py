"""Where every tensor lies in a rank's blob: sections, offsets and the split along N. Pure arithmetic, no bytes.

A blob is a list of page-aligned sections in the order one step streams them. Every rank has the same table, so one
compiled kernel serves every rank. A matrix section is a run of 16-row tiles (`pack.py` has their byte order); next to
it, where the format has one, a `.scale` section holds float32 per tile (nvfp4) or per row (fp8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mkpack.errors import UserError
from mkpack.manifest import Manifest, Section
from mkpack.spec import Format, ModelSpec, MoeSpec, TensorRole

TILE_ROWS = 16
BLOCK_COLS = 16
SECTION_ALIGN = 4096


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(n: int, to: int) -> int:
    return ceil_div(n, to) * to


def tile_bytes(fmt: Format, cols: int) -> int:
    """Bytes of one tile of 16 rows and `cols` columns (padded to whole blocks of 16)."""
    blocks = ceil_div(cols, BLOCK_COLS)
    match fmt:
        case "nvfp4":
            return align(blocks * 16, 64) + blocks * 128
        case "fp8":
            return blocks * 256
        case "bf16":
            return blocks * 512
        case "f32":
            return blocks * 1024


def scale_floats(fmt: Format) -> int:
    """float32 values a tile has in its `.scale` section."""
    return {"nvfp4": 1, "fp8": TILE_ROWS, "bf16": 0, "f32": 0}[fmt]


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + rows) of a tensor fill the section's tiles tile, tile + stride, ...; the rest is zero."""

    tensor: str
    row: int
    rows: int
    tile: int
    tiles: int
    stride: int = 1


@dataclass(frozen=True)
class HeadSplit:
    """Attention heads of one rank. With fewer KV heads than ranks, neighbouring ranks hold the same KV head."""

    q_heads: int
    kv_heads: int
    replicas: int

    def first_kv_head(self, rank: int) -> int:
        return rank * self.kv_heads // self.replicas


def split_heads(spec: ModelSpec, tp: int) -> HeadSplit:
    """Raises UserError when the heads cannot be dealt evenly over `tp` ranks."""
    heads, kv = spec.num_attention_heads, spec.num_key_value_heads
    if heads % tp == 0 and kv % tp == 0:
        return HeadSplit(heads // tp, kv // tp, 1)
    if heads % tp == 0 and tp % kv == 0:
        return HeadSplit(heads // tp, 1, tp // kv)
    fits = [n for n in range(1, 9) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
    raise UserError(
        f"parallel.tp: {tp} ranks cannot share {heads} attention heads and {kv} KV heads evenly; "
        f"this model runs on {', '.join(map(str, fits))} ranks"
    )


class Layout:
    """The section table of one model at given precisions and rank count.

    precision maps a recipe key (TensorRole.precision) to a format, and "down_input" to how what goes into the experts'
    down projection is carried, where it is rounded; router_format is the checkpoint's own router dtype.
    """

    per_device = 1  # only ranks on GPUs may share a device

    def __init__(self, spec: ModelSpec, precision: Mapping[str, Format], tp: int = 1, router_format: Format = "f32"):
        self.spec, self.precision, self.tp, self.router_format = spec, dict(precision), tp, router_format
        self.down_input = self.precision.get("down_input")
        self.heads = split_heads(spec, tp)
        self.tied = spec.tie_word_embeddings and self.precision["embeddings"] == self.precision["lm_head"]
        self.sections: list[Section] = []
        self._pieces: dict[str, list[list[Piece]]] = {}
        self._end = 0
        self._build()
        # Kernels may load a whole vector that begins in a tile's last bytes.
        self.nbytes = align(self._end + 64, SECTION_ALIGN)

    def section(self, name: str) -> Section:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def pieces(self, section: str, rank: int) -> list[Piece]:
        """What a matrix section of this rank is made of; empty for `.scale` sections, which follow their matrix."""
        return self._pieces[section][rank]

    def tiles(self, section: str) -> int:
        return self.section(section).rows // TILE_ROWS

    def rank_tiles(self, rows: int) -> int:
        """Tiles a rank holds of a matrix of `rows` rows that is split along N."""
        return ceil_div(ceil_div(rows, TILE_ROWS), self.tp)

    def homes(self, tensor: str) -> list[tuple[str, int, Piece]]:
        """(section, rank, piece) of every place a tensor is stored at."""
        return self._homes[tensor]

    @cached_property
    def _by_name(self) -> dict[str, Section]:
        return {s.name: s for s in self.sections}

    @cached_property
    def _homes(self) -> dict[str, list[tuple[str, int, Piece]]]:
        homes: dict[str, list[tuple[str, int, Piece]]] = {}
        for name, ranks in self._pieces.items():
            for rank, pieces in enumerate(ranks):
                for piece in pieces:
                    homes.setdefault(piece.tensor, []).append((name, rank, piece))
        return homes

    def format_of(self, role: TensorRole) -> Format:
        """Storage format of a tensor (of the first place it is stored at; a tied head may add a second one)."""
        if role.precision:
            return self.precision[role.precision]
        return self.router_format if role.name.endswith(".router") else "f32"

    # -- building the table ------------------------------------------------------------------------------------------

    def _add(self, name: str, fmt: Format, rows: int, cols: int, nbytes: int, tensors: tuple[str, ...]) -> None:
        offset = align(self._end, SECTION_ALIGN)
        self.sections.append(
            Section(name=name, format=fmt, rows=rows, cols=cols, offset=offset, nbytes=nbytes, tensors=tensors)
        )
        self._end = offset + nbytes

    def _vector(self, name: str, n: int, ranks: list[list[Piece]] | None = None) -> None:
        """float32 [n]; like a one-column matrix whose tiles are plain runs of 16 values."""
        tiles = ceil_div(n, TILE_ROWS)
        self._pieces[name] = ranks or [[Piece(name, 0, n, 0, tiles)]] * self.tp
        tensors = tuple(dict.fromkeys(p.tensor for rank in self._pieces[name] for p in rank))
        self._add(name, "f32", tiles * TILE_ROWS, 1, tiles * TILE_ROWS * 4, tensors)

    def _matrix(self, name: str, fmt: Format, cols: int, tiles: int, ranks: list[list[Piece]]) -> None:
        self._pieces[name] = ranks
        tensors = tuple(dict.fromkeys(p.tensor for rank in ranks for p in rank))
        self._add(name, fmt, tiles * TILE_ROWS, cols, tiles * tile_bytes(fmt, cols), tensors)
        if n := scale_floats(fmt):
            self._add(name + ".scale", "f32", tiles * n, 1, tiles * n * 4, tensors)

    def _split_matrix(self, name: str, fmt: Format, rows: int, cols: int) -> None:
        """A tensor [rows, cols] that is split along N, under its own name."""
        self._matrix(name, fmt, cols, self.rank_tiles(rows), [[self._split(name, rows, r)] for r in range(self.tp)])

    def _split(self, tensor: str, rows: int, rank: int, tile: int = 0, stride: int = 1) -> Piece:
        """Rank's share of a matrix split along N: whole tiles, the last ranks may hold fewer rows or none."""
        tiles = self.rank_tiles(rows)
        row = min(rank * tiles * TILE_ROWS, rows)
        return Piece(tensor, row, min(tiles * TILE_ROWS, rows - row), tile, tiles, stride)

    def _build(self) -> None:
        spec = self.spec
        vocab_tiles = self.rank_tiles(spec.vocab_size) * self.tp
        whole = [[Piece("embed", 0, spec.vocab_size, 0, vocab_tiles)]] * self.tp
        self._matrix("embed", self.precision["embeddings"], spec.hidden_size, vocab_tiles, whole)
        for i in range(len(spec.layers)):
            self._attention(i)
            self._mlp(i)
        self._vector("final_norm", spec.hidden_size)
        if not self.tied:
            source = "embed" if spec.tie_word_embeddings else "lm_head"
            ranks = [[self._split(source, spec.vocab_size, r)] for r in range(self.tp)]
            tiles = self.rank_tiles(spec.vocab_size)
            self._matrix("lm_head", self.precision["lm_head"], spec.hidden_size, tiles, ranks)

    def qkv_tiles(self) -> tuple[int, int]:
        """Tiles of a rank's q part and of its k part (v has as many as k)."""
        d = self.spec.head_dim
        return ceil_div(self.heads.q_heads * d, TILE_ROWS), ceil_div(self.heads.kv_heads * d, TILE_ROWS)

    def _qkv_pieces(self, i: int, rank: int, suffix: str) -> list[Piece]:
        d, heads = self.spec.head_dim, self.heads
        tq, tk = self.qkv_tiles()
        kv_row, kv_rows = heads.first_kv_head(rank) * d, heads.kv_heads * d
        pieces = [
            Piece(f"layers.{i}.q{suffix}", rank * heads.q_heads * d, heads.q_heads * d, 0, tq),
            Piece(f"layers.{i}.k{suffix}", kv_row, kv_rows, tq, tk),
            Piece(f"layers.{i}.v{suffix}", kv_row, kv_rows, tq + tk, tk),
        ]
        if self.spec.attention_gate and not suffix:
            q = pieces[0]
            pieces.append(Piece(f"layers.{i}.attn_gate", q.row, q.rows, tq + 2 * tk, tq))
        return pieces

    def _attention(self, i: int) -> None:
        spec, p, fmt = self.spec, f"layers.{i}.", self.precision["attention"]
        self._vector(p + "attn_norm", spec.hidden_size)
        tq, tk = self.qkv_tiles()
        tiles = tq + 2 * tk + (tq if spec.attention_gate else 0)
        self._matrix(p + "qkv", fmt, spec.hidden_size, tiles, [self._qkv_pieces(i, r, "") for r in range(self.tp)])
        if spec.qkv_bias:
            self._vector(p + "qkv_bias", tiles * TILE_ROWS, [self._qkv_pieces(i, r, "_bias") for r in range(self.tp)])
        if spec.qk_norm and spec.qk_norm_weight:
            whole = spec.qk_norm_over == "projection"
            self._vector(p + "q_norm", spec.q_size if whole else spec.head_dim)
            self._vector(p + "k_norm", spec.kv_size if whole else spec.head_dim)
        if spec.attention_sinks:
            self._vector(p + "sinks", spec.num_attention_heads)
        self._split_matrix(p + "o", fmt, spec.hidden_size, spec.q_size)
        if spec.o_bias:
            self._vector(p + "o_bias", spec.hidden_size)
        if spec.sandwich:
            self._vector(p + "attn_residual_gate", spec.hidden_size)

    def _mlp(self, i: int) -> None:
        spec, moe, p = self.spec, self.spec.moe, f"layers.{i}."
        self._vector(p + "mlp_norm", spec.hidden_size)
        if spec.layers[i].moe:
            assert moe is not None
            self._router(moe, p)
            prefixes = [f"{p}experts.{e}." for e in range(moe.num_experts)]
            width, n, bias = moe.hidden_size or spec.hidden_size, moe.intermediate_size, moe.expert_bias
            scales = moe.num_experts if self.down_input == "nvfp4" else 0
            self._experts(p, prefixes, self.precision["experts"], width, n, bias, scales)
            if moe.hidden_size:
                self._vector(p + "expert_norm", width)
                self._split_matrix(p + "post_proj", self.precision["dense"], spec.hidden_size, width)
        else:
            assert spec.dense_intermediate_size is not None
            n, fmt = spec.dense_intermediate_size, self.precision["dense"]
            self._experts(p, [p + "dense."], fmt, spec.hidden_size, n, bias=False)
        if spec.sandwich:
            self._vector(p + "mlp_out_norm", spec.hidden_size)
            self._vector(p + "mlp_residual_gate", spec.hidden_size)

    def _router(self, moe: MoeSpec, p: str) -> None:
        """What comes between the norm and the experts."""
        tiles = ceil_div(moe.num_experts, TILE_ROWS)
        whole = [[Piece(p + "router", 0, moe.num_experts, 0, tiles)]] * self.tp
        self._matrix(p + "router", self.router_format, self.spec.hidden_size, tiles, whole)
        if moe.router_bias:
            self._vector(p + "router_bias", moe.num_experts)
        if moe.hidden_size:
            self._split_matrix(p + "pre_proj", self.precision["dense"], moe.hidden_size, self.spec.hidden_size)
        if moe.choice_bias:
            self._vector(p + "choice_bias", moe.num_experts)
        if moe.hidden_size:
            self._vector(p + "pre_norm", moe.hidden_size)

    def _experts(
        self, p: str, prefixes: list[str], fmt: Format, width: int, n: int, bias: bool, input_scales: int = 0
    ) -> None:
        """gate, up and down of experts that are `width` wide outside and `n` inside; a dense MLP is one of them.
        input_scales: how many global scales of down's input there are, one an expert, or none."""
        inner, outer = self.rank_tiles(n), self.rank_tiles(width)

        def gate_up(rank: int, suffix: str) -> list[Piece]:
            pairs: list[Piece] = []
            for e, x in enumerate(prefixes):
                pairs.append(self._split(f"{x}gate{suffix}", n, rank, 2 * inner * e, 2))
                pairs.append(self._split(f"{x}up{suffix}", n, rank, 2 * inner * e + 1, 2))
            return pairs

        def down(rank: int, suffix: str) -> list[Piece]:
            return [self._split(f"{x}down{suffix}", width, rank, outer * e) for e, x in enumerate(prefixes)]

        pairs, tiles = 2 * inner * len(prefixes), outer * len(prefixes)
        self._matrix(p + "gate_up", fmt, width, pairs, [gate_up(r, "") for r in range(self.tp)])
        if bias:
            self._vector(p + "gate_up_bias", pairs * TILE_ROWS, [gate_up(r, "_bias") for r in range(self.tp)])
        if input_scales:
            self._vector(p + "down_input_scale", input_scales)
        self._matrix(p + "down", fmt, n, tiles, [down(r, "") for r in range(self.tp)])
        if bias:
            self._vector(p + "down_bias", tiles * TILE_ROWS, [down(r, "_bias") for r in range(self.tp)])


def layout_of(m: Manifest) -> Layout | None:
    """The CPU layout of an artifact, made again from its manifest; None for a spec that no family file makes. Its
    sections are the manifest's only when this version of mkpack lays models out as the one that built it."""
    sections = [s for table in m.sections.values() for s in table]
    routers = {s.format for s in sections if s.name == "routers" or s.name.endswith(".router")}
    try:
        return Layout(m.spec, {str(k): v for k, v in m.precision.items()}, m.tp, min(routers, default="f32"))
    except (UserError, AssertionError, ArithmeticError, LookupError):
        return None
