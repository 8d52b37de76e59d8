"""One layer of a model at a time in plain torch, float32: what `ModelSpec` says, run on whole sequences, so that what
goes into every matrix can be seen without a model in memory.

Sums are the same on any number of CPUs: threads take whole experts, whole sequences, or a fixed number of rows, and
what they give is added in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from mkpack import platform
from mkpack.spec import ModelSpec, SwigluSpec

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ROWS = 256  # of a matrix product that one thread takes

# The float32 tensor of a canonical name (TensorRole.name), or those of its rows, read anew each time.
Load = Callable[[str, Sequence[int] | None], "torch.Tensor"]
# Is told the input [rows, in_features] of matrices that share it, by the name of the projection: "layers.0.qkv", ".o",
# ".dense.gate_up", ".dense.down", ".experts.3.gate_up", ".experts.3.down", ".pre_proj", ".post_proj". Several threads
# call it at once, for different names.
See = Callable[[str, "torch.Tensor"], None]


class Forward:
    """Layers of a model on sequences that lie one after the other in one array of rows. Use as a context manager."""

    def __init__(self, spec: ModelSpec, load: Load, see: See) -> None:
        import torch

        self.spec, self.load_rows, self.see = spec, load, see
        self._torch_threads = torch.get_num_threads()
        self._threads = platform.cores()
        self._pool = ThreadPoolExecutor(self._threads, "mkpack-forward", torch.set_num_threads, (1,))

    def __enter__(self) -> Forward:
        import torch

        torch.set_num_threads(1)  # torch's own threads would spin while those of the pool work
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_num_threads(self._torch_threads)
        self._pool.shutdown(cancel_futures=True)

    def load(self, name: str) -> torch.Tensor:
        return self.load_rows(name, None)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The residual stream before the first layer: float32 [tokens, hidden_size]."""
        x = self.load_rows("embed", list(tokens))
        return normed(x, self.spec.rms_norm_eps) if self.spec.embed_norm else x

    def layer(self, i: int, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The residual stream after layer i, which may be `x` itself, changed. lengths: of the sequences, one after the
        other in `x`."""
        spec, p = self.spec, f"layers.{i}."
        y = self._attention(i, self._norm(x, p + "attn_norm"), lengths)
        x = self._residual(p, "attn", x, y)
        h = self._norm(x, p + "mlp_norm")
        y = self._moe(p, h) if spec.layers[i].moe else self._dense(p + "dense.", h)
        if spec.sandwich:
            y = y * (1 + self.load(p + "mlp_out_norm"))
        return self._residual(p, "mlp", x, y)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.load(name)
        return normed(x, self.spec.rms_norm_eps) * (weight + 1 if self.spec.centered_norms else weight)

    def _residual(self, p: str, part: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sandwich = self.spec.sandwich
        if sandwich is None:
            return x + y
        gate = self.load(f"{p}{part}_residual_gate") / sandwich.gate_temperature
        beta = gate.sigmoid()
        alpha = ((-gate).sigmoid() * (1 + beta)).clamp(min=sandwich.gate_floor).sqrt()
        return alpha * x + beta * normed(y, sandwich.eps)

    def _in_order(self, work: Callable[[T], torch.Tensor], items: Iterable[T]) -> Iterator[torch.Tensor]:
        """work() of every item by the pool, in order, with few results waiting."""
        waiting: deque[Future[torch.Tensor]] = deque()
        for item in items:
            waiting.append(self._pool.submit(work, item))
            if len(waiting) > self._threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _by_rows(self, work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(list(self._in_order(work, x.split(ROWS))))

    def _project(self, x: torch.Tensor, name: str, bias: bool = False) -> torch.Tensor:
        weight = self.load(name)
        y = self._by_rows(lambda rows: rows @ weight.T, x)
        return y + self.load(name + "_bias") if bias else y

    def _dense(self, p: str, x: torch.Tensor) -> torch.Tensor:
        self.see(p + "gate_up", x)
        h = swiglu(self._project(x, p + "gate"), self._project(x, p + "up"), None)
        self.see(p + "down", h)
        return self._project(h, p + "down")

    def _moe(self, p: str, x: torch.Tensor) -> torch.Tensor:
        import torch

        moe = self.spec.moe
        assert moe is not None
        weights, chosen = self.route(p, x)
        if moe.hidden_size:
            self.see(p + "pre_proj", x)
            x = self._norm(self._project(x, p + "pre_proj"), p + "pre_norm")
        places = [(chosen == e).nonzero(as_tuple=True) for e in range(moe.num_experts)]
        used = [e for e in range(moe.num_experts) if len(places[e][0])]
        scale = 1 + self.load(p + "expert_norm") if moe.hidden_size else None

        def expert(e: int) -> torch.Tensor:
            rows, slots = places[e]
            y = self._expert(f"{p}experts.{e}.", x[rows])
            if scale is not None:
                y = normed(y * scale, moe.expert_norm_eps)
            return y * weights[rows, slots][:, None]

        out = torch.zeros_like(x)
        for e, y in zip(used, self._in_order(expert, used), strict=True):
            out[places[e][0]] += y  # a token chooses an expert once
        if moe.hidden_size:
            self.see(p + "post_proj", out)
            out = self._project(out, p + "post_proj")
        return out

    def route(self, p: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, experts int64), both [rows, top_k], of a layer with experts whose names begin with p."""
        moe = self.spec.moe
        assert moe is not None
        router = self._project(x, p + "router", moe.router_bias) * moe.router_scale
        scores = router.softmax(dim=-1) if moe.scoring == "softmax" else router.double().sigmoid().float()
        wanted = scores + self.load(p + "choice_bias") if moe.choice_bias else scores
        chosen = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
        weights = scores.gather(1, chosen)
        if moe.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + moe.norm_topk_eps)
        return weights * moe.routed_scaling_factor, chosen

    def _expert(self, p: str, x: torch.Tensor) -> torch.Tensor:
        moe = self.spec.moe
        assert moe is not None

        def project(x: torch.Tensor, part: str) -> torch.Tensor:
            y = x @ self.load(p + part).T
            return y + self.load(f"{p}{part}_bias") if moe.expert_bias else y

        self.see(p + "gate_up", x)
        h = swiglu(project(x, "gate"), project(x, "up"), moe.swiglu)
        self.see(p + "down", h)
        return project(h, "down")

    def _attention(self, i: int, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        import torch

        spec, p = self.spec, f"layers.{i}."
        self.see(p + "qkv", x)
        q, k, v = (self._heads(p, part, x) for part in "qkv")

        def sequence(rows: slice) -> torch.Tensor:
            return self._attend(i, q[rows], k[rows], v[rows])

        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        y = torch.cat(list(self._in_order(sequence, rows)))
        if spec.attention_out_norm:
            y = normed(y, spec.rms_norm_eps)
        y = y.reshape(len(x), -1)
        if spec.attention_gate:
            y = y * self._project(x, p + "attn_gate").sigmoid()
        self.see(p + "o", y)
        return self._project(y, p + "o", spec.o_bias)

    def _heads(self, p: str, part: str, x: torch.Tensor) -> torch.Tensor:
        """q, k or v, normed: float32 [rows, heads, head_dim]."""
        spec = self.spec
        y = self._project(x, p + part, spec.qkv_bias)
        if part != "v" and spec.qk_norm:
            if spec.qk_norm_over == "head":
                y = y.reshape(len(x), -1, spec.head_dim)
            y = normed(y, spec.rms_norm_eps)
            if spec.qk_norm_weight:
                y = y * self.load(f"{p}{part}_norm")
        return y.reshape(len(x), -1, spec.head_dim)

    def _attend(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One sequence: float32 [n, heads, head_dim]."""
        import torch

        spec, layer, n = self.spec, self.spec.layers[i], len(q)
        if layer.rope:
            q, k = self._rope(q), self._rope(k)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (layer.sliding_window or n))
        group = spec.num_attention_heads // spec.num_key_value_heads
        sinks = self.load(f"layers.{i}.sinks") if spec.attention_sinks else None
        out = torch.empty_like(q)
        for head in range(spec.num_attention_heads):
            scores = q[:, head] @ k[:, head // group].T * (spec.qk_scale / spec.head_dim**0.5)
            scores.masked_fill_(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(n, 1)], dim=1)
            out[:, head] = scores.softmax(dim=-1)[:, :n] @ v[:, head // group]
        return out

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates the first dimensions of [n, heads, head_dim], two for each inv_freq; i pairs with i +
        len(inv_freq)."""
        import torch

        rope = self.spec.rope
        half = len(rope.inv_freq)
        angle = torch.arange(len(x), dtype=torch.float32)[:, None] * torch.tensor(rope.inv_freq)
        cos, sin = ((f(angle) * rope.attention_factor)[:, None, :] for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def swiglu(gate: torch.Tensor, up: torch.Tensor, clamped: SwigluSpec | None) -> torch.Tensor:
    """The input of the down projection; spec.SwigluSpec says what clamping is."""
    if clamped is None:
        return gate * gate.sigmoid() * up
    gate = gate.clamp(max=clamped.limit)
    up = up.clamp(-clamped.limit, clamped.limit) + clamped.up_offset
    return gate * (clamped.alpha * gate).sigmoid() * up
