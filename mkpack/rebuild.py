"""Kernels made again, from an artifact's manifest and the sources installed here: to run instead of the published
ones, and to be held against them. Nothing of the artifact but the manifest is read; no published kernel is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mkpack import __version__, codegen, platform, provenance, schedule
from mkpack.compile import Unit, compile_kernels
from mkpack.errors import InternalError, UserError, os_errors
from mkpack.layout import Layout, layout_of
from mkpack.manifest import Manifest, Producer, shown
from mkpack.trust import only_mine

MAX_INT = 2**31 - 1  # sizes are `int` in csrc/


@dataclass(frozen=True)
class Rebuilt:
    """A kernel made here. published: the SHA-256 in the manifest; compiler, published_by: what made the two."""

    target: str
    data: bytes
    sha256: str
    published: str
    compiler: str
    published_by: str

    @property
    def same(self) -> bool:
        return self.sha256 == self.published

    def render(self) -> str:
        """A line for people."""
        if self.same:
            return f"kernel {self.target}: rebuilt here, the same bytes as the published one (sha256 {self.sha256})"
        return (
            f"kernel {self.target}: rebuilt here, other bytes than the published one: sha256 {self.sha256}, published "
            f"{self.published}; compiled here by {self.compiler}, published: {self.published_by}"
        )


def rebuild(where: str, manifest: Manifest, targets: Sequence[str], *, cached: bool = False) -> list[Rebuilt]:
    """Compiles the kernels of `targets`. cached: one that was made here before of the same sources may be taken.

    where: the artifact, for errors. UserError when the manifest is not one that this version of mkpack would write, or
    a compiler is missing; nothing is compiled from sizes that do not fit each other.
    """
    units = [_unit(where, manifest, target) for target in targets]
    keys = {unit.target: _key(unit) for unit in units}
    made: dict[str, bytes] = {}
    if cached:
        made = {target: data for target, key in keys.items() if (data := _kept(f"{key}.so")) is not None}
    if missing := [u for u in units if u.target not in made]:
        with os_errors("compile the kernel"), tempfile.TemporaryDirectory(prefix="mkpack-") as folder:
            for target, kernel in compile_kernels(missing, Path(folder)).items():
                made[target] = kernel.path.read_bytes()
                if cached:
                    _keep(f"{keys[target]}.so", made[target])
    return [_rebuilt(manifest, target, made[target]) for target in targets]


def _rebuilt(manifest: Manifest, target: str, data: bytes) -> Rebuilt:
    kernel, compiler = manifest.kernels[target], platform.compiler()
    published_by = f"{shown(kernel.compiler)}, {_producer(manifest.producer)}"
    here = f"{compiler.version if compiler else 'no compiler'}, {_producer(None)}"
    published = manifest.entries[kernel.path].sha256
    return Rebuilt(target, data, hashlib.sha256(data).hexdigest(), published, here, published_by)


def _producer(producer: Producer | None) -> str:
    version, sources = (producer.mkpack, producer.sources) if producer else (__version__, provenance.sources_digest())
    return f"mkpack {shown(version)}" + (f" (sources {sources[:12]})" if sources else "")


def _unit(where: str, manifest: Manifest, target: str) -> Unit:
    """What to compile; the manifest is data of somebody else until it has passed this."""
    if target not in platform.CPU_TARGETS:
        raise UserError(f"{where}: kernels of {shown(target)} cannot be rebuilt by this version, only those of CPUs")
    limits, spec = manifest.limits, manifest.spec
    sizes = {"limits.context": limits.context, "tp": manifest.tp, "layers": len(spec.layers)}
    sizes |= {f"spec.{k}": v for k, v in spec.model_dump().items() if type(v) is int}
    sizes |= {f"spec.moe.{k}": v for k, v in (spec.moe.model_dump() if spec.moe else {}).items() if type(v) is int}
    wrong = [f"{k} {shown(v)}" for k, v in sizes.items() if not 0 < v <= MAX_INT]
    rotary = 2 * len(spec.rope.inv_freq)
    if rotary > spec.head_dim:
        wrong.append(f"{rotary} rotary dimensions of spec.head_dim {spec.head_dim}")
    if spec.moe and spec.moe.top_k > spec.moe.num_experts:
        wrong.append(f"spec.moe.top_k {spec.moe.top_k} of {spec.moe.num_experts} experts")
    if wrong:
        raise UserError(f"{where}: the kernel cannot be rebuilt: sizes no model has: {', '.join(wrong)}")
    layout = layout_of(manifest)
    other = f"{where}: the kernel cannot be rebuilt: mkpack {__version__} would lay this model out otherwise"
    if layout is None or not _same(layout, manifest):
        raise UserError(f"{other}; install the version that built it ({_producer(manifest.producer)})")
    text = codegen.description(spec, layout.sections, layout.nbytes, layout.tp, limits, target)
    if json.loads(text) != json.loads(manifest.kernels[target].description):
        raise UserError(f"{other}; install the version that built it ({_producer(manifest.producer)})")
    try:
        schedule.check(
            schedule.cpu_schedule(spec, layout.sections, layout.tp, limits.context, limits.tokens_per_step, target)
        )
        return Unit(target, target, codegen.model_header(layout, limits, target))
    except (InternalError, AssertionError, ArithmeticError, LookupError, ValueError) as e:
        raise UserError(f"{where}: the kernel cannot be rebuilt: {shown(str(e))}") from e


def _same(layout: Layout, manifest: Manifest) -> bool:
    sizes = {w.nbytes for w in manifest.weights_in("cpu")}
    return layout.sections == manifest.sections.get("cpu") and {layout.nbytes} == sizes


def _key(unit: Unit) -> str:
    compiler = platform.compiler()
    if compiler is None:
        raise UserError(platform.no_compiler())
    facts = [unit.header, unit.target, provenance.sources_digest(), compiler.version, list(compiler.command)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return home / "mkpack" / "kernels"


def _kept(name: str) -> bytes | None:
    try:
        with open(_cache() / name, "rb") as file:
            return file.read() if only_mine(os.fstat(file.fileno())) else None
    except OSError:
        return None


def _keep(name: str, data: bytes) -> None:
    """Puts a kernel into the cache, whole or not at all; a cache that cannot be written only costs time."""
    folder = _cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(temporary, folder / name)
    except OSError:
        return
