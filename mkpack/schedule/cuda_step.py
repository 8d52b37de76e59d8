"""What csrc/cuda/step_*.cuh do: a step of 1 to 16 tokens of any model. The whole grid meets after every phase but the
choice of experts, which every SM makes for itself."""

from __future__ import annotations

from mkpack.layout import ceil_div
from mkpack.layout_cuda import OWNED_ROWS, PAGE_ROWS
from mkpack.schedule.cuda import Kernel
from mkpack.schedule.ir import Buffer, Feed, Items, Machine, Phase, Use, Wait
from mkpack.schedule.shape import KV_TILE, MAX_TOKENS, Shape


class Step(Kernel):
    name = "step_kernel"

    def __init__(self, shape: Shape):
        super().__init__(shape)
        s = shape
        self.tokens = s.step_tokens
        self.units, self.rows = s.kv_heads * s.max_splits, ceil_div(MAX_TOKENS * s.group, 16) * 16
        self.owned_rows = s.owned_units * OWNED_ROWS

    def machine(self) -> Machine:
        return self.shape.step_machine()

    def buffers(self) -> list[Buffer]:
        s, spec, most = self.shape, self.spec, MAX_TOKENS
        pairs = most * s.top_k
        return [
            Buffer("given", "tokens that were given", s.context, "model", "int32"),
            Buffer("history", "every token so far", s.context + 1, "model", "int32"),
            Buffer("hidden", "hidden state x weights of the next norm", most * s.hidden, "step", "bfloat16"),
            Buffer("router_input", "the same", most * s.hidden, "step"),
            Buffer("squares", "every owner's share of the sum of squares", most * s.grid, "step"),
            Buffer("qkv", "queries, keys and values as projected", most * self.layout.qkv_rows, "layer"),
            Buffer("cache", "keys and values", self.cache(), "model", "bfloat16", per_layer=True),
            Buffer("partial", "of a KV split: weighted values", self.units * self.rows * s.head_dim, "layer"),
            Buffer("partial_sums", "of a KV split: maxima and sums", self.units * self.rows * 2, "layer"),
            Buffer("attention", "attention of every head", most * s.q_rows, "layer", "bfloat16"),
            Buffer("router_logits", "router logits", most * s.experts, "layer"),
            Buffer("swiglu", "silu(gate) * up", pairs * s.inner, "layer", "bfloat16"),
            Buffer("logits", "logits", most * spec.vocab_size, "step"),
            Buffer("best", "every SM's highest logit, and its row", most * s.grid * 2, "step"),
            Buffer("shared_token", "the token drawn, and what the host says", 2, "step", "int32"),
            Buffer("residual", "hidden rows of this SM", most * self.owned_rows, "step", scope="private"),
            Buffer("rms", "1/rms of the phase's input", most, "layer", scope="private"),
            Buffer("input", "input of gate_up", self.tokens * (s.hidden + 8), "layer", "bfloat16", "private"),
            # Of every pair expert, weight and place in the list; of every expert its number and its first pair.
            Buffer("choice", "chosen experts, their tokens", 3 * pairs + 2 * s.experts + 1, "layer", scope="private"),
            Buffer("token", "to run next", 1, "model", "int32", "private"),
        ]

    def phases(self) -> list[Phase]:
        s, spec, tokens = self.shape, self.spec, self.tokens
        last = f"layers.{len(spec.layers) - 1}.down"
        embed = self.phase(
            "embed",
            None,
            Items(s.owners, "hidden rows of an SM"),
            *self.vectors(0, "attn_norm"),
            gathers=("embedding",),
            reads=(Use("given", tokens), Use("token", 1)),
            writes=(Use("residual", tokens * self.owned_rows), *self.hidden()),
            waits=(Wait(last, earlier_step=True),),
        )
        result = [embed]
        for i in range(len(spec.layers)):
            result += [*self.attention(i, result[-1].key), *self.mlp(i)]
        logits, best = Use("logits", tokens * spec.vocab_size), Use("best", tokens * s.grid * 2)
        shared, rms = Use("shared_token", 2), Use("rms", tokens)
        result += [
            self.phase(
                "head",
                None,
                Items(s.head_units, f"{PAGE_ROWS} rows of the vocabulary"),
                self.head(),
                self.whole("head_scales"),
                reads=(*self.hidden()[:1], *self.hidden()[2:], rms),
                writes=(rms, logits, best, shared),
                waits=(Wait(last),),
                optional=True,
            ),
            self.phase(
                "sample",
                None,
                Items(1, "next token", workers="first"),
                reads=(Use("history", s.context),),
                updates=(logits, shared),
                waits=(Wait("head"),),
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

    def hidden(self) -> tuple[Use, Use, Use]:
        """What a phase that changed the residual leaves for the next."""
        s, tokens = self.shape, self.tokens
        rows = tokens * s.hidden
        return Use("hidden", rows), Use("router_input", rows), Use("squares", tokens * s.grid)

    def attention(self, i: int, before: str) -> list[Phase]:
        s, p, tokens = self.shape, f"layers.{i}.", self.tokens
        qkv, rms = Use("qkv", tokens * self.layout.qkv_rows), Use("rms", tokens)
        partial = (Use("partial", self.units * self.rows * s.head_dim), Use("partial_sums", self.units * self.rows * 2))
        attention, residual = Use("attention", tokens * s.q_rows), Use("residual", tokens * self.owned_rows)
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
                writes=(rms, qkv),
                waits=(Wait(before),),
            ),
            self.phase(
                "attention",
                i,
                Items(s.kv_heads, "KV head", "split of the cache"),
                self.cache_feed(),
                *self.vectors(i, "q_norm", "k_norm"),
                reads=(qkv,),
                writes=partial,
                updates=(Use("cache", self.cache()),),
                waits=(Wait(p + "qkv"),),
            ),
            self.phase(
                "combine",
                i,
                Items(self.spec.num_attention_heads, "query head", "token"),
                reads=partial,
                writes=(attention,),
                waits=(Wait(p + "attention"),),
            ),
            self.phase(
                "output",
                i,
                Items(s.owners, "hidden rows of an SM"),
                self.output(i),
                *self.vectors(i, "o_bias", "mlp_norm"),
                self.row_scales(i, self.layout.qkv_rows, s.hidden),
                reads=(attention,),
                writes=self.hidden(),
                updates=(residual,),
                waits=(Wait(p + "combine"),),
            ),
        ]

    def cache_feed(self) -> Feed:
        """Pages of two tiles of the cache, of all splits at the longest context. They come a step after they were
        written, so they wait for nothing but their turn in the ring."""
        s = self.shape
        units, tiles = s.kv_heads * s.max_splits, s.context // KV_TILE
        counts = [0]
        for sm in range(s.grid):
            mine = (u % s.max_splits for u in range(sm, units, s.grid))
            of_units = (max(0, ceil_div(tiles - split, s.max_splits)) for split in mine)
            counts.append(counts[-1] + sum(ceil_div(n, 2) for n in of_units))
        return Feed("expert", "cache", 0, 4 * s.tile_kv, (4 * s.tile_kv,), tuple(counts))

    def mlp(self, i: int) -> list[Phase]:
        s, p, tokens = self.shape, f"layers.{i}.", self.tokens
        hidden, router_input, squares = self.hidden()
        logits, rms = Use("router_logits", tokens * s.experts), Use("rms", tokens)
        x, choice = Use("input", tokens * (s.hidden + 8)), Use("choice", 3 * tokens * s.top_k + 2 * s.experts + 1)
        swiglu = Use("swiglu", tokens * s.top_k * s.inner)
        # A tile of several pages is passed over again for every eight of its tokens, and kept meanwhile.
        held = s.pair_groups if s.pair_groups > 1 else len(self.gate_up(i).pages) if tokens > 8 else 1
        return [
            self.phase(
                "router",
                i,
                Items(s.experts, "expert"),
                self.of_layer("routers", i),
                reads=(hidden, router_input, squares, rms),
                writes=(x, rms, logits),
                waits=(Wait(p + "output"),),
            ),
            self.phase(
                "choose",
                i,
                Items(1, "top-k on every SM", "token"),
                reads=(logits,),
                writes=(choice,),
                waits=(Wait(p + "router"),),
            ),
            self.phase(
                "gate_up",
                i,
                Items(s.pair_units, "8 rows of gate and of up", "active expert"),
                self.gate_up(i, held=held, after=p + "choose"),
                self.of_layer("expert_scales", i, routed=True),
                routed=True,
                reads=(x, rms, choice),
                writes=(swiglu,),
            ),
            self.phase(
                "down",
                i,
                Items(s.owners, "hidden rows of an SM, all experts"),
                self.down(i, s.down_pack),
                *self.vectors(i + 1, "attn_norm"),
                routed=True,
                reads=(swiglu, choice),
                writes=self.hidden(),
                updates=(Use("residual", tokens * self.owned_rows),),
                waits=(Wait(p + "gate_up"),),
            ),
        ]
