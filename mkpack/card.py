"""The model card of a published artifact: README.md, made from the manifest and from measured speeds.

Everything between the two markers is written anew by every push; what a publisher writes outside of them stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkpack import schedule
from mkpack.errors import UserError, combine
from mkpack.manifest import Manifest

BEGIN = "<!-- mkpack: written by mkpack push; what is between these two lines is replaced by the next push -->"
END = "<!-- mkpack: end -->"

# Names of the Hub for licences; any other is "other" there, with its own name beside it.
_LICENSES = frozenset(
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 bigscience-openrail-m bsd "
    "bsd-2-clause bsd-3-clause bsl-1.0 cc cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 "
    "cc-by-nc-nd-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 gemma gpl gpl-2.0 gpl-3.0 isc lgpl "
    "lgpl-3.0 llama2 llama3 llama3.1 llama3.2 llama3.3 mit mpl-2.0 ms-pl openrail unknown unlicense wtfpl zlib".split()
)
_WHAT = "quantised weights, packed in the order they are streamed, and a megakernel compiled for this one model."
_FIGURES = {
    "perplexity": "perplexity",
    "reference_perplexity": "perplexity of the same model in bf16",
    "kl_divergence": "KL divergence from it, nats a token",
    "top1_agreement": "same most likely token, share of positions",
    "tokens": "measured on tokens",
    "relative_error": "relative error of the weights",
}


@dataclass(frozen=True)
class Speed:
    """One row of `mkpack bench`: ms a token at `context` positions, and what reading its bytes takes at least."""

    context: int
    decode_ms: float
    bound_ms: float


@dataclass(frozen=True)
class Bench:
    """What `mkpack bench --json` measured of one target. bandwidth: GB/s read by the same threads in the same run."""

    target: str
    threads: int
    bandwidth: float
    speeds: tuple[Speed, ...]

    def to_bytes(self) -> bytes:
        """The file that a repo keeps of it: `bench --json` without the paths of the machine it ran on."""
        points = [{"context": s.context, "decode_ms": s.decode_ms, "decode_bound_ms": s.bound_ms} for s in self.speeds]
        document = {"target": self.target, "threads": self.threads, "bandwidth_gb_s": self.bandwidth, "points": points}
        return (json.dumps(document, indent=1) + "\n").encode()


def read_bench(data: bytes, where: str) -> Bench:
    """The result of `mkpack bench --json`. UserError when it is none, or says that the kernel's results differed."""
    try:
        raw = json.loads(data)
        points = tuple(
            Speed(int(p["context"]), _positive(p["decode_ms"]), _positive(p["decode_bound_ms"])) for p in raw["points"]
        )
        bench = Bench(str(raw["target"]), int(raw["threads"]), _positive(raw["bandwidth_gb_s"]), points)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{where}: expected what mkpack bench --json prints, found none of it ({e!r})") from e
    if "DIFFERENT" in str(raw.get("check", "")):
        raise UserError(f"{where}: the kernel gave different bits in two ways ({raw['check']}); do not publish it")
    return bench


def read_bench_file(path: Path) -> Bench:
    try:
        return read_bench(path.read_bytes(), str(path))
    except OSError as e:
        raise UserError(f"--bench {path}: {e.strerror}") from e


def check_benches(manifest: Manifest, benches: Sequence[Bench]) -> None:
    """UserError when one is of no kernel of the artifact, or two are of the same."""
    has = ", ".join(sorted(manifest.kernels))
    problems = [f"{b.target}: the artifact has {has}" for b in benches if b.target not in manifest.kernels]
    targets = [b.target for b in benches]
    problems += [f"{t}: given twice" for t in sorted({t for t in targets if targets.count(t) > 1})]
    if problems:
        raise combine("--bench", problems)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is no measured number")
    return float(value)


def render(manifest: Manifest, repo: str, benches: Mapping[str, Bench], existing: str | None = None) -> str:
    """The whole README.md of `repo`. benches: by target. existing: the README.md there; only what is between its
    markers is replaced, and one without markers is left as it is."""
    body = "\n".join([BEGIN, "", *_body(manifest, repo, benches), "", END])
    if existing is None:
        return f"{_metadata(manifest)}\n# {manifest.name}\n\n{body}\n"
    before, begin, rest = existing.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + body + after if begin and end else existing


def _metadata(manifest: Manifest) -> str:
    import yaml

    known = manifest.license.lower() in _LICENSES
    data: dict[str, Any] = {"license": manifest.license.lower() if known else "other"}
    if not known:
        data["license_name"] = manifest.license
    if manifest.source.repo:
        data |= {"base_model": manifest.source.repo, "base_model_relation": "quantized"}
    formats = sorted({fmt for fmt in manifest.precision.values() if fmt in ("nvfp4", "fp8")})
    data |= {"library_name": "mkpack", "pipeline_tag": "text-generation"}
    data["tags"] = [
        "mkpack",
        "megakernel",
        "mixture-of-experts" if manifest.spec.moe else manifest.spec.family,
        *formats,
    ]
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n"


