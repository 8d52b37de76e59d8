"""What csrc/cuda/step_*.cuh do: a step of 1 to 16 tokens of any model. The whole grid meets after every phase but the
choice of experts, which every SM makes for itself.

Of several ranks it is what one of them does. What ranks gather has the size that it has in the whole model, and a rank
writes its part of it; other buffers are the rank's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mkpack.layout import ceil_div
from mkpack.layout_cuda import OWNED_ROWS, PAGE_ROWS
from mkpack.schedule.cuda import Kernel
from mkpack.schedule.ir import Buffer, Exchange, Feed, Items, Load, Machine, Phase, Use, Wait
from mkpack.schedule.shape import FEW_TILES, KV_TILE, MAX_TOKENS, Shape

# Phases that end with an exchange of several ranks; "gather_logits" is a phase of theirs alone.
EXCHANGES = (
    *("qkv", "combine", "output", "attention_residual", "pre_proj", "gate_up", "down", "mix", "post_proj"),
    *("dense_gate_up", "dense_down", "mlp_residual", "head", "gather_logits"),
)


class Step(Kernel):
    name = "step_kernel"

    def __init__(self, shape: Shape):
        super().__init__(shape)
        s = shape
        self.tokens = s.step_tokens
        self.units, self.rows = s.kv_heads * s.max_splits, ceil_div(MAX_TOKENS * s.group, 16) * 16
        self.owned_rows, self.down_rows = s.owned_units * OWNED_ROWS, s.down_owned * OWNED_ROWS
        self.ranks = self.layout.tp
        # Shares of the sum of squares: of every 16 hidden rows, which are every owner's where that has no more.
        self.shares = s.grid if self.ranks == s.owned_units == 1 else s.hidden // OWNED_ROWS
        # Norms of q and k over all heads: every row unit's share of the sum of squares, 1/rms of both.
        whole = self.spec.qk_norm and self.spec.qk_norm_over == "projection"
        self.qk_squares = (Use("qk_squares", self.tokens * self.ranks * s.qk_units),) if whole else ()
        self.qk_rms = (Use("qk_rms", 2 * self.tokens),) if whole else ()

    def machine(self) -> Machine:
        return self.shape.step_machine()

    def buffers(self) -> list[Buffer]:
        s, most = self.shape, MAX_TOKENS
        pairs = most * s.top_k
        return [
            Buffer("given", "tokens that were given", s.context, "model", "int32"),
            Buffer("history", "every token so far", s.context + 1, "model", "int32"),
            Buffer("hidden", "hidden state x weights of the next norm", most * s.hidden, "step", "bfloat16"),
            Buffer("router_input", "the same", most * s.hidden, "step"),
            Buffer("squares", "shares of the sum of squares", most * self.shares, "step"),
            Buffer("qkv", "queries, keys and values as projected", most * self.layout.qkv_rows, "layer"),
            Buffer("qk_squares", "shares of the sums of squares of q and k", most * self.ranks * s.qk_units, "layer"),
            Buffer("cache", "keys and values", self.cache(), "model", "bfloat16", per_layer=True),
            Buffer("partial", "of a KV split: weighted values", self.units * self.rows * s.head_dim, "layer"),
            Buffer("partial_sums", "of a KV split: maxima and sums", self.units * self.rows * 2, "layer"),
            Buffer("attention", "attention of every head", most * self.ranks * s.q_rows, "layer", "bfloat16"),
            Buffer("router_logits", "router logits", most * s.experts, "layer"),
            Buffer("swiglu", "silu(gate) * up", most * max(s.top_k * s.inner, s.dense_inner), "layer", "bfloat16"),
            Buffer("branch", "what a sub-layer gives, before its norm", most * s.hidden, "layer"),
            Buffer("branch_squares", "shares of its sum of squares", most * s.hidden // OWNED_ROWS, "layer"),
            Buffer("narrow", "input of narrow experts x weights of its norm", most * s.narrow, "layer", "bfloat16"),
            Buffer("narrow_squares", "shares of its sum of squares", most * s.narrow // PAGE_ROWS, "layer"),
            Buffer("products", "rows of experts' outputs", pairs * self.down_rows, "layer", scope="private"),
            Buffer("pair_squares", "shares of their sums of squares", pairs * s.narrow // OWNED_ROWS, "layer"),
            Buffer("mixed", "weighted sum of experts' outputs", most * s.narrow, "layer", "bfloat16"),
            Buffer("logits", "logits", most * self.ranks * self.layout.head_rows, "step"),
            Buffer("best", "every SM's highest logit, and its row", most * self.ranks * s.grid * 2, "step"),
            Buffer("shared_token", "the token drawn, and what the host says", 2, "step", "int32"),
            Buffer("residual", "hidden rows of this SM", most * self.owned_rows, "step", scope="private"),
            Buffer("rms", "1/rms of the phase's input", most, "layer", scope="private"),
            Buffer("qk_rms", "1/rms of q and of k", 2 * most, "layer", scope="private"),
            Buffer("input", "input of gate_up", self.tokens * (s.expert_hidden + 8), "layer", "bfloat16", "private"),
            # Of every pair expert, weight and place in the list; of every expert its number and its first pair.
            Buffer("choice", "chosen experts, their tokens", 3 * pairs + 2 * s.experts + 1, "layer", scope="private"),
            Buffer("token", "to run next", 1, "model", "int32", "private"),
        ]

    def phases(self) -> list[Phase]:
        s, spec, tokens = self.shape, self.spec, self.tokens
        last = f"layers.{len(spec.layers) - 1}.{self.last_phase(len(spec.layers) - 1)}"
        normed = (Use("rms", tokens),) if spec.embed_norm else ()
        embed = self.phase(
            "embed",
            None,
            Items(s.owners, "hidden rows of an SM"),
            *self.vectors(0, "attn_norm"),
            gathers=("embedding",),
            reads=(Use("given", tokens), Use("token", 1), *normed),
            writes=(Use("residual", tokens * self.owned_rows), *normed, *self.embedded()),
            waits=(Wait(last, earlier_step=True),),
        )
        result = [embed]
        for i in range(len(spec.layers)):
            result += self.attention(i, result[-1].key)
            result += self.mlp(i, result[-1].key) if spec.layers[i].moe else self.dense(i, result[-1].key)
        logits = Use("logits", tokens * self.ranks * self.layout.head_rows)
        best = Use("best", tokens * self.ranks * s.grid * 2)
        shared, rms = Use("shared_token", 2), Use("rms", tokens)
        # Where a token is drawn, every rank draws it from all logits.
        gather = self.phase(
            "gather_logits",
            None,
            Items(s.head_units, f"{PAGE_ROWS} logits of the last token"),
            updates=self.own(logits),
            waits=(Wait("head"),),
            exchange=self.exchange("logits", words=self.layout.head_rows, per_token=False),
            optional=True,
        )
        result += [
            self.phase(
                "head",
                None,
                Items(s.head_units, f"{PAGE_ROWS} rows of the vocabulary"),
                self.head(),
                self.whole("head_scales"),
                reads=(*self.hidden()[:1], *self.hidden()[2:], rms),
                writes=(rms, *self.own(logits, best, shared)),
                waits=(Wait(last),),
                # Of the last token; and the first rank tells what the host says.
                exchange=self.exchange("best", "shared_token", words=2 * s.grid + 1, per_token=False),
                optional=True,
            ),
            *([gather] if self.ranks > 1 else []),
            self.phase(
                "sample",
                None,
                Items(1, "next token", workers="first"),
                reads=(Use("history", s.context),),
                updates=(logits, shared),
                waits=(Wait("gather_logits" if self.ranks > 1 else "head"),),
                optional=True,
            ),
            self.phase(
                "token",
                None,
                Items(1, "next token on every SM"),
                reads=(best, shared),
                writes=(Use("token", 1), Use("history", s.context + 1)),
                waits=(Wait("sample"),),
                optional=True,
            ),
        ]
        return result

    def sent(self) -> dict[str, int]:
        """Of every phase of EXCHANGES the words that a rank then sends to each other, at most; 0: none."""
        ends = {p.name: p.exchange.words for p in self.phases() if p.exchange}
        assert ends.keys() <= set(EXCHANGES)
        return {name: ends.get(name, 0) for name in EXCHANGES}

    def hidden(self) -> tuple[Use, Use, Use]:
        """What a phase that changed the residual leaves for the next."""
        s, tokens = self.shape, self.tokens
        rows = tokens * s.hidden
        return Use("hidden", rows), Use("router_input", rows), Use("squares", tokens * self.shares)

    def embedded(self) -> tuple[Use, ...]:
        """The same of the embedding, of which every rank has all; only where the next phase may route, one has both."""
        hidden, router_input, squares = self.hidden()
        return (hidden, router_input, squares) if self.ranks == 1 else (hidden, squares)

    def own(self, *uses: Use) -> tuple[Use, ...]:
        """Of that only a rank's own part."""
        return tuple(replace(use, part=self.ranks > 1) for use in uses)

    def exchange(self, *buffers: str, words: int, per_token: bool = True) -> Exchange | None:
        """What follows a phase where there are several ranks. words: the first rank's, which has no fewer than any."""
        return Exchange(buffers, words, per_token=per_token) if self.ranks > 1 else None

    def published(self, routes: bool) -> dict[str, Any]:
        """Fields of a phase that changed the residual: what it leaves, as ranks tell it each other. routes: a router
        comes next, which multiplies in float32; what it gets is rounded by who takes it."""
        if self.ranks == 1:
            return {"writes": self.hidden()}
        hidden, router_input, squares = self.hidden()
        made = (hidden, router_input, squares) if routes else (hidden, squares)
        rows = self.shape.units * OWNED_ROWS
        words = self.tokens * ((rows if routes else rows // 2) + self.shape.units)
        return {"writes": self.own(*made), "exchange": self.exchange(*(u.buffer for u in made), words=words)}

    def last_phase(self, i: int) -> str:
        """Name of a layer's last phase."""
        if self.spec.sandwich:
            return "mlp_residual"
        return "dense_down" if not self.spec.layers[i].moe else "post_proj" if self.shape.narrow else "down"

    def ends(self, name: str, i: int, items: Items, *reads: Feed | Load, next_norm: Load, **fields: Any) -> list[Phase]:
        """The phase that ends a sub-layer: what it gives goes into the residual, or is normed by a phase of its own
        before. next_norm: weights of the norm behind it."""
        residual = Use("residual", self.tokens * self.owned_rows)
        if not self.spec.sandwich:
            made = self.published(routes=name == "output")
            return [self.phase(name, i, items, *reads, next_norm, updates=(residual,), **made, **fields)]
        branch, squares = (
            Use("branch", self.tokens * self.shape.hidden),
            Use("branch_squares", self.tokens * self.shape.hidden // OWNED_ROWS),
        )
        part, rms = "attention" if name == "output" else "mlp", Use("rms", self.tokens)
        norm = self.vectors(i, "mlp_out_norm") if part == "mlp" else ()
        made, (branch, squares_made) = self.published(routes=part == "attention"), self.own(branch, squares)
        made["writes"] = (rms, *made["writes"])
        sent = self.exchange("branch_squares", words=self.tokens * self.shape.units)
        return [
            self.phase(name, i, items, *reads, *norm, writes=(branch, squares_made), exchange=sent, **fields),
            self.phase(
                f"{part}_residual",
                i,
                Items(self.shape.owners, "hidden rows of an SM"),
                *self.vectors(i, "mlp_residual_gate" if part == "mlp" else "attn_residual_gate"),
                next_norm,
                reads=(branch, squares, rms),
                updates=(residual,),
                waits=(Wait(f"layers.{i}.{name}"),),
                **made,
            ),
        ]

    def attention(self, i: int, before: str) -> list[Phase]:
        s, p, tokens = self.shape, f"layers.{i}.", self.tokens
        qkv, rms = Use("qkv", tokens * self.layout.qkv_rows), Use("rms", tokens)
        partial = (Use("partial", self.units * self.rows * s.head_dim), Use("partial_sums", self.units * self.rows * 2))
        attention = Use("attention", tokens * self.ranks * s.q_rows)
        hidden, _, squares = self.hidden()
        return [
            self.phase(
                "qkv",
                i,
                Items(s.qkv_units, f"{PAGE_ROWS} rows of q, k or v"),
                self.qkv(i),
                *self.vectors(i, "q_bias", "k_bias", "v_bias"),
                self.row_scales(i, 0, self.layout.qkv_rows),
                reads=(hidden, squares, rms),
                writes=(rms, qkv, *self.own(*self.qk_squares)),
                waits=(Wait(before),),
                exchange=self.exchange("qk_squares", words=tokens * s.qk_units) if self.qk_squares else None,
            ),
            self.phase(
                "attention",
                i,
                Items(s.kv_heads, "KV head", "split of the cache and tokens of a unit"),
                self.cache_feed(),
                *self.vectors(i, "q_norm", "k_norm"),
                reads=(qkv, *self.qk_squares, *self.qk_rms),
                writes=(*self.qk_rms, *partial),
                updates=(Use("cache", self.cache()),),
                waits=(Wait(p + "qkv"),),
            ),
            self.phase(
                "combine",
                i,
                Items(self.layout.heads.q_heads, "query head", "token"),
                *self.vectors(i, "sinks"),
                reads=(*partial, qkv) if self.spec.attention_gate else partial,
                writes=self.own(attention),
                waits=(Wait(p + "attention"),),
                exchange=self.exchange("attention", words=tokens * s.q_rows // 2),
            ),
            *self.ends(
                "output",
                i,
                Items(s.owners, "hidden rows of an SM"),
                self.output(i),
                *self.vectors(i, "o_bias"),
                self.row_scales(i, self.layout.qkv_rows, self.layout.hidden_rows),
                next_norm=self.vectors(i, "mlp_norm")[0],
                reads=(attention,),
                waits=(Wait(p + "combine"),),
            ),
        ]

    def cache_feed(self) -> Feed:
        """Pages of two tiles of the cache, of all splits at the longest context, for every group of tokens. They come a
        step after they were written, so they wait for nothing but their turn in the ring."""
        s = self.shape
        tiles = s.context // KV_TILE
        groups = ceil_div(self.tokens, s.unit_tokens if tiles > FEW_TILES else 16 // s.model_group)
        splits = max(1, s.max_splits // groups)
        counts = [0]
        for sm in range(s.grid):
            mine = (u // groups % splits for u in range(sm, s.kv_heads * splits * groups, s.grid))
            of_units = (max(0, ceil_div(tiles - split, splits)) for split in mine)
            counts.append(counts[-1] + sum(ceil_div(n, 2) for n in of_units))
        return Feed("expert", "cache", 0, 4 * s.tile_kv, (4 * s.tile_kv,), tuple(counts))

    def dense(self, i: int, before: str) -> list[Phase]:
        """The MLP of a layer without experts."""
        s, tokens = self.shape, self.tokens
        (gate_up, down), rms = self.mlp_feeds(i), Use("rms", tokens)
        hidden, _, squares = self.hidden()
        swiglu = Use("swiglu", tokens * s.dense_inner)
        return [
            self.phase(
                "dense_gate_up",
                i,
                Items(s.mlp_pairs, f"{PAGE_ROWS} rows of gate and of up"),
                gate_up,
                self.mlp_scales(i, 0, 2 * self.layout.dense_inner_rows),
                reads=(hidden, squares, rms),
                writes=(rms, *self.own(swiglu)),
                waits=(Wait(before),),
                exchange=self.exchange("swiglu", words=tokens * self.layout.dense_inner_rows // 2),
            ),
            *self.ends(
                "dense_down",
                i,
                Items(s.owners, "hidden rows of an SM"),
                down,
                self.mlp_scales(i, 2 * self.layout.dense_inner_rows, self.layout.hidden_rows),
                next_norm=self.vectors(i + 1, "attn_norm")[0],
                reads=(swiglu,),
                waits=(Wait(f"layers.{i}.dense_gate_up"),),
            ),
        ]

    def pre_proj(self, i: int, before: str) -> Phase:
        """The input of narrow experts. The router, which comes next, does not need it and waits only for ranks."""
        s, tokens, rms = self.shape, self.tokens, Use("rms", self.tokens)
        hidden, _, squares = self.hidden()
        made = self.own(Use("narrow", tokens * s.narrow), Use("narrow_squares", tokens * s.narrow // PAGE_ROWS))
        return self.phase(
            "pre_proj",
            i,
            Items(s.pre_units, f"{PAGE_ROWS} rows of the experts' input"),
            self.mlp_feeds(i)[0],
            self.mlp_scales(i, 0, self.layout.narrow_rows),
            *self.vectors(i, "pre_norm"),
            reads=(hidden, squares, rms),
            writes=(rms, *made),
            waits=(Wait(before),),
            exchange=self.exchange(
                "narrow", "narrow_squares", words=tokens * (self.layout.narrow_rows // 2 + s.pre_units)
            ),
        )

    def narrow_down(self, i: int, swiglu: Use, choice: Use) -> list[Phase]:
        """The outputs of narrow experts, each normed over all its rows, summed, and back to the model's width."""
        s, p, tokens = self.shape, f"layers.{i}.", self.tokens
        products, mixed = Use("products", tokens * s.top_k * self.down_rows), Use("mixed", tokens * s.narrow)
        squares = Use("pair_squares", tokens * s.top_k * s.narrow // OWNED_ROWS)
        rows = Items(s.down_owners, "rows of an SM, all experts")
        return [
            self.phase(
                "down",
                i,
                rows,
                self.down(i, s.down_pack),
                *self.vectors(i, "down_bias", "expert_norm"),
                routed=True,
                reads=(swiglu, choice),
                writes=(products, *self.own(squares)),
                waits=(Wait(p + "gate_up"),),
                exchange=self.exchange("pair_squares", words=tokens * s.top_k * s.down_units),
            ),
            self.phase(
                "mix",
                i,
                rows,
                reads=(products, squares, choice),
                writes=self.own(mixed),
                waits=(Wait(p + "down"),),
                exchange=self.exchange("mixed", words=tokens * s.down_units * OWNED_ROWS // 2),
            ),
            *self.ends(
                "post_proj",
                i,
                Items(s.owners, "hidden rows of an SM"),
                self.mlp_feeds(i)[1],
                self.mlp_scales(i, self.layout.narrow_rows, self.layout.hidden_rows),
                next_norm=self.vectors(i + 1, "attn_norm")[0],
                reads=(mixed,),
                waits=(Wait(p + "mix"),),
            ),
        ]

    def mlp(self, i: int, before: str) -> list[Phase]:
        s, p, tokens = self.shape, f"layers.{i}.", self.tokens
        hidden, router_input, squares = self.hidden()
        logits, rms = Use("router_logits", tokens * s.experts), Use("rms", tokens)
        x, choice = (
            Use("input", tokens * (s.expert_hidden + 8)),
            Use("choice", 3 * tokens * s.top_k + 2 * s.experts + 1),
        )
        swiglu = Use("swiglu", tokens * s.top_k * s.inner)
        # A tile of several pages is passed over again for every eight of its tokens, and kept meanwhile.
        held = s.pair_groups if s.pair_groups > 1 else len(self.gate_up(i).pages) if tokens > 8 else 1
        own = Use("narrow", tokens * s.narrow), Use("narrow_squares", tokens * s.narrow // PAGE_ROWS), rms
        down = [
            *self.ends(
                "down",
                i,
                Items(s.owners, "hidden rows of an SM, all experts"),
                self.down(i, s.down_pack),
                *self.vectors(i, "down_bias"),
                next_norm=self.vectors(i + 1, "attn_norm")[0],
                routed=True,
                reads=(swiglu, choice),
                waits=(Wait(p + "gate_up"),),
            )
        ]
        return [
            *([self.pre_proj(i, before)] if s.narrow else []),
            self.phase(
                "router",
                i,
                Items(s.experts, "expert"),
                self.of_layer("routers", i),
                *self.vectors(i, "router_bias"),
                reads=(router_input, rms) if s.narrow else (hidden, router_input, squares, rms),
                writes=(logits,) if s.narrow else (x, rms, logits),
                waits=(Wait(p + "pre_proj" if s.narrow and self.ranks > 1 else before),),
            ),
            self.phase(
                "choose",
                i,
                Items(1, "top-k on every SM", "token"),
                *self.vectors(i, "choice_bias"),
                reads=(logits, *own) if s.narrow else (logits,),
                writes=(choice, x, rms) if s.narrow else (choice,),
                waits=(Wait(p + "router"),),
            ),
            self.phase(
                "gate_up",
                i,
                Items(s.pair_units, "8 rows of gate and of up", "active expert"),
                self.gate_up(i, held=held, after=p + "choose"),
                self.of_layer("expert_scales", i, routed=True),
                *self.vectors(i, "gate_up_bias"),
                routed=True,
                reads=(x, rms, choice),
                writes=self.own(swiglu),
                exchange=self.exchange("swiglu", words=tokens * s.top_k * s.pair_units * PAGE_ROWS // 2),
            ),
            *(self.narrow_down(i, swiglu, choice) if s.narrow else down),
        ]
