"""How a model's sizes fall on the SMs of a GPU: who has which rows, and what of an SM's shared memory is whose.

Mirrors csrc/cuda/{layout,step_block,decode_block}.cuh; model.h carries the results, and model.cu asserts that they are
equal there.
"""

from __future__ import annotations

from mkpack.errors import UserError
from mkpack.layout import align, ceil_div
from mkpack.layout_cuda import (
    CHUNK,
    CHUNK_CODES,
    CHUNK_SCALES,
    GRID,
    OWNED_ROWS,
    PAGE_CHUNKS,
    PAGE_ROWS,
    SHARE_ROW_BYTES,
    CudaLayout,
    step_only,
    tile_bytes,
)
from mkpack.schedule.ir import Machine, Region, Ring, Role

SHARED_LIMIT = 227 << 10  # bytes of a block
WARPS = 16  # consumers
THREADS = (4 + WARPS) * 32
MAX_TOKENS = 16
PAGE_BYTES = WARPS * SHARE_ROW_BYTES * PAGE_ROWS  # of a dense matrix
KV_TILE = 16  # positions of the KV cache that lie together
FEW_TILES = 64  # up to so many a unit of the step kernel's attention has one block of 16 queries, else up to four
SQUADS = 4
STEP_SLOTS = 4  # of each ring of the step kernel
DENSE_SLOTS, EXPERT_SLOTS = 8, 4  # of decode_kernel
DENSE_CHUNK = 8  # row units between two reductions
COPIES, LOGIT_COPIES = 4, 8  # of what the whole grid polls
MIN_LOG_SPLITS, MAX_LOG_SPLITS = 3, 5
MAX_UNITS = 128  # attention units of decode_kernel
# Registers move between the warps that stream and those that compute, by groups of four warps.
LAUNCH_REGISTERS = 96
ROLES = (Role("streams and watches", 4, 64), Role("computes", WARPS, 104))

