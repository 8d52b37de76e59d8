"""The schedule of the CPU target: what csrc/cpu/ does in a step, and in which order.

model.h is generated from it: the kernel runs the phases and meets at the barriers listed here, and asserts that its
buffers have the sizes given here. Workers are threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkpack.layout import TILE_ROWS, align, ceil_div
from mkpack.schedule.cpu_buffers import BUFFERS, CHUNK, Sizes
from mkpack.schedule.ir import Exchange, Items, Phase, Schedule, Use, Wait, carried_words

if TYPE_CHECKING:
    from mkpack.layout import Layout
    from mkpack.manifest import Section
    from mkpack.spec import Format, ModelSpec

__all__ = ["BUFFERS", "CHUNK", "PHASES", "STEP_WORDS", "cpu_schedule", "phases"]
STEP_WORDS = 5  # that the first rank tells the others of a step beside its tokens: csrc/cpu/state.h's struct Step
PHASES = (
    *("embed", "qkv", "qk_squares", "attention", "combine", "output", "attn_residual"),
    *("router", "pre_proj", "gate_up", "down", "post_proj", "mlp_residual", "head", "sample"),
)
# Sections that every rank holds whole, so that one rank's are read for all of them.
_REPLICATED = (
    *("embed", "attn_norm", "q_norm", "k_norm", "sinks", "o_bias", "attn_residual_gate", "mlp_norm", "router"),
    *("router_bias", "choice_bias", "pre_norm", "down_input_scale", "expert_norm", "mlp_out_norm", "mlp_residual_gate"),
    "final_norm",
)


def phases(
    spec: ModelSpec, sections: Iterable[Section], tp: int = 1, context: int = 1, tokens_per_step: int = 1
) -> list[Phase]:
    """The phases of a step over `sections`, the table of one rank's blob, in order. Bytes are those of all ranks and do
    not depend on the limits; buffer uses and item counts do."""
    return _Step(spec, sections, tp, context, tokens_per_step).phases()


def cpu_schedule(layout: Layout, context: int, tokens_per_step: int, target: str = "cpu") -> Schedule:
    """A model's step on the CPU at its limits."""
    spec, tp = layout.spec, layout.tp
    step = _Step(spec, layout.sections, tp, context, tokens_per_step, layout.down_input)
    found = step.phases()
    used = {u.buffer for p in found for u in (*p.reads, *p.writes, *p.updates)}
    buffers = tuple(b for b in step.buffers() if b.name in used)
    return Schedule(target, spec, tuple(step.sections.values()), tp, context, tokens_per_step, buffers, tuple(found))


