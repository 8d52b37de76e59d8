"""The buffers of the CPU target's step and their sizes, which csrc/cpu/state.h asserts, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mkpack.layout import TILE_ROWS, align, ceil_div, split_heads
from mkpack.schedule.ir import Buffer

if TYPE_CHECKING:
    from mkpack.manifest import Section
    from mkpack.spec import Format, ModelSpec

CHUNK = 256  # positions of one attention item
BUFFERS = (
    *("tokens", "history", "x", "cosine", "sine", "qkv", "squares", "keys", "values", "partial", "attention", "branch"),
    *("router", "narrow", "inner", "expert_out", "logits", "best_value", "best_token", "normed", "gathered", "active"),
    *("down_sum", "query", "scores"),
)


class Sizes:
    """Numbers that phases and buffers share. Buffers are sized by the spec, uses by the sections that fill them."""

    def __init__(
        self,
        spec: ModelSpec,
        sections: Iterable[Section],
        tp: int,
        context: int,
        tokens: int,
        down_input: Format | None = None,
    ):
        self.spec, self.tp, self.context, self.tokens, self.down_input = spec, tp, context, tokens, down_input
        self.sections = {s.name: s for s in sections}
        heads = split_heads(spec, tp)
        self.heads, self.kv_heads = tp * heads.q_heads, tp * heads.kv_heads
        self.rank_channels = heads.q_heads * spec.head_dim
        # Norms over a whole projection need one number of each head.
        self.squares = self.heads + self.kv_heads if spec.qk_norm and spec.qk_norm_over == "projection" else 0
        self.group = heads.q_heads // heads.kv_heads
        self.slots = 1 << (tokens - 1).bit_length()  # activations of a step lie in 1, 2, 4, 8 or 16 token slots
        self.dim = align(spec.head_dim, TILE_ROWS)
        self.hidden = align(spec.hidden_size, TILE_ROWS) * self.slots
        # The experts' width is another than that of x in some models.
        width = (spec.moe and spec.moe.hidden_size) or spec.hidden_size
        self.narrow = align(width, TILE_ROWS) * self.slots
        self.active = min(spec.moe.num_experts, tokens * spec.moe.top_k) if spec.moe else 1
        self.inner = align(
            max(spec.moe.intermediate_size if spec.moe else 0, spec.dense_intermediate_size or 0), TILE_ROWS
        )
        self.cache = len(spec.layers) * self.kv_heads * align(context, 16) * self.dim
        self.partial = tokens * self.heads * ceil_div(context, CHUNK) * (self.dim + 16)
        self.angles = tokens * len(spec.rope.inv_freq)
        q_rows, kv_rows = (align(n * spec.head_dim, TILE_ROWS) for n in (heads.q_heads, heads.kv_heads))
        self.qkv_rows = tp * (q_rows * (2 if spec.attention_gate else 1) + 2 * kv_rows)

    def buffers(self) -> list[Buffer]:
        spec, tokens, slots = self.spec, self.tokens, self.slots
        experts = align(spec.moe.num_experts, TILE_ROWS) if spec.moe else 0
        vocab = align(spec.vocab_size, TILE_ROWS)
        return [
            Buffer("tokens", "token ids of the step", tokens, "model", "int32"),
            Buffer("history", "every token so far", self.context, "model", "int32"),
            Buffer("x", "hidden state", self.hidden, "step"),
            Buffer("cosine", "rotary table of the step's positions", self.angles, "step"),
            Buffer("sine", "rotary table of the step's positions", self.angles, "step"),
            Buffer("qkv", "queries, keys and values as projected", self.qkv_rows * slots, "layer"),
            Buffer("squares", "sum of squares of every head of q and k", self.squares * tokens, "layer"),
            Buffer("keys", "key cache", self.cache, "model"),
            Buffer("values", "value cache", self.cache, "model"),
            Buffer("partial", "per 256 positions: weighted values, maximum, sum", self.partial, "layer"),
            Buffer("attention", "attention of every head", align(spec.q_size, TILE_ROWS) * slots, "layer"),
            Buffer("branch", "what attention or the MLP adds to x, not normed yet", self.hidden, "layer"),
            Buffer("router", "router logits, or scores where they are sigmoids", experts * slots, "layer"),
            Buffer("narrow", "x at the experts' width", self.narrow, "layer"),
            Buffer("inner", "silu(gate) * up", self.active * self.inner * slots, "layer"),
            Buffer("expert_out", "every chosen expert's output", self.active * self.narrow, "layer"),
            Buffer("logits", "logits", tokens * vocab, "step"),
            Buffer("best_value", "highest logit", tokens, "step", scope="published"),
            Buffer("best_token", "its token", tokens, "step", "int32", "published"),
            Buffer("normed", "norm(x)", max(self.hidden, self.narrow), "layer", scope="private"),
            Buffer(
                "gathered",
                "the tokens of one expert, or of the head",
                max(self.hidden, self.narrow),
                "phase",
                scope="private",
            ),
            # Token ids and routing weights; both are 4 bytes.
            Buffer(
                "active", "chosen experts and their tokens", self.active * (2 + 2 * tokens), "layer", "int32", "private"
            ),
            # A thread's share of the hidden state: the most is with one thread.
            Buffer("down_sum", "sum over experts", self.hidden + TILE_ROWS * slots, "phase", scope="private"),
            Buffer("query", "one head's queries", tokens * self.group * self.dim, "phase", scope="private"),
            Buffer("scores", "scores of one item", CHUNK, "phase", scope="private"),
        ]