_SAMPLER_LIST, _SAMPLER_SEEN = 2048, 1 << 18
SAMPLER_BYTES = align(max(_SAMPLER_SEEN // 8, 12 * _SAMPLER_LIST, 8 * _SAMPLER_LIST) + WARPS * 12 + 8 + 12, 8)


Uses = dict[str, tuple[int, tuple[str, ...]]]  # name -> bytes, and the phases that use them, () all


class Shape:
    """Sizes of one rank of a model on one architecture; names as in the kernels. What decides in which order a number
    is summed comes from the model and `device_grid` alone, so it is the same for any number of ranks.

    target: "" for bytes alone, which no architecture decides. grid: blocks of a device, if not as many as the
    architecture has. UserError when a rank does not fit its part of it.
    """

    def __init__(self, layout: CudaLayout, context: int, target: str, grid: int | None = None):
        spec, moe = layout.spec, layout.spec.moe
        assert moe
        self.layout, self.spec, self.moe = layout, spec, moe
        self.device_grid = GRID[target] if grid is None else grid
        self.grid = max(1, self.device_grid // layout.per_device)
        self.context = align(context, KV_TILE)
        self.hidden, self.head_dim = spec.hidden_size, spec.head_dim
        self.inner, self.top_k = moe.intermediate_size, moe.top_k
        self.experts, self.kv_heads, self.q_rows = moe.num_experts, layout.heads.kv_heads, layout.q_rows
        self.group = layout.heads.q_heads // self.kv_heads
        self.model_group = spec.num_attention_heads // spec.num_key_value_heads
        self.units = layout.units
        self.owned_units = ceil_div(self.units, self.grid)
        self.owners = ceil_div(self.units, self.owned_units)
        self.qkv_units, self.head_units = layout.qkv_rows // PAGE_ROWS, layout.head_rows // PAGE_ROWS
        self.qk_units = (self.q_rows + layout.kv_rows) // PAGE_ROWS
        self.pair_units = layout.pair_units
        self.narrow, self.expert_hidden, self.dense_inner = layout.narrow, layout.expert_hidden, layout.dense_inner
        self.pre_units, self.mlp_pairs = layout.narrow_rows // PAGE_ROWS, layout.dense_inner_rows // PAGE_ROWS
        self.down_units = layout.down_units
        self.down_owned = ceil_div(self.down_units, self.grid)
        self.down_owners = ceil_div(self.down_units, self.down_owned)
        self.pair_tile, self.down_tile = tile_bytes(self.expert_hidden), tile_bytes(self.inner)
        self.tile_kv = KV_TILE * self.head_dim * 2
        self.max_splits = max(1, min(32, self.device_grid // spec.num_key_value_heads))
        # The step kernel.
        self.unit_tokens = SQUADS * 16 // self.model_group  # of a unit of attention, beyond FEW_TILES
        self.expert_page = max(*tile_pages(self.expert_hidden), *tile_pages(self.inner))
        self.slot_bytes = max(self.expert_page, 4 * self.tile_kv)
        self.pair_groups = SQUADS if len(tile_pages(self.expert_hidden)) == 1 else 1
        down_pages = len(tile_pages(self.inner))
        fit = self.expert_page // (self.down_tile if down_pages == 1 else self.expert_page)
        self.down_pack = 4 if fit > 3 else 2 if fit > 1 else 1
        self.down_copies = down_pages * (4 // self.down_pack)
        self.step_tokens = self._step_tokens()
        if target and layout.tp > 1 and (shared := self.step_machine().shared_bytes) > SHARED_LIMIT:
            raise UserError(
                f"parallel.per_device: with {layout.per_device} ranks a device one of {self.grid} blocks has "
                f"{self.owned_units * OWNED_ROWS} hidden rows, which with {self.step_tokens} tokens a step take "
                f"{shared} bytes of shared memory; expected at most {SHARED_LIMIT}, use fewer ranks a device"
            )

    def spread(self, items: int) -> tuple[int, ...]:
        """Bounds of `items` dealt evenly."""
        return tuple(items * s // self.grid for s in range(self.grid + 1))

    def owned(self, each: int = 1) -> tuple[int, ...]:
        """Bounds of the hidden units that SMs keep the residual of, `each` items a unit."""
        return tuple(min(self.units, self.owned_units * s) * each for s in range(self.grid + 1))

    def down_owned_units(self) -> tuple[int, ...]:
        """Bounds of the units of the experts' outputs: of the hidden ones, unless experts are narrow."""
        return tuple(min(self.down_units, self.down_owned * s) for s in range(self.grid + 1))

    def first_only(self, items: int) -> tuple[int, ...]:
        return (0, *([items] * self.grid))

    @property
    def fast_decode(self) -> bool:
        """Whether decode_kernel is written for this model."""
        spec, layout = self.spec, self.layout
        attention = layout.precision["attention"]
        matrices = ((attention, self.hidden), (attention, self.q_rows), (layout.precision["lm_head"], self.hidden))
        token_units = self.top_k * self.pair_units
        return (
            not step_only(spec)
            and layout.tp == 1
            and all(cols * (2 if fmt == "bf16" else 1) % (PAGE_BYTES // PAGE_ROWS) == 0 for fmt, cols in matrices)
            and self.hidden <= 2048
            and self.q_rows <= 4096
            and self.grid <= self.qkv_units <= WARPS * self.grid
            and not (spec.qkv_bias or spec.o_bias)
            and self.owned_units == 1
            and self.head_dim == 128 == 2 * len(spec.rope.inv_freq)
            and spec.qk_norm
            and self.group <= 8
            and 8 * self.kv_heads <= self.grid
            and self.experts <= min(self.grid, 128)
            and self.experts % 4 == 0
            and layout.router_format != "f32"
            and self.top_k == 8
            and self.moe.norm_topk_prob
            and self.inner % 256 == 0
            and self.inner <= 768
            and 2 * self.down_tile <= self.pair_tile
            and 3 * self.grid <= token_units <= WARPS * self.grid
        )

    # -- the step kernel's shared memory ---------------------------------------------------------------------------

    def _scratch(self, tokens: int, down_owned: int) -> Uses:
        """The part that phases use in turn."""
        blocks, scores = ceil_div(min(tokens, self.unit_tokens) * self.model_group, 16), 16 * 16 + 16 * 36 * 2
        blocks = SQUADS if blocks > 2 else blocks
        queries = blocks * 16 * (self.head_dim + 8) * 2 + SQUADS * scores + 4 * self.tile_kv + 48
        if 2 * len(self.spec.rope.inv_freq) < self.head_dim:
            queries += WARPS * 2 * self.head_dim * 4
        outputs = SQUADS * 16 * (self.head_dim * 4 + 8)
        return {
            "input of gate_up": (
                tokens * (self.expert_hidden + 8) * 2,
                ("choose", "gate_up") if self.narrow else ("router", "choose", "gate_up"),
            ),
            "queries, scores and outputs": (max(queries, outputs), ("attention",)),
            "partial sums": (
                DENSE_CHUNK * WARPS * PAGE_ROWS * (16 if tokens > 8 else 8) * 4,
                ("qkv", "output", "pre_proj", "post_proj", "dense_gate_up", "dense_down", "head"),
            ),
            "products of experts": (
                self.down_copies * tokens * self.top_k * down_owned * OWNED_ROWS * 4,
                ("down", "mix"),
            ),
            "sampler": (SAMPLER_BYTES, ("sample",)),
        }

    def _step_tokens(self) -> int:
        # As one rank with the device for itself: how a prompt is cut into steps decides its last bits.
        owned, down = (ceil_div(n // OWNED_ROWS, self.device_grid) for n in (self.hidden, self.expert_hidden))
        fixed = STEP_SLOTS * (PAGE_BYTES + self.slot_bytes) + WARPS * 2 * 16 * 8 * 4
        fixed += 16 * WARPS * 4 + MAX_TOKENS * self.top_k * 12 + self.experts * 6 + 4096
        residual = owned * OWNED_ROWS * 4  # of a token
        tokens = MAX_TOKENS
        while tokens > 1 and (fixed + tokens * residual + max(self._scratch(tokens, down).values())[0] > SHARED_LIMIT):
            tokens //= 2
        return tokens

    def step_machine(self) -> Machine:
        s, pairs, team = _Struct(), MAX_TOKENS * self.top_k, WARPS * 32
        s.add("dense ring", STEP_SLOTS * PAGE_BYTES, 128)
        s.add("expert ring", STEP_SLOTS * self.slot_bytes, 1)
        s.overlay(self._scratch(self.step_tokens, self.down_owned), 128)
        partial = 2 * 16 * 8 * 4 * WARPS
        masks = self.experts * ceil_div(pairs, 32) * 4
        uses = {"halves of SwiGLU": (partial, ("gate_up",)), "masks of choices": (masks, ("router", "choose"))}
        s.overlay(uses, 4, partial)
        s.add("residual", self.step_tokens * self.owned_units * OWNED_ROWS * 4, 4)
        s.add("router sums", 16 * WARPS * 4, 4)
        s.add("1/rms", MAX_TOKENS * 4, 4)
        for name, count, width in (
            *(("expert of a pair", pairs, 2), ("weight of a pair", pairs, 4), ("active experts", self.experts, 2)),
            *(("first pair of an expert", self.experts + 1, 2), ("pairs by expert", pairs, 2)),
            *(("counts", WARPS, 4), ("active", 1, 4), ("best values", team, 4), ("best rows", team, 4)),
            *(("the running step", 15, 4), ("barriers", 4 * STEP_SLOTS, 8)),
        ):
            s.add(name, count * width, width)
        if self.layout.tp > 1:
            s.add("other ranks", 2 * 4, 4)
        rings = (Ring("dense", STEP_SLOTS, PAGE_BYTES), Ring("expert", STEP_SLOTS, self.slot_bytes))
        return Machine(self.grid, rings, tuple(s.regions), s.nbytes(128), ROLES, LAUNCH_REGISTERS)

    # -- decode_kernel's -------------------------------------------------------------------------------------------

    def decode_machine(self) -> Machine:
        s = _Struct()
        tiles = ceil_div(self.top_k * self.pair_units, self.grid)
        wide = max(16 * tiles, 8 * ceil_div(self.qkv_units, self.grid), 8 * DENSE_CHUNK) + 2
        s.add("dense ring", DENSE_SLOTS * PAGE_BYTES, 128)
        # SM 0 draws a token where no expert's page can be.
        ring = EXPERT_SLOTS * self.pair_tile
        s.overlay(
            {"expert ring": (ring, ("choose", "gate_up", "down")), "sampler": (SAMPLER_BYTES, ("sample",))}, 1, ring
        )
        s.add("input", WARPS * 192 * 4, 4)
        weights = 8 * (8 * KV_TILE // 2 + 16) * 4
        sums = align(WARPS * wide * 4, 16)
        s.overlay({"partial sums": (sums, ("qkv", "gate_up", "head")), "weights": (weights, ("attention",))}, 16)
        s.add("partial sums of output and down", WARPS * (self.owned_units * OWNED_ROWS + 2) * 4, 4)
        s.add("q, new k and v", (8 * (self.head_dim + 32) + 2 * self.head_dim) * 2, 2)
        s.add("weight of the newest position", 8 * 4, 4)
        s.add("scales and sums of weights", WARPS * 8 * 8, 8)
        s.add("sums of squares", 2 * WARPS * 4, 16)
        s.add("zeros", 8 * 4, 16)
        s.add("residual", self.owned_units * OWNED_ROWS * 4, 4)
        s.add("router sums", WARPS * 4, 4)
        s.add("chosen logits", 2 * self.top_k * 4, 4)
        s.add("chosen experts", 2 * self.top_k * 4, 4)
        s.add("their scales", 2 * self.top_k * 16, 16)
        s.add("best values", 2 * WARPS * 4, 4)
        s.add("best rows", 2 * WARPS * 4, 4)
        s.add("the running step", 5 * 4, 4)
        s.add("barriers", 2 * (DENSE_SLOTS + EXPERT_SLOTS) * 8, 8)
        rings = (Ring("dense", DENSE_SLOTS, PAGE_BYTES), Ring("expert", EXPERT_SLOTS, self.pair_tile))
        return Machine(self.grid, rings, tuple(s.regions), s.nbytes(128), ROLES, LAUNCH_REGISTERS)


class _Struct:
    """Members of a C++ struct, each at the next offset that its alignment allows."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._end = 0

    def add(self, name: str, nbytes: int, alignment: int) -> None:
        self.overlay({name: (nbytes, ())}, alignment)

    def overlay(self, uses: Uses, alignment: int, nbytes: int | None = None) -> None:
        """Bytes that phases use in turn: the most that any of them needs, or `nbytes`."""
        at = align(self._end, alignment)
        self.regions += [Region(name, at, size, live) for name, (size, live) in uses.items()]
        self._end = at + (max(uses.values())[0] if nbytes is None else nbytes)

    def nbytes(self, alignment: int) -> int:
        return align(self._end, alignment)


def pages(nbytes: int, most: int = PAGE_BYTES) -> tuple[int, ...]:
    """`nbytes` in pages of `most`, the last as short as that allows."""
    return tuple(min(most, nbytes - at) for at in range(0, nbytes, most))


def tile_pages(cols: int) -> tuple[int, ...]:
    """Bytes of the pages of an NVFP4 tile."""
    return pages(cols // CHUNK * (CHUNK_CODES + CHUNK_SCALES), PAGE_CHUNKS * (CHUNK_CODES + CHUNK_SCALES))
