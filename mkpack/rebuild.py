"""Kernels made again, from an artifact's manifest and the sources installed here: to run instead of the published
ones, and to be held against them. Nothing of the artifact but the manifest is read; no published kernel is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkpack import __version__, codegen, platform, provenance, schedule
from mkpack.codegen_cuda import cuda_header
from mkpack.compile import CUDA_TARGETS, Unit, compile_kernels, compiler_of
from mkpack.errors import InternalError, UserError, os_errors
from mkpack.layout import Layout, layout_of
from mkpack.layout_cuda import CudaLayout, cuda_layout_of
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
    kernel = manifest.kernels[target]
    here = f"{compiler_of(target).version}, {_producer(None)}"
    published_by = f"{shown(kernel.compiler)}, {_producer(manifest.producer)}"
    published = manifest.entries[kernel.path].sha256
    return Rebuilt(target, data, hashlib.sha256(data).hexdigest(), published, here, published_by)


def _producer(producer: Producer | None) -> str:
    version = shown(producer.mkpack) if producer else __version__
    sources = producer.sources if producer else provenance.sources_digest()
    return f"mkpack {version}" + (f" (sources {sources[:12]})" if sources else "")


def _unit(where: str, manifest: Manifest, target: str) -> Unit:
    """What to compile; the manifest is data of somebody else until it has passed this."""
    if target not in platform.CPU_TARGETS and target not in CUDA_TARGETS:
        raise UserError(
            f"{where}: this version of mkpack has no target {shown(target)}, so it cannot rebuild its kernel"
        )
    refused = f"{where}: the kernel {target} cannot be rebuilt: "
    if wrong := list(_impossible(manifest)):
        raise UserError(f"{refused}sizes no model has: {', '.join(wrong)}")
    try:
        layout = cuda_layout_of(manifest) if target in CUDA_TARGETS else layout_of(manifest)
        if layout is None or not _is_the_manifests(layout, manifest, target):
            raise UserError(
                f"{refused}mkpack {__version__} lays this model out otherwise; install the version that built it "
                f"({_producer(manifest.producer)})"
            )
        if isinstance(layout, CudaLayout):
            for proof in schedule.cuda_proofs(layout, manifest.limits.context, target):
                schedule.check(proof)
            return Unit(target, target, cuda_header(layout, manifest.limits, target, manifest.kernels[target].traced))
        limits = manifest.limits
        schedule.check(schedule.cpu_schedule(layout, limits.context, limits.tokens_per_step, target))
        return Unit(target, target, codegen.model_header(layout, limits, target))
    except (InternalError, AssertionError, ArithmeticError, LookupError, ValueError) as e:
        raise UserError(f"{refused}{shown(str(e))}") from e


def _impossible(manifest: Manifest) -> Iterator[str]:
    """Numbers that no model has: no count is 0, and none is larger than an `int` of csrc/."""
    spec = manifest.spec
    facts = {"limits": manifest.limits.model_dump(), "tp": manifest.tp, "spec": spec.model_dump()}
    for where, value in _numbers("", facts):
        if not 0 < value <= MAX_INT:
            yield f"{where} {shown(value)}"
    if not spec.layers:
        yield "no layers"
    if (rotary := 2 * len(spec.rope.inv_freq)) > spec.head_dim:
        yield f"{rotary} rotary dimensions of spec.head_dim {spec.head_dim}"
    if spec.moe and spec.moe.top_k > spec.moe.num_experts:
        yield f"spec.moe.top_k {spec.moe.top_k} of {spec.moe.num_experts} experts"


def _numbers(where: str, value: object) -> Iterator[tuple[str, int]]:
    """(place, number) of every whole number in a tree of dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{where}.{key}" if where else key, inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _numbers(f"{where}[{i}]", inner)
    elif type(value) is int:
        yield where, value


def _is_the_manifests(layout: Layout | CudaLayout, manifest: Manifest, target: str) -> bool:
    """Whether sections, sizes and description of the manifest are those that this version makes of its spec."""
    name, traced = manifest.kernels[target].layout, manifest.kernels[target].traced
    text = codegen.description(layout, manifest.limits, target, traced and name == "cuda")
    return (
        name == ("cuda" if isinstance(layout, CudaLayout) else "cpu")
        and layout.tp == manifest.tp
        and layout.sections == manifest.sections.get(name)
        and {w.nbytes for w in manifest.weights_in(name)} == {layout.nbytes}
        and json.loads(text) == json.loads(manifest.kernels[target].description)
    )


def _key(unit: Unit) -> str:
    compiler = compiler_of(unit.target)
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
