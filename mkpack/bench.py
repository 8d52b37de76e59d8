"""`mkpack bench`: speed of an artifact on this machine, beside the time its bytes take at the memory's own speed. Here
of CPU targets; bench_gpu.py measures the others, bench_rank.py one rank alone.

Decode is measured after filling the cache to a context, prefill while filling it. Both are medians of several runs; the
bandwidth is that of the same threads over the same weights, the best of passes before, between and after.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mkpack import platform, schedule
from mkpack.errors import UserError
from mkpack.generation import spread
from mkpack.loader import load, rank_alone
from mkpack.model import Model

if TYPE_CHECKING:
    from mkpack.bench_gpu import GpuResult
    from mkpack.bench_rank import RankResult
    from mkpack.launcher import World

DEFAULT_CONTEXTS = (128, 1024)
NEW_TOKENS = 64
RUNS = 5


@dataclass(frozen=True)
class Point:
    """Speeds at one context. Times are ms per token; bounds are bytes over bandwidth; MB are 1e6 bytes per token."""

    context: int
    decode_ms: float
    decode_mb: float
    decode_bound_ms: float
    prefill_ms: float
    prefill_mb: float
    prefill_bound_ms: float

    @property
    def decode_share(self) -> float:
        return self.decode_bound_ms / self.decode_ms


@dataclass(frozen=True)
class BenchResult:
    artifact: str
    target: str
    threads: int
    ranks: int  # with memory of their own; 1 where all share one
    random_weights: bool
    bandwidth_gb_s: float
    load_s: float
    check: str
    points: tuple[Point, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def render(self) -> str:
        lines = [
            f"artifact   {self.artifact}, {self.target}, {self.threads} threads"
            + (f", {self.ranks} ranks with memory of their own" if self.ranks > 1 else "")
            + (", random weights" if self.random_weights else ""),
            f"load       {self.load_s:.2f} s, digests checked",
            f"bandwidth  {self.bandwidth_gb_s:.1f} GB/s read by the same threads",
            f"check      {self.check}",
            "",
            "context   decode ms/token  tokens/s  MB/token  bound ms  of bound | prefill ms/token  tokens/s  bound ms",
        ]
        for p in self.points:
            lines.append(
                f"{p.context:7d}  {p.decode_ms:15.2f}  {1e3 / p.decode_ms:8.1f}  {p.decode_mb:8.1f}"
                f"  {p.decode_bound_ms:8.2f}  {p.decode_share:8.0%} |"
                f" {p.prefill_ms:16.2f}  {1e3 / p.prefill_ms:8.1f}  {p.prefill_bound_ms:8.2f}"
            )
        lines.append("")
        lines.append(
            "bound: bytes that must be read / bandwidth. Prefill shares each read among the tokens of a step and is"
        )
        lines.append("limited by arithmetic, not by memory.")
        return "\n".join(lines)


def run(
    path: Path | str,
    *,
    target: str | None = None,
    threads: int | None = None,
    ranks: bool = False,
    contexts: Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rank_of: int | None = None,
    rank: int | None = None,
    world: World | None = None,
) -> BenchResult | GpuResult | RankResult | None:
    """Measures an artifact; None in a process without rank 0, which only helps. target, threads, ranks, rank_of, rank,
    world: as load() takes them. contexts: positions in the cache when decoding starts. prompt_tokens, new_tokens: of
    the generation that is timed on a GPU; a CPU target and a rank by itself have none.

    Raises UserError for a context that leaves no room for the measured tokens.
    """
    if rank_of is not None and (prompt_tokens or new_tokens):
        raise UserError("--prompt-tokens and --new-tokens: a rank by itself generates nothing of meaning")
    start = time.perf_counter()
    with load(path, target=target, threads=threads, ranks=ranks, rank_of=rank_of, rank=rank, world=world) as model:
        if model.follows:
            from mkpack import launcher

            launcher.serve(model)
            return None
        model.step([0], 0)  # waits for the digests, as the first token of a run does
        load_s = time.perf_counter() - start
        if rank_of is not None:
            from mkpack import bench_rank

            return bench_rank.run(model, str(path), load_s, rank_alone(model.manifest, rank), contexts)
        if model.manifest.kernels[model.target].layout == "cuda":
            from mkpack import bench_gpu

            return bench_gpu.run(model, str(path), load_s, contexts, prompt_tokens, new_tokens)
        if prompt_tokens or new_tokens:
            raise UserError(f"--prompt-tokens and --new-tokens are for GPUs; the target here is {model.target}")
        room = model.context - NEW_TOKENS
        if too_long := [c for c in contexts or () if c > room]:
            raise UserError(f"context {too_long[0]}: expected at most {room}, {NEW_TOKENS} below the artifact's limit")
        chosen = contexts or [c for c in DEFAULT_CONTEXTS if c <= room] or [max(room, 1)]
        bandwidth = model.read_bandwidth()
        check = _check(model)
        timed = []
        for c in chosen:
            timed.append(_time(model, c))
            bandwidth = max(bandwidth, model.read_bandwidth())
        return BenchResult(
            artifact=str(path),
            target=model.target,
            threads=max(threads or platform.cores(), model.manifest.tp if ranks else 1),
            ranks=model.manifest.tp if ranks else 1,
            random_weights=model.manifest.source.kind == "dummy",
            bandwidth_gb_s=bandwidth / 1e9,
            load_s=load_s,
            check=check,
            points=tuple(_point(model, c, d, p, bandwidth) for c, (d, p) in zip(chosen, timed, strict=True)),
        )


def _check(model: Model) -> str:
    """The same tokens in steps of the most tokens and one at a time must give the same bits."""
    tokens = spread(model.spec.vocab_size, min(24, model.context))
    model.reset()
    together = model.step(tokens, 1)
    model.reset()
    for token in tokens:
        alone = model.step([token], 1)
    same = together.tobytes() == alone.tobytes()
    return f"logits of {len(tokens)} tokens in whole steps and one by one: {'equal bits' if same else 'DIFFERENT'}"


def _time(model: Model, context: int) -> tuple[float, float]:
    """(decode, prefill) in ms per token, medians."""
    prompt, decode, prefill = spread(model.spec.vocab_size, context), [], []
    for _ in range(RUNS):
        with model.generate_tokens(prompt, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_tokens=[]) as generation:
            for _token in generation:
                pass
            result = generation.result
        assert result is not None
        decode.append(result.decode_s / (result.num_new_tokens - 1) * 1e3)
        prefill.append(result.prefill_s / context * 1e3)
    return statistics.median(decode), statistics.median(prefill)


def _point(model: Model, context: int, decode: float, prefill: float, bandwidth: float) -> Point:
    manifest = model.manifest
    step = min(manifest.limits.tokens_per_step, context)
    decode_bytes = model.bytes_per_step(1, context + NEW_TOKENS // 2)
    # The head runs for the last token only.
    step_phases = schedule.phases_of(manifest, manifest.kernels[model.target].layout)
    head = sum(p.nbytes for p in step_phases if p.name == "head")
    prefill_bytes = (model.bytes_per_step(step, context // 2) - head) / step + head / context
    return Point(
        context=context,
        decode_ms=decode,
        decode_mb=decode_bytes / 1e6,
        decode_bound_ms=decode_bytes / bandwidth * 1e3,
        prefill_ms=prefill,
        prefill_mb=prefill_bytes / 1e6,
        prefill_bound_ms=prefill_bytes / bandwidth * 1e3,
    )
