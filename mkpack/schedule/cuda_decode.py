"""What csrc/cuda/decode_*.cuh do: one token a step, of the models that kFastDecode admits. SMs exchange {value, epoch}
words instead of meeting: a worker goes on as soon as the words that it reads itself are there."""

from __future__ import annotations

from mkpack.layout_cuda import OWNED_ROWS, PAGE_ROWS
from mkpack.schedule.cuda import Kernel
from mkpack.schedule.ir import Buffer, Items, Machine, Phase, Put, Take, Use, Wait
from mkpack.schedule.shape import COPIES, LOGIT_COPIES, MAX_LOG_SPLITS, MAX_UNITS, MIN_LOG_SPLITS, Shape


class Decode(Kernel):
    """drawn: tokens are drawn by SM 0 from all logits; otherwise every SM takes the likeliest. log_splits: KV splits,
    which grow with the context."""

    tokens = 1

    def __init__(self, shape: Shape, drawn: bool, log_splits: int = MIN_LOG_SPLITS):
        super().__init__(shape)
        s = shape
        self.name = "decode_kernel, drawn" if drawn else "decode_kernel"
        self.drawn, self.splits = drawn, 1 << log_splits
        stride = s.grid // s.kv_heads >> log_splits
        units = s.kv_heads << log_splits
        # Attention unit of every SM, KV head major, or none.
        self.unit = [sm // stride if sm % stride == 0 and sm // stride < units else None for sm in range(s.grid)]

    @staticmethod
    def log_splits(shape: Shape) -> range:
        """Every number of splits that a step may have, as powers of two."""
        most = (min(shape.grid, MAX_UNITS) // shape.kv_heads).bit_length() - 1
        return range(MIN_LOG_SPLITS, 1 + min(most, MAX_LOG_SPLITS))

    def machine(self) -> Machine:
        return self.shape.decode_machine()

    @property
    def partial_words(self) -> int:
        """Of a unit: sums, then maximum and denominator of every head."""
        return self.shape.group * self.shape.head_dim + 2 * self.shape.group

    def buffers(self) -> list[Buffer]:
        s = self.shape
        return [
            *self.exchange(s),
            Buffer("cache", "keys and values", self.cache(), "model", "bfloat16", "ordered", per_layer=True),
            Buffer("logits", "logits", self.spec.vocab_size, "step", scope="ordered"),
            Buffer("history", "every token so far; SM 0's", s.context + 1, "model", "int32", "private"),
            Buffer("residual", "hidden rows of this SM", s.owned_units * OWNED_ROWS, "step", scope="private"),
            Buffer("input", "input of gate_up, in registers", s.hidden, "layer", "bfloat16", "private"),
            Buffer("choice", "chosen experts, logits and scales", 6 * s.top_k, "layer", scope="private"),
            Buffer("token", "to run next", 1, "model", "int32", "private"),
        ]

    @staticmethod
    def exchange(s: Shape) -> list[Buffer]:
        """Words, in the order in which they lie."""
        partial = MAX_UNITS * (s.group * s.head_dim + 2 * s.group)
        qkv_rows = s.q_rows + 2 * s.kv_heads * s.head_dim

        def words(name: str, holds: str, count: int, lifetime: str = "layer", replicas: int = 1) -> Buffer:
            return Buffer(name, holds, count, "step" if lifetime == "step" else "layer", "word", "words", replicas)

        return [
            words("x_mid", "hidden state after attention", s.hidden, replicas=COPIES),
            words("x_out", "hidden state after the experts", s.hidden, "step", COPIES),
            words("x_attention", "attention of every head, two a word", s.q_rows // 2, replicas=COPIES),
            words("x_experts", "silu(gate) * up, two a word", s.top_k * s.inner // 2, replicas=COPIES),
            words("x_logits", "router logits", s.experts, replicas=LOGIT_COPIES),
            words("x_qkv", "queries, keys and values as projected", qkv_rows),
            words("x_partial", "of a KV split: weighted values, maxima, sums", partial),
            words("x_best", "every SM's highest logit, and its row", 2 * s.grid, "step"),
            words("x_token", "the token drawn", 1, "step"),
        ]

    def phases(self) -> list[Phase]:
        s = self.shape
        result: list[Phase] = []
        for i in range(len(self.spec.layers)):
            result += [*self.attention(i), *self.mlp(i)]
        best, logits = Use("x_best", 2 * s.grid), Use("logits", self.spec.vocab_size)
        last = result[-1].key
        rows = tuple(min(self.spec.vocab_size, PAGE_ROWS * b) for b in s.spread(s.head_units))
        kept = (Put("logits", rows),) if self.drawn else ()
        head = self.phase(
            "head",
            None,
            Items(s.head_units, f"{PAGE_ROWS} rows of the vocabulary"),
            self.head(),
            self.whole("head_scales"),
            *self.vectors(len(self.spec.layers), "attn_norm"),
            reads=(Use("x_out", s.hidden),),
            writes=(best, logits) if self.drawn else (best,),
            waits=(Wait(last, "words"),),
            takes=(self.all_of("x_out", s.hidden, back=1),),
            puts=(Put("x_best", tuple(2 * n for n in range(s.grid + 1))), *kept),
        )
        result.append(head)
        token, history = Use("token", 1), Use("history", s.context + 1)
        if not self.drawn:
            return [
                *result,
                self.phase(
                    "token",
                    None,
                    Items(1, "next token on every SM"),
                    reads=(best,),
                    writes=(token,),
                    waits=(Wait("head", "words"),),
                    takes=(self.all_of("x_best", 2 * s.grid),),
                ),
            ]
        first_alone = (((0, 2 * s.grid),), *([()] * (s.grid - 1)))
        vocab = (((0, self.spec.vocab_size),), *([()] * (s.grid - 1)))
        return [
            *result,
            self.phase(
                "sample",
                None,
                Items(1, "next token", workers="first"),
                reads=(best, history),
                writes=(Use("x_token", 1),),
                updates=(logits,),
                waits=(Wait("head", "words"),),
                takes=(Take("x_best", first_alone), Take("logits", vocab)),
                puts=(Put("x_token", s.first_only(1)), Put("logits", s.first_only(self.spec.vocab_size))),
            ),
            self.phase(
                "token",
                None,
                Items(1, "next token on every SM"),
                reads=(Use("x_token", 1),),
                writes=(token, history),
                waits=(Wait("sample", "words"),),
                takes=(self.all_of("x_token", 1),),
            ),
        ]

    def all_of(self, buffer: str, words: int, owners: bool = False, back: int = 0) -> Take:
        """Every SM (or those that keep residuals) reads everything."""
        s = self.shape
        return Take(buffer, tuple(((0, words),) if not owners or sm < s.owners else () for sm in range(s.grid)), back)

    def put_units(self, buffer: str, each: int) -> Put:
        """`each` words of every attention unit."""
        found = [0]
        for unit in self.unit:
            found.append(found[-1] if unit is None else (unit + 1) * each)
        return Put(buffer, tuple(found))

    def take_units(self, buffer: str, each: int) -> Take:
        """Of every attention unit the words of all units of its KV head."""
        n = each * self.splits
        heads = [None if u is None else u // self.splits for u in self.unit]
        return Take(buffer, tuple(() if h is None else ((h * n, (h + 1) * n),) for h in heads))

    def attention(self, i: int) -> list[Phase]:
        s, p = self.shape, f"layers.{i}."
        first, units = i == 0, sum(u is not None for u in self.unit)
        qkv, partial = Use("x_qkv", self.layout.qkv_rows), Use("x_partial", units * self.partial_words)
        residual, hidden = Use("residual", s.owned_units * OWNED_ROWS), Use("x_out", s.hidden)
        out_rows = tuple(OWNED_ROWS * n for n in s.owned())
        q, kv, d = s.group * s.head_dim, s.q_rows, s.head_dim
        heads = [None if u is None else u // self.splits for u in self.unit]
        of_head = tuple(
            ()
            if h is None
            else ((h * q, (h + 1) * q), *((kv + (n + h) * d, kv + (n + h + 1) * d) for n in (0, s.kv_heads)))
            for h in heads
        )
        return [
            self.phase(
                "qkv",
                i,
                Items(s.qkv_units, f"{PAGE_ROWS} rows of q, k or v"),
                self.qkv(i),
                *self.vectors(i, "attn_norm"),
                self.row_scales(i, 0, self.layout.qkv_rows),
                gathers=("embedding",) if first else (),
                reads=(Use("token", 1),) if first else (hidden,),
                writes=(residual, qkv) if first else (qkv,),
                waits=() if first else (Wait(f"layers.{i - 1}.down", "words"),),
                takes=() if first else (self.all_of("x_out", s.hidden, back=1),),
                puts=(Put("x_qkv", tuple(PAGE_ROWS * n for n in s.spread(s.qkv_units))),),
            ),
            self.phase(
                "attention",
                i,
                Items(units, "KV head and split of the cache"),
                *self.vectors(i, "q_norm", "k_norm"),
                reads=(qkv,),
                writes=(partial,),
                updates=(Use("cache", self.cache()),),
                waits=(Wait(p + "qkv", "words"),),
                takes=(Take("x_qkv", of_head), self.take_units("cache", 1)),
                puts=(self.put_units("x_partial", self.partial_words), self.put_units("cache", 1)),
            ),
            self.phase(
                "combine",
                i,
                Items(units, "share of a KV head's outputs"),
                reads=(partial,),
                writes=(Use("x_attention", s.q_rows // 2),),
                waits=(Wait(p + "attention", "words"),),
                takes=(self.take_units("x_partial", self.partial_words),),
                puts=(self.put_units("x_attention", q // self.splits // 2),),
                meets=False,
            ),
            self.phase(
                "output",
                i,
                Items(s.owners, "hidden rows of an SM"),
                self.output(i),
                self.row_scales(i, self.layout.qkv_rows, s.hidden),
                reads=(Use("x_attention", s.q_rows // 2),),
                writes=(Use("x_mid", s.hidden),),
                updates=(residual,),
                waits=(Wait(p + "combine", "words"),),
                takes=(self.all_of("x_attention", s.q_rows // 2, owners=True),),
                puts=(Put("x_mid", out_rows),),
            ),
        ]

    def mlp(self, i: int) -> list[Phase]:
        s, p = self.shape, f"layers.{i}."
        logits, experts = Use("x_logits", s.experts), Use("x_experts", s.top_k * s.inner // 2)
        x, choice = Use("input", s.hidden), Use("choice", 6 * s.top_k)
        tiles = s.spread(s.top_k * s.pair_units)
        return [
            self.phase(
                "router",
                i,
                Items(s.experts, "expert"),
                self.of_layer("routers", i),
                *self.vectors(i, "mlp_norm"),
                reads=(Use("x_mid", s.hidden),),
                writes=(x, logits),
                waits=(Wait(p + "output", "words"),),
                takes=(self.all_of("x_mid", s.hidden),),
                puts=(Put("x_logits", tuple(min(s.experts, sm) for sm in range(s.grid + 1))),),
            ),
            self.phase(
                "choose",
                i,
                Items(1, "top-k on every SM"),
                reads=(logits,),
                writes=(choice,),
                waits=(Wait(p + "router", "words"),),
                takes=(self.all_of("x_logits", s.experts),),
            ),
            self.phase(
                "gate_up",
                i,
                Items(s.top_k * s.pair_units, "8 rows of gate and of up, of all chosen experts"),
                self.gate_up(i, after=p + "choose", early=2),
                self.of_layer("expert_scales", i, routed=True),
                routed=True,
                reads=(x, choice),
                writes=(experts,),
                puts=(Put("x_experts", tuple(PAGE_ROWS // 2 * n for n in tiles)),),
            ),
            self.phase(
                "down",
                i,
                Items(s.owners, "hidden rows of an SM, all experts"),
                self.down(i, pack=2),
                routed=True,
                reads=(experts, choice),
                writes=(Use("x_out", s.hidden),),
                updates=(Use("residual", s.owned_units * OWNED_ROWS),),
                waits=(Wait(p + "gate_up", "words"),),
                takes=(self.all_of("x_experts", s.top_k * s.inner // 2, owners=True),),
                puts=(Put("x_out", tuple(OWNED_ROWS * n for n in s.owned())),),
            ),
        ]
