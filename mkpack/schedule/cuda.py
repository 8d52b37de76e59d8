"""The schedules of a CUDA target: step_kernel, for any step and model, and decode_kernel, for one token a step of the
models that it is written for. Here is what both have: the bytes of the blob, and who streams which of them.

Workers are SMs, each a block of the one resident kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from mkpack.layout import align
from mkpack.layout_cuda import OWNED_ROWS, PAGE_ROWS, VECTOR_FLOATS, CudaLayout, matrix_bytes
from mkpack.schedule.ir import Buffer, Feed, Items, Load, Machine, Phase, Schedule
from mkpack.schedule.shape import Shape, pages, tile_pages


def cuda_schedules(layout: CudaLayout, context: int, target: str, grid: int | None = None) -> tuple[Schedule, ...]:
    """Every kernel of a model on one architecture of layout_cuda.GRID: step_kernel, then decode_kernel as it chooses
    the likeliest token and as it draws one, where the model has it. grid: blocks, if not as many as the architecture
    has."""
    from mkpack.schedule.cuda_decode import Decode
    from mkpack.schedule.cuda_step import Step

    shape = Shape(layout, context, target, grid)
    found = [Step(shape).schedule(target, context)]
    if shape.fast_decode:
        found += [Decode(shape, drawn).schedule(target, context) for drawn in (False, True)]
    return tuple(found)


def cuda_proofs(layout: CudaLayout, context: int, target: str, grid: int | None = None) -> tuple[Schedule, ...]:
    """Everything to be proven before a model is compiled: cuda_schedules(), and decode_kernel with as many KV splits as
    longer contexts have."""
    from mkpack.schedule.cuda_decode import Decode

    shape = Shape(layout, context, target, grid)
    found = cuda_schedules(layout, context, target, grid)
    if not shape.fast_decode:
        return found
    more = Decode.log_splits(shape)[1:]
    return (*found, *(Decode(shape, False, n).schedule(target, context) for n in more))


def cuda_phases(layout: CudaLayout) -> list[Phase]:
    """The phases of a step, for their bytes: these depend on no architecture and no limit."""
    from mkpack.schedule.cuda_step import Step

    return Step(Shape(layout, 1, "", grid=1)).phases()


class Kernel(ABC):
    """One kernel's schedule. Subclasses list buffers and phases."""

    name: str
    tokens: int  # of a step, at most

    def __init__(self, shape: Shape):
        self.shape, self.layout, self.spec = shape, shape.layout, shape.spec
        self.sections = {s.name: s for s in shape.layout.sections}

    @abstractmethod
    def buffers(self) -> list[Buffer]:
        """Every buffer that a phase may use."""

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The phases of a step in their order."""

    @abstractmethod
    def machine(self) -> Machine:
        """What the kernel has of an SM: rings, shared memory, registers."""

    def schedule(self, target: str, context: int) -> Schedule:
        sections = tuple(self.sections.values())
        found = self.phases()
        used = {u.buffer for p in found for u in (*p.reads, *p.writes, *p.updates)}
        buffers = tuple(b for b in self.buffers() if b.name in used)
        ranks, machine = self.layout.tp, self.machine()
        args = (self.spec, sections, ranks, context, self.tokens, buffers, tuple(found), self.name, machine)
        return Schedule(target, *args)

    def phase(self, name: str, layer: int | None, items: Items, *reads: Feed | Load, **fields: Any) -> Phase:
        """A phase that streams or loads `reads`; loads of sections or vectors that this model lacks are left out."""
        feeds = tuple(r for r in reads if isinstance(r, Feed))
        loads = tuple(r for r in reads if isinstance(r, Load) and r.nbytes)
        found = [r for r in reads if r.nbytes and r.section in self.sections]
        names, nbytes = (r.section for r in found), sum(r.nbytes for r in found)
        epoch = len(self.spec.layers) if layer is None else layer
        return Phase(
            name, layer, items, tuple(dict.fromkeys(names)), nbytes, feeds=feeds, loads=loads, epoch=epoch, **fields
        )

    # -- bytes of the blob -----------------------------------------------------------------------------------------

    def qkv(self, i: int) -> Feed:
        layout, s = self.layout, self.shape
        unit = layout.qkv_bytes // s.qkv_units
        return Feed("dense", "dense", i * layout.dense_layer_bytes, unit, pages(unit), s.spread(s.qkv_units))

    def output(self, i: int) -> Feed:
        layout, s = self.layout, self.shape
        per_unit = OWNED_ROWS // PAGE_ROWS
        unit = (layout.dense_layer_bytes - layout.qkv_bytes) // (s.units * per_unit)
        at = i * layout.dense_layer_bytes + layout.qkv_bytes
        return Feed("dense", "dense", at, unit, pages(unit), s.owned(per_unit))

    def head(self) -> Feed:
        s = self.shape
        unit = self.layout.head_bytes // s.head_units
        return Feed("dense", "head", 0, unit, pages(unit), s.spread(s.head_units))

    def mlp_feeds(self, i: int) -> tuple[Feed, Feed]:
        """The matrices of a layer's MLP that are no experts': the projections around narrow ones, or dense gate and up,
        whose row units take turns and come in pairs, and down."""
        s, fmt = self.shape, self.layout.precision["dense"]
        at, per_unit = self.layout.mlp_at(i)[0], OWNED_ROWS // PAGE_ROWS
        first = matrix_bytes(fmt, PAGE_ROWS, s.hidden)
        if self.spec.layers[i].moe:
            count, bounds, cols = s.pre_units, s.spread(s.pre_units), s.narrow
        else:
            count, cols = 2 * s.mlp_pairs, s.dense_inner
            bounds = tuple(2 * pair for pair in s.spread(s.mlp_pairs))
        second = matrix_bytes(fmt, PAGE_ROWS, cols)
        return (
            Feed("dense", "mlp", at, first, pages(first), bounds),
            Feed("dense", "mlp", at + count * first, second, pages(second), s.owned(per_unit)),
        )

    def mlp_scales(self, i: int, first: int, rows: int) -> Load:
        """Scales of rows of these matrices; of no bytes where there are none."""
        fp8 = self.layout.precision["dense"] == "fp8"
        return Load("mlp_scales", 4 * (self.layout.mlp_at(i)[1] + first), 4 * rows if fp8 else 0)

    def gate_up(self, i: int, **how: Any) -> Feed:
        s, layout = self.shape, self.layout
        at = layout.moe_layers(i) * s.experts * layout.expert_bytes
        feed = Feed("expert", "experts", at, s.pair_tile, tile_pages(s.expert_hidden), ())
        return replace(
            feed, bounds=s.spread(s.pair_units), experts=s.experts, stride=layout.expert_bytes, spread=True, **how
        )

    def down(self, i: int, pack: int) -> Feed:
        s, layout = self.shape, self.layout
        at = layout.moe_layers(i) * s.experts * layout.expert_bytes + layout.pair_bytes
        feed = Feed("expert", "experts", at, s.down_tile, tile_pages(s.inner), s.down_owned_units())
        return replace(feed, experts=s.experts, stride=layout.expert_bytes, pack=pack)

    def vectors(self, i: int, *names: str) -> tuple[Load, ...]:
        """Vectors of a layer's part of the norms. Behind the last layer's lies the final norm, as its attn_norm."""
        found = ((n, *self.layout.vectors[n]) for n in names)
        layer, of_experts = self.layout.vectors_at(i), ("gate_up_bias", "down_bias")
        return tuple(
            Load("norms", 4 * (layer + at), 4 * align(size, VECTOR_FLOATS), n in of_experts) for n, at, size in found
        )

    def row_scales(self, i: int, first: int, rows: int) -> Load:
        """Scales of rows of fp8 matrices of a layer; of no bytes where there are none."""
        layer = self.layout.dense_scale_layer
        return Load("dense_scales", 4 * (i * layer + first), 4 * rows if layer else 0)

    def whole(self, section: str) -> Load:
        return Load(section, 0, self.sections[section].nbytes if section in self.sections else 0)

    def of_layer(self, section: str, i: int, routed: bool = False) -> Load:
        """A layer's share of a section that all layers with experts share evenly."""
        nbytes = self.sections[section].nbytes // self.layout.moe_layers()
        return Load(section, self.layout.moe_layers(i) * nbytes, nbytes, routed)

    def cache(self) -> int:
        """Elements of a layer's keys and values."""
        return 2 * self.shape.kv_heads * self.shape.context * self.shape.head_dim
