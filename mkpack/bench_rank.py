"""`mkpack bench --rank-of N`: steps of one rank by itself, on one GPU, with its peers looped back: what it sends to
them it receives in their place. So a rank of a model that is too large for one GPU has its speed; what it computes
means nothing.

What an exchange costs is told from the same step without its exchanges, which sends nothing and awaits nothing. That
one chooses other experts, so its time is scaled to the same bytes. All times are medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mkpack.bench_gpu import contexts_within, gpu_name
from mkpack.generation import spread
from mkpack.layout_cuda import GRID, per_device_of

if TYPE_CHECKING:
    from mkpack.model import Model

CONTEXTS = (512,)
STEP_TOKENS = (1, 4, 8, 16)
ROOM = 16  # positions that a step takes behind the context
RUNS = 20
SPEED_ONLY = "looped back: speed only, its tokens and logits mean nothing"


@dataclass(frozen=True)
class RankStep:
    """A step of `tokens` tokens at a context: ms by the device; bytes of the rank in 1e6, distinct experts a layer as
    counted by the kernel. exchange_bytes: what an exchange brings to the rank, mean over the step. without_ms: of the
    same step without exchanges, as measured; exchange_us: what is left of ms when that is scaled to the same bytes, per
    exchange."""

    context: int
    tokens: int
    ms: float
    mb: float
    experts: float
    exchanges: int
    exchange_bytes: float
    without_ms: float
    exchange_us: float
    bound_ms: float = 0.0


@dataclass(frozen=True)
class RankResult:
    """sms: that a rank's grid has; rank_gb: bytes of its weights, in 1e9."""

    artifact: str
    target: str
    gpu: str
    rank: int
    rank_of: int
    sms: int
    rank_gb: float
    random_weights: bool
    bandwidth_gb_s: float
    load_s: float
    check: str
    steps: tuple[RankStep, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def render(self) -> str:
        lines = [
            f"artifact   {self.artifact}, {self.target} on {self.gpu}"
            + (", random weights" if self.random_weights else ""),
            f"rank       {self.rank} of {self.rank_of} on {self.sms} SMs, {self.rank_gb:.3f} GB of weights",
            f"load       {self.load_s:.2f} s, digests of this rank checked",
            f"bandwidth  {self.bandwidth_gb_s:.1f} GB/s read by this rank's SMs in this run",
            f"check      {self.check}",
            "",
            "context   T  ms/step  experts        MB  bound ms  of bound | exchanges   B each  us each | ms without",
        ]
        for s in self.steps:
            lines.append(
                f"{s.context:7d}  {s.tokens:2d}  {s.ms:7.4f}  {s.experts:7.1f}  {s.mb:8.1f}  {s.bound_ms:8.4f}"
                f"  {s.bound_ms / s.ms:8.1%} | {s.exchanges:9d}  {s.exchange_bytes:7.0f}  {s.exchange_us:7.2f} |"
                f" {s.without_ms:10.4f}"
            )
        lines += [
            "",
            "bound: bytes that the rank must read / bandwidth; experts: distinct ones a step chose, mean of layers.",
            "us each: (step - the same step without exchanges, scaled to the same bytes) / exchanges. All words came",
            "from this rank itself: skew between ranks and the links between GPUs are not in it.",
        ]
        return "\n".join(lines)


def run(model: Model, artifact: str, load_s: float, rank: int, contexts: Sequence[int] | None = None) -> RankResult:
    """Measures a model of which `rank` was loaded alone. contexts: positions in the cache, by default CONTEXTS as far
    as it fits. UserError for one that leaves no room."""
    chosen = contexts_within(model.context, contexts, CONTEXTS, ROOM)
    manifest, vocab_size = model.manifest, model.spec.vocab_size
    model.bytes_per_step()  # UserError, before anything is measured, where there is no layout
    bandwidth = model.read_bandwidth()
    steps = []
    for context in chosen:
        model.reset()
        model.step(spread(vocab_size, context), 0)
        for count in (n for n in STEP_TOKENS if n <= min(manifest.limits.tokens_per_step, model.context - context)):
            runs = [model.time_rank(spread(vocab_size, count, context + i * count)) for i in range(-2, RUNS)][2:]
            experts, others = (
                statistics.mean(e) for e in zip(*((r.experts, r.without_experts) for r in runs), strict=True)
            )
            read, read_without = (model.bytes_per_step(count, context, n) for n in (experts, others))
            ms = statistics.median(r.step_s for r in runs) * 1e3
            without_ms = statistics.median(r.without_s for r in runs) * 1e3
            exchanges = runs[-1].exchanges
            steps.append(
                RankStep(
                    context=context,
                    tokens=count,
                    ms=ms,
                    mb=read / 1e6,
                    experts=experts,
                    exchanges=exchanges,
                    exchange_bytes=runs[-1].nbytes / exchanges,
                    without_ms=without_ms,
                    exchange_us=(ms - without_ms * read / read_without) / exchanges * 1e3,
                )
            )
        bandwidth = max(bandwidth, model.read_bandwidth())
    return RankResult(
        artifact=artifact,
        target=model.target,
        gpu=gpu_name(),
        rank=rank,
        rank_of=manifest.tp,
        sms=GRID[model.target] // per_device_of(manifest),
        rank_gb=manifest.weights_in("cuda")[0].nbytes / 1e9,  # every rank has as many
        random_weights=manifest.source.kind == "dummy",
        bandwidth_gb_s=bandwidth / 1e9,
        load_s=load_s,
        check=SPEED_ONLY,
        steps=tuple(replace(s, bound_ms=s.mb * 1e9 / bandwidth) for s in steps),
    )