class _Step(Sizes):
    """The phases, of buffers of these sizes."""

    def phases(self) -> list[Phase]:
        tokens, vocab = self.tokens, ceil_div(self.spec.vocab_size, TILE_ROWS)
        narrow = self.spec.layers[-1].moe and self.spec.moe and self.spec.moe.hidden_size
        last = "mlp_residual" if self.spec.sandwich else "post_proj" if narrow else "down"
        last = f"layers.{len(self.spec.layers) - 1}.{last}"
        result = [
            Phase(
                "embed",
                None,
                Items(1, "row of the embedding", "token", "first"),
                gathers=self._found(None, "embed", "embed.scale"),
                reads=(Use("tokens", tokens),),
                writes=(self._x, *self._rotary, Use("history", self.context)),
                waits=(Wait(last, earlier_step=True),),
            )
        ]
        for i in range(len(self.spec.layers)):
            result += self._attention(i, result[-1].key)
            result += self._mlp(i)
        head = "lm_head" if "lm_head" in self.sections else "embed"
        normed, gathered = Use("normed", self.hidden), Use("gathered", self.hidden)
        logits = Use("logits", tokens * vocab * TILE_ROWS)
        best = (Use("best_value", tokens), Use("best_token", tokens))
        # What is chosen from: the logits where they are wanted, else the best token of each rank.
        chosen = self._exchange("logits", "best_value", "best_token", words=self._tile_rows(self.spec.vocab_size))
        result += [
            self._phase(
                "head",
                None,
                Items(vocab, "16 rows of the vocabulary"),
                "final_norm",
                head,
                head + ".scale",
                reads=(self._x, gathered, normed),
                writes=(gathered, normed, *map(_own, (logits, *best))),
                waits=(Wait(last),),
                exchange=chosen and replace(chosen, first=True),
                optional=True,
            ),
            Phase(
                "sample",
                None,
                Items(1, "next token", workers="first"),
                reads=(*best, Use("history", self.context)),
                writes=(_own(Use("tokens", 1)),),
                updates=(logits,),
                waits=(Wait("head"),),
                # Before every step, also of tokens that a caller gave.
                exchange=Exchange(("tokens",), STEP_WORDS + tokens, per_token=False) if self.tp > 1 else None,
                optional=True,
            ),
        ]
        return result

    @property
    def _x(self) -> Use:
        return Use("x", self.hidden)

    @property
    def _rotary(self) -> tuple[Use, Use]:
        return Use("cosine", self.angles), Use("sine", self.angles)

    def _rows(self, name: str) -> int:
        return self.sections[name].rows if name in self.sections else 0

    def _cols(self, name: str) -> int:
        return self.sections[name].cols if name in self.sections else 0

    def _found(self, layer: int | None, *kinds: str) -> tuple[str, ...]:
        prefix = "" if layer is None else f"layers.{layer}."
        return tuple(prefix + k for k in kinds if prefix + k in self.sections)

    def _phase(self, name: str, layer: int | None, items: Items, *kinds: str, **fields: Any) -> Phase:
        """A phase that streams the sections of `kinds` that this model has."""
        found = self._found(layer, *kinds)
        # A tied head is the embedding, which every rank holds whole and reads its share of: together, once.
        copies = (1 if n.removesuffix(".scale").split(".")[-1] in _REPLICATED else self.tp for n in found)
        nbytes = sum(self.sections[n].nbytes * c for n, c in zip(found, copies, strict=True))
        return Phase(name, layer, items, found, nbytes, **fields)

    def _tile_rows(self, rows: int) -> int:
        """Rows of a matrix split along N that a rank holds, padding included."""
        return ceil_div(ceil_div(rows, TILE_ROWS), self.tp) * TILE_ROWS

    def _exchange(self, *buffers: str, words: int, carried: Format | None = None) -> Exchange | None:
        """words: a token's, before they are carried as something narrower."""
        words = carried_words(words * self.tokens, carried)
        return Exchange(buffers, words, carried=carried) if self.tp > 1 else None

    def _attention(self, i: int, before: str) -> list[Phase]:
        spec, p = self.spec, f"layers.{i}."
        qkv = Use("qkv", self.tp * self._rows(p + "qkv") * self.slots)
        partial = Use("partial", self.partial)
        attention = Use("attention", align(self.heads * spec.head_dim, TILE_ROWS) * self.slots)
        columns = Use("attention", align(self._cols(p + "o"), TILE_ROWS) * self.slots)
        query = (Use("query", self.dim), Use("scores", CHUNK))
        normed = Use("normed", self.hidden)
        squares = Use("squares", self.squares * self.tokens)
        together = (squares,) if self.squares else ()
        attend = p + ("qk_squares" if together else "qkv")
        found = [
            self._phase(
                "qkv",
                i,
                Items(self.tp * self._rows(p + "qkv") // TILE_ROWS, "16 rows of q, k or v"),
                *("attn_norm", "qkv", "qkv.scale", "qkv_bias"),
                reads=(self._x, normed),
                writes=(normed, _own(qkv)),
                waits=(Wait(before),),
            ),
        ]
        if together:
            found.append(
                self._phase(
                    "qk_squares",
                    i,
                    Items(self.squares, "head of q or k"),
                    reads=(_own(qkv),),
                    writes=(_own(squares),),
                    waits=(Wait(p + "qkv"),),
                    exchange=self._exchange("squares", words=self.squares // self.tp),
                )
            )
        found += [
            self._phase(
                "attention",
                i,
                Items(self.kv_heads, "KV head", "256 positions"),
                *("q_norm", "k_norm"),
                reads=(_own(qkv), *together, *self._rotary, *query),
                writes=(*query, _own(partial)),
                updates=(_own(Use("keys", self.cache)), _own(Use("values", self.cache))),
                waits=(Wait(attend),),
            ),
            self._phase(
                "combine",
                i,
                Items(self.kv_heads, "query heads of a KV head"),
                *("sinks",),
                reads=(_own(partial), _own(qkv)) if spec.attention_gate else (_own(partial),),
                writes=(_own(attention),),
                waits=(Wait(p + "attention", "last arriver"),),
                exchange=self._exchange("attention", words=self.rank_channels),
            ),
            self._phase(
                "output",
                i,
                Items(ceil_div(spec.hidden_size, TILE_ROWS), "16 channels of x"),
                *("o", "o.scale", "o_bias"),
                reads=(columns,),
                **self._added(),
                waits=(Wait(p + "combine"),),
            ),
        ]
        if spec.sandwich:
            found.append(self._residual("attn_residual", i, p + "output"))
        return found

    def _mlp(self, i: int) -> list[Phase]:
        spec, p, moe = self.spec, f"layers.{i}.", self.spec.layers[i].moe
        before = p + ("attn_residual" if spec.sandwich else "output")
        narrow = bool(moe and spec.moe and spec.moe.hidden_size)
        normed, gathered = Use("normed", self.hidden), Use("gathered", self.narrow)
        active = Use("active", (self.active if moe else 1) * (2 + 2 * self.tokens))
        router = Use("router", self._rows(p + "router") * self.slots)
        # Each expert's part begins where the largest of all layers would.
        used = (self.active - 1 if moe else 0) * self.inner + align(self._cols(p + "down"), TILE_ROWS)
        inner = Use("inner", used * self.slots)
        result = []
        if moe:
            result.append(
                self._phase(
                    "router",
                    i,
                    Items(ceil_div(spec.moe.num_experts if spec.moe else 0, TILE_ROWS), "16 experts"),
                    *("mlp_norm", "router", "router_bias"),
                    reads=(self._x, normed),
                    writes=(normed, router),
                    waits=(Wait(before),),
                )
            )
        if narrow:
            result.append(
                self._phase(
                    "pre_proj",
                    i,
                    Items(ceil_div(self.narrow // self.slots, TILE_ROWS), "16 channels of the experts' input"),
                    *("pre_proj", "pre_proj.scale"),
                    reads=(normed,),
                    writes=(_own(Use("narrow", self.narrow)),),
                    waits=(Wait(before),),
                    exchange=self._exchange("narrow", words=self._tile_rows(self.narrow // self.slots)),
                )
            )
        # A dense layer has no router phase: each thread norms x itself, and every token takes the one "expert". Narrow
        # experts have an input of their own, that each thread norms.
        if narrow:
            normed = Use("normed", self.narrow)
            reads: tuple[Use, ...] = (router, Use("narrow", self.narrow), normed, gathered, active)
        else:
            reads = (router, normed, gathered, active) if moe else (self._x, normed, active)
        writes = (normed, gathered, active) if narrow else (gathered, active) if moe else (normed, active)
        pairs, chosen = ceil_div(self._cols(p + "down"), TILE_ROWS), spec.moe.top_k if moe and spec.moe else 1
        result.append(
            self._phase(
                "gate_up",
                i,
                Items(pairs, "16 rows of gate and of up", "active expert" if moe else ""),
                *(("choice_bias", "pre_norm") if moe else ("mlp_norm",)),
                *("gate_up", "gate_up.scale", "gate_up_bias", "down_input_scale"),
                routed=moe,
                reads=reads,
                writes=(*writes, _own(inner)),
                waits=(Wait(result[-1].key if result else before),),
                exchange=self._exchange(
                    "inner",
                    words=chosen * self._tile_rows(self._cols(p + "down")),
                    carried=self.down_input if moe else None,
                ),
            )
        )
        result.append(self._down(i, inner, active, narrow))
        if narrow:
            outputs = Use("expert_out", self.active * self.narrow)
            result.append(
                self._phase(
                    "post_proj",
                    i,
                    Items(ceil_div(spec.hidden_size, TILE_ROWS), "16 channels of x"),
                    *("expert_norm", "post_proj", "post_proj.scale"),
                    reads=(outputs, active, normed),
                    waits=(Wait(p + "down"),),
                    **self._added(normed),
                )
            )
        if spec.sandwich:
            result.append(self._residual("mlp_residual", i, result[-1].key, "mlp_out_norm"))
        return result

    def _down(self, i: int, inner: Use, active: Use, narrow: bool) -> Phase:
        """The outputs of experts, summed; of narrow ones each by itself, for they are normed before."""
        spec, moe = self.spec, self.spec.layers[i].moe
        channels = ceil_div((self.narrow if narrow else self.hidden) // self.slots, TILE_ROWS)
        down_sum = Use("down_sum", channels * TILE_ROWS * self.slots)
        own: dict[str, Any] = {"reads": (inner, active, down_sum), **self._added(down_sum)}
        if narrow and spec.moe:
            words = spec.moe.top_k * self._tile_rows(self.narrow // self.slots)
            own = {"reads": (inner, active), "writes": (_own(Use("expert_out", self.active * self.narrow)),)}
            own["exchange"] = self._exchange("expert_out", words=words)
        what = "16 channels of an expert's output" if narrow else "16 channels of x, all experts"
        return self._phase(
            "down",
            i,
            Items(channels, what if moe else "16 channels of x", "active expert" if narrow else ""),
            *("down", "down.scale", "down_bias"),
            routed=moe,
            waits=(Wait(f"layers.{i}.gate_up"),),
            **own,
        )

    def _added(self, *writes: Use) -> dict[str, Any]:
        """Fields of a phase that ends a sub-layer, beside what else it writes: its result is added to x itself, or is
        what a residual phase norms first."""
        name = "branch" if self.spec.sandwich else "x"
        own, exchange = _own(Use(name, self.hidden)), self._exchange(name, words=self._tile_rows(self.spec.hidden_size))
        if self.spec.sandwich:
            return {"writes": (*writes, own), "exchange": exchange}
        return {"writes": writes, "updates": (own,), "exchange": exchange}

    def _residual(self, name: str, i: int, before: str, *norms: str) -> Phase:
        return self._phase(
            name,
            i,
            Items(ceil_div(self.spec.hidden_size, TILE_ROWS), "16 channels of x"),
            *norms,
            name.replace("residual", "residual_gate"),
            reads=(Use("branch", self.hidden),),
            updates=(self._x,),
            waits=(Wait(before),),
        )


def _own(use: Use) -> Use:
    """Of that only a rank's own part."""
    return replace(use, part=True)
