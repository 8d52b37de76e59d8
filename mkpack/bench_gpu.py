"""`mkpack bench` on a GPU: steps of 1 to 16 tokens at several contexts, decoding, prefill and a whole generation, each
beside the time its bytes take at the memory's own speed and beside what was checked of its results.

Decoding is timed in generations, as a user meets it. Steps are timed by the device, a launch each, with logits of every
token: what verifying a draft takes. All are medians.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mkpack import platform, schedule, trace
from mkpack.errors import UserError
from mkpack.generation import spread
from mkpack.trace import Summary

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType
    from rich.table import Table

    from mkpack.generation import Result
    from mkpack.model import Model

CONTEXTS = (512, 1024, 8192, 32768, 131072)
STEP_TOKENS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 39, 512  # of the generation
CHECKED = 16  # tokens whose logits are compared
DECODE_TOKENS = ROOM = 64  # decoded at every context, and positions that they take behind it
RUNS, STEP_RUNS = 5, 20
LONG = 4096  # a longer prompt is run once, not RUNS times
# Of logits, relative: activations enter every product as bf16.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Step:
    """A step of `tokens` tokens: ms by the device; bytes in 1e6; distinct experts a layer, counted by the kernel.

    repeats: two runs gave equal bits. error: relative, of the logits of 16 tokens run in such steps, against steps of
    one.
    """

    tokens: int
    ms: float
    mb: float
    experts: float
    repeats: bool
    error: float
    bound_ms: float = 0.0


@dataclass(frozen=True)
class GpuPoint:
    """At one context. Decode and prefill are ms a token; bounds are bytes over bandwidth.

    repeats: every run decoded the same tokens. same_best: share of them that steps of the same tokens give the largest
    logit. gap: how far the others were below it at most, relative to the largest logit.
    """

    context: int
    decode_ms: float
    decode_mb: float
    prefill_s: float
    prefill_ms: float
    prefill_mb: float
    repeats: bool
    same_best: float
    gap: float
    steps: tuple[Step, ...]
    decode_bound_ms: float = 0.0
    prefill_bound_ms: float = 0.0


@dataclass(frozen=True)
class Generated:
    """A generation from an empty cache. decode: ms a token after the first."""

    prompt_tokens: int
    new_tokens: int
    prefill_ms: float
    decode_ms: float
    decode_mb: float
    repeats: bool
    decode_bound_ms: float = 0.0


@dataclass(frozen=True)
class GpuResult:
    artifact: str
    target: str
    gpu: str
    threads: int  # always 0: of the CPU there are none
    random_weights: bool
    bandwidth_gb_s: float
    load_s: float
    tolerance: float
    check: str
    generation: Generated
    points: tuple[GpuPoint, ...]
    ranks: int = 1
    phases: Summary | None = None  # of steps of one token at the first context, from a build with --trace

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def render(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=132, highlight=False, markup=False)
        for part in self._parts():
            console.print(part)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _parts(self) -> list[RenderableType]:
        g = self.generation
        head = [
            f"artifact    {self.artifact}, {self.target} on {self.gpu}"
            + (", random weights" if self.random_weights else ""),
            f"load        {self.load_s:.2f} s, digests checked",
            f"bandwidth   {self.bandwidth_gb_s:.1f} GB/s read by the same SMs in this run",
            f"generation  {g.prompt_tokens} tokens in, {g.new_tokens} out: {1e3 / g.decode_ms:.1f} tokens/s, "
            f"{g.decode_ms:.4f} ms/token, bound {g.decode_bound_ms:.4f} ms ({g.decode_bound_ms / g.decode_ms:.1%}); "
            f"prefill {g.prefill_ms:.2f} ms",
            f"check       {self.check}",
            "",
        ]
        decode = _table(
            "one token a step, chosen in the kernel",
            "context, tokens/s, ms/step, MB, bound ms, of bound, prefill s, ms/token, bound ms",
        )
        steps = _table(
            "steps of T tokens with logits of all, a launch each",
            "context, T, tokens/s, ms/step, experts, MB, bound ms, of bound",
        )
        for p in self.points:
            decode.add_row(
                f"{p.context}",
                f"{1e3 / p.decode_ms:.1f}",
                f"{p.decode_ms:.4f}",
                f"{p.decode_mb:.1f}",
                f"{p.decode_bound_ms:.4f}",
                f"{p.decode_bound_ms / p.decode_ms:.1%}",
                f"{p.prefill_s:.3f}",
                f"{p.prefill_ms:.4f}",
                f"{p.prefill_bound_ms:.4f}",
                f"{_repeats(p.repeats)}, best {p.same_best:.0%}, gap {p.gap:.0e}",
            )
            for s in p.steps:
                steps.add_row(
                    f"{p.context}",
                    f"{s.tokens}",
                    f"{1e3 * s.tokens / s.ms:.1f}",
                    f"{s.ms:.4f}",
                    f"{s.experts:.1f}",
                    f"{s.mb:.1f}",
                    f"{s.bound_ms:.4f}",
                    f"{s.bound_ms / s.ms:.1%}",
                    f"{_repeats(s.repeats)}, error {s.error:.0e}" + ("" if s.error <= self.tolerance else " ABOVE"),
                )
        notes = [
            "bound: bytes that must be read / bandwidth; experts: distinct ones a step chose, mean of the layers.",
            "error: of logits, relative to steps of one token; best: decoded tokens that steps of the same tokens find",
            "best too; gap: by how much the others are not, relative to the largest logit. Both errors belong below",
            f"{self.tolerance:g}: activations are rounded to bf16.",
        ]
        if self.ranks > 1:
            notes += [
                f"MB and bounds are those of one of {self.ranks} ranks, at the bandwidth of its SMs alone: where ranks",
                "share a GPU the real bound is higher.",
            ]
        if self.random_weights:
            notes += [
                "Random weights put experts close together, so that a rounding may choose another one: an error above",
                "that is then no sign of a fault.",
            ]
        phases = [f"phases, at context {self.points[0].context}: {self.phases.render()}", ""] if self.phases else []
        return ["\n".join(head), decode, "", steps, "", *phases, "\n".join(notes)]


def _table(title: str, columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns.split(", "):
        table.add_column(name, justify="right")
    table.add_column("check")
    return table


def _repeats(same: bool) -> str:
    return "equal bits" if same else "DIFFERENT bits"


def contexts_within(limit: int, wanted: Sequence[int] | None, default: Sequence[int], room: int) -> list[int]:
    """Contexts to measure at, ascending: those `wanted`, else of `default` what fits. room: positions behind each.
    UserError for one that leaves less."""
    most = max(limit - room, 1)
    if too_long := [c for c in wanted or () if c > most]:
        raise UserError(f"context {too_long[0]}: expected at most {most}, {room} below the artifact's limit")
    if wanted:
        return sorted(set(wanted))
    return sorted({min(c, most) for c in default if c <= limit}) or [most]


def gpu_name() -> str:
    driver = platform.cuda_driver()
    return driver.devices[0].name if driver and driver.devices else "a GPU"


def run(
    model: Model,
    artifact: str,
    load_s: float,
    contexts: Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
) -> GpuResult:
    """Measures a loaded model whose kernel runs on a GPU. contexts: positions in the cache, by default those of
    CONTEXTS that the model has. prompt_tokens, new_tokens: of the generation, by default PROMPT_TOKENS and NEW_TOKENS
    as far as they fit.

    Raises UserError for a context or a generation that does not fit.
    """
    prompt_tokens = prompt_tokens or min(PROMPT_TOKENS, max(1, model.context // 2))
    new_tokens = new_tokens or min(NEW_TOKENS, max(2, model.context + 1 - prompt_tokens))
    if prompt_tokens + new_tokens > model.context + 1:
        raise UserError(
            f"a generation of {prompt_tokens} + {new_tokens} tokens: the context holds {model.context} positions; give "
            "fewer (--prompt-tokens, --new-tokens)"
        )
    chosen = contexts_within(model.context, contexts, CONTEXTS, ROOM)
    bench = _Bench(model)
    generation = bench.generation(prompt_tokens, new_tokens)
    points = [bench.point(context) for context in chosen]
    traced = model.manifest.kernels[model.target].traced
    phases = trace.summarise(trace.record(model, trace.STEPS, 1, chosen[0])) if traced else None
    # Bounds are those of the best bandwidth seen, and so come last.
    generation = replace(generation, decode_bound_ms=bench.bound_ms(generation.decode_mb))
    points = [_bounded(bench, point) for point in points]
    return GpuResult(
        artifact=artifact,
        target=model.target,
        gpu=gpu_name(),
        threads=0,
        random_weights=model.manifest.source.kind == "dummy",
        bandwidth_gb_s=bench.bandwidth / 1e9,
        load_s=load_s,
        tolerance=TOLERANCE,
        check=_verdict(generation, points),
        generation=generation,
        points=tuple(points),
        ranks=model.manifest.tp,
        phases=phases,
    )


def _bounded(bench: _Bench, p: GpuPoint) -> GpuPoint:
    return replace(
        p,
        decode_bound_ms=bench.bound_ms(p.decode_mb),
        prefill_bound_ms=bench.bound_ms(p.prefill_mb),
        steps=tuple(replace(s, bound_ms=bench.bound_ms(s.mb)) for s in p.steps),
    )


def _verdict(generation: Generated, points: Sequence[GpuPoint]) -> str:
    same = [generation.repeats, *(p.repeats for p in points), *(s.repeats for p in points for s in p.steps)]
    found = [0.0, *(p.gap for p in points), *(s.error for p in points for s in p.steps)]
    worst = math.nan if any(map(math.isnan, found)) else max(found)
    return (
        f"runs repeated: {_repeats(all(same))}; steps of all sizes and generations agree to {worst:.1e}, "
        f"{'within' if worst <= TOLERANCE else 'ABOVE'} {TOLERANCE:g}"
    )


class _Bench:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.bandwidth = model.read_bandwidth()  # the best so far

    def bound_ms(self, mb: float) -> float:
        return mb * 1e6 / self.bandwidth * 1e3

    def _generate(self, prompt: Sequence[int], new_tokens: int, reuse: bool = False) -> Result:
        generation = self.model.generate_tokens(
            prompt, reuse=reuse, max_new_tokens=new_tokens, temperature=0.0, repetition_penalty=1.0, stop_tokens=[]
        )
        with generation:
            for _ in generation:
                pass
        assert generation.result
        return generation.result

    def _decode(self, prompt: Sequence[int], new_tokens: int, reuse: bool) -> list[Result]:
        return [self._generate(prompt, new_tokens, reuse) for _ in range(RUNS)]

    def generation(self, prompt_tokens: int, new_tokens: int) -> Generated:
        runs = self._decode(spread(self.model.spec.vocab_size, prompt_tokens), new_tokens, reuse=False)
        self.bandwidth = max(self.bandwidth, self.model.read_bandwidth())
        return Generated(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prefill_ms=statistics.median(r.prefill_s for r in runs) * 1e3,
            decode_ms=_decode_ms(runs),
            decode_mb=self.model.bytes_per_step(1, prompt_tokens + new_tokens // 2) / 1e6,
            repeats=len({r.tokens for r in runs}) == 1,
        )

    def point(self, context: int) -> GpuPoint:
        model, prompt = self.model, spread(self.model.spec.vocab_size, context)
        filled = [self._generate(prompt, 1) for _ in range(1 if context > LONG else RUNS)]
        runs = self._decode(prompt, DECODE_TOKENS, reuse=True)
        same_best, gap = self._decoded_by_steps(context, runs[0].tokens)
        steps = self._steps(context)
        self.bandwidth = max(self.bandwidth, model.read_bandwidth())
        prefill_s = statistics.median(r.prefill_s for r in filled)
        most = max(steps, key=lambda s: s.tokens)
        # The head runs for the last token only.
        head = sum(p.nbytes for p in schedule.phases_of(model.manifest, "cuda") if p.name == "head")
        whole = model.bytes_per_step(most.tokens, context // 2, most.experts)
        return GpuPoint(
            context=context,
            decode_ms=_decode_ms(runs),
            decode_mb=model.bytes_per_step(1, context + DECODE_TOKENS // 2) / 1e6,
            prefill_s=prefill_s,
            prefill_ms=prefill_s / context * 1e3,
            prefill_mb=((whole - head) / most.tokens + head / context) / 1e6,
            repeats=len({r.tokens for r in runs}) == 1,
            same_best=same_best,
            gap=gap,
            steps=tuple(steps),
        )

    def _decoded_by_steps(self, context: int, tokens: Sequence[int]) -> tuple[float, float]:
        """Share of generated tokens that steps of the same tokens find best too, how far the others are below it."""
        import numpy as np

        self.model.truncate(context)
        logits = self.model.step(tokens[:-1], len(tokens) - 1)
        best, chosen = logits.max(axis=1), logits[np.arange(len(logits)), list(tokens[1:])]
        gaps = (best - chosen) / np.abs(logits).max()
        return float(np.mean(gaps == 0)), float(gaps.max())

    def _steps(self, context: int) -> list[Step]:
        import numpy as np

        model, most = self.model, self.model.manifest.limits.tokens_per_step
        alone, found = None, []
        for count in (n for n in STEP_TOKENS if n <= most):
            first, again = self._logits(context, count), self._logits(context, count)
            alone = first if alone is None else alone
            model.truncate(context)
            timed = [
                model.time_step(spread(model.spec.vocab_size, count, context + i * count)) for i in range(-2, STEP_RUNS)
            ][2:]
            counted = [experts for _, experts in timed]
            experts = statistics.mean(counted)
            found.append(
                Step(
                    tokens=count,
                    ms=statistics.median(seconds for seconds, _ in timed) * 1e3,
                    mb=model.bytes_per_step(count, context, experts) / 1e6,
                    experts=experts,
                    repeats=first.tobytes() == again.tobytes(),
                    error=float(np.linalg.norm(first - alone) / np.linalg.norm(alone)),
                )
            )
        return found

    def _logits(self, context: int, count: int) -> np.ndarray:
        """Of 16 tokens after the context, run `count` a step: float32 [16, vocab_size]."""
        import numpy as np

        self.model.truncate(context)
        tokens = spread(self.model.spec.vocab_size, CHECKED, context)
        return np.concatenate([self.model.step(tokens[i : i + count], count) for i in range(0, CHECKED, count)])


def _decode_ms(runs: Sequence[Result]) -> float:
    return statistics.median(r.decode_s / (r.num_new_tokens - 1) for r in runs) * 1e3