def _body(m: Manifest, repo: str, benches: Mapping[str, Bench]) -> Iterator[str]:
    yield from (_origin(m), "", "## Run", "")
    yield from ("```", f'mkpack run {repo} --prompt "What is a megakernel?"', "```", "")
    yield "This downloads the kernel for your machine and its weights, once. Native code of others never runs unasked;"
    yield "mkpack says how to trust this kernel's signer, to compile the kernel yourself instead, or to allow it."
    yield from ("", "```python", "import mkpack", "", f'with mkpack.load("hf://{repo}") as model:')
    yield from (
        '    for piece in model.generate("What is a megakernel?"):',
        '        print(piece, end="", flush=True)',
        "```",
    )
    yield from ("", "## What it is", "", "| | |", "|---|---|")
    yield from (f"| {key} | {value} |" for key, value in _facts(m))
    yield from ("", "## Kernels", "", "| target | weights | needs | compiler | sha256 |", "|---|---|---|---|---|")
    for target, kernel in sorted(m.kernels.items()):
        needs = ", ".join(f"{key} {value}" for key, value in sorted(kernel.requires.items())) or "-"
        weights = _bytes(sum(w.nbytes for w in m.weights_in(kernel.layout)))
        digest = m.entries[kernel.path].sha256
        yield f"| `{target}` | {weights} | {needs} | {_cell(kernel.compiler)} | `{digest}` |"
    yield from ("", "## Quality", "", *_quality(m))
    yield from ("", "## Speed", "", *_speed(m, benches))
    yield from ("", "## Provenance", "", *_provenance(m))


def _origin(m: Manifest) -> str:
    if m.source.kind == "dummy":
        return "Random weights in the shape of a model, to measure its speed; it says nothing of sense."
    if m.source.repo:
        where = f"[{m.source.repo}](https://huggingface.co/{m.source.repo}/tree/{m.source.commit})"
        return f"{where} as one artifact of mkpack: {_WHAT}"
    return f"An artifact of mkpack: {_WHAT}"


def _facts(m: Manifest) -> Iterator[tuple[str, str]]:
    spec = m.spec
    yield "licence of the weights", _cell(m.license)
    yield "model", f"{spec.family}, {len(spec.layers)} layers, hidden_size {spec.hidden_size}"
    if spec.moe:
        yield (
            "experts",
            f"{spec.moe.num_experts} of intermediate_size {spec.moe.intermediate_size}, top_k {spec.moe.top_k}",
        )
    yield "precision", ", ".join(f"{role} {fmt}" for role, fmt in m.precision.items()) or "-"
    yield "context", f"{m.limits.context} positions at most"
    yield "ranks", str(m.tp)
    yield "format", f"version {m.format_version}, mkpack {m.minimum_runtime} or newer"


def _quality(m: Manifest) -> Iterator[str]:
    measured = {key: value for key, value in (m.quality or {}).items() if key != "calibration"}
    figures = dict(_numbers(measured))
    if not figures:
        yield "Not measured when it was built."
        return
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {value:.6g} |" for name, value in figures.items())


def _numbers(quality: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in quality.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield _FIGURES.get(key, _cell(key)), value


def _speed(m: Manifest, benches: Mapping[str, Bench]) -> Iterator[str]:
    if m.sections:
        least = schedule.step_bytes(m.spec, schedule.phases_of(m, "cpu" if "cpu" in m.sections else "cuda"))
        yield f"A token reads at least {_bytes(round(least))} (and the cache of the tokens before it), which over the"
        yield "bandwidth of your memory is the bound that no program can beat."
        yield ""
    if not benches:
        yield "Not measured by the publisher; `mkpack bench` measures it on your machine."
        return
    yield from (
        "| target | context | ms/token | tokens/s | bound, ms/token | of the bound |",
        "|---|---|---|---|---|---|",
    )
    for target, bench in sorted(benches.items()):
        for s in bench.speeds:
            yield (
                f"| `{target}` | {s.context} | {s.decode_ms:.2f} | {1e3 / s.decode_ms:.1f} | {s.bound_ms:.2f} "
                f"| {s.bound_ms / s.decode_ms:.0%} |"
            )
    yield ""
    for target, bench in sorted(benches.items()):
        threads = f"{bench.threads} threads; " if bench.threads else ""  # of a GPU nobody counts them
        yield f"`{target}`: {threads}{bench.bandwidth:.1f} GB/s, measured in the same run."


def _provenance(m: Manifest) -> Iterator[str]:
    p = m.producer
    commit = f" (commit `{p.commit}`{', changed' if p.dirty else ''})" if p.commit else ""
    tools = [f"Python {p.python}", p.torch and f"torch {p.torch}", p.modelopt and f"modelopt {p.modelopt}"]
    yield f"Built by mkpack {p.mkpack}{commit}, {', '.join(t for t in tools if t)}. Build key `{m.build_key}`."
    yield "`manifest.json` holds the SHA-256 of every file; mkpack checks all of them on every load."


def _cell(text: str) -> str:
    """One line that cannot end a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _bytes(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
