"""Everything about a build that is known before a weight is read: `mkpack build --dry-run`, and the builder's input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mkpack import platform, schedule
from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError, combine
from mkpack.layout import Layout
from mkpack.models import model_spec
from mkpack.recipe import Recipe, load_recipe
from mkpack.spec import Format, ModelSpec, Precision, TensorRole, tensors

# Resident size of torch, modelopt and Python itself while building, before any tensor.
IMPORTS_BYTES = 700 << 20
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Plan:
    """A recipe, its checkpoint, and what will be made of it. `checkpoint` is None when only config.json is here."""

    recipe: Recipe
    recipe_path: Path
    folder: Path
    commit: str | None
    checkpoint: Checkpoint | None
    spec: ModelSpec
    roles: list[TensorRole]
    layout: Layout
    targets: tuple[str, ...]
    sha256: dict[str, str]  # digests that the hub keeps of source files

    @property
    def source(self) -> str:
        return f"{self.recipe.source.repo}@{self.commit}" if self.recipe.source.repo else str(self.folder)

    @property
    def artifact_bytes(self) -> int:
        """Weights of every rank; kernels, tokenizer and manifest add a few MB."""
        return self.layout.nbytes * self.layout.tp

    @property
    def disk_bytes(self) -> int:
        """The blobs while they are packed, and the artifact they are copied into."""
        reference = sum(2 * _elements(r) for r in self.roles) if self.recipe.quality else 0
        return 2 * self.artifact_bytes + reference + (64 << 20)

    @property
    def memory_bytes(self) -> int:
        """Peak resident size: the largest tensor as read, its stored form, its tiles and row-wise scratch."""
        largest = max(_elements(r) for r in self.roles)
        return IMPORTS_BYTES + 3 * 4 * largest

    def bytes_by_format(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for section in self.layout.sections:
            matrix = section.name.removesuffix(".scale")
            fmt = self.layout.section(matrix).format if self.layout.section(matrix).cols > 1 else "norms, biases"
            sizes[fmt] = sizes.get(fmt, 0) + section.nbytes * self.layout.tp
        return sizes

    def bytes_per_token(self, tokens: int = 1) -> float:
        return schedule.bytes_per_step(self.spec, self.layout.sections, self.layout.tp, tokens)

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.recipe.name,
                "source": self.source,
                "family": self.spec.family,
                "tensors": len(self.roles),
                "parameters": sum(map(_elements, self.roles)),
                "precision": self.layout.precision,
                "tp": self.layout.tp,
                "targets": list(self.targets),
                "bytes_by_format": self.bytes_by_format(),
                "artifact_bytes": self.artifact_bytes,
                "disk_bytes": self.disk_bytes,
                "memory_bytes": self.memory_bytes,
                "bytes_per_token": round(self.bytes_per_token()),
                "bytes_per_step_of_16": round(self.bytes_per_token(16)),
            },
            indent=2,
        )

    def render(self) -> str:
        spec, per_token = self.spec, self.bytes_per_token()
        experts = f", {spec.moe.num_experts} experts top-{spec.moe.top_k}" if spec.moe else ""
        rows = {
            "name": self.recipe.name,
            "source": self.source,
            "model": f"{spec.family}, {len(spec.layers)} layers, hidden {spec.hidden_size}{experts}",
            "tensors": f"{len(self.roles)}, {sum(map(_elements, self.roles)) / 1e6:,.1f} M parameters",
            "precision": ", ".join(f"{k} {v}" for k, v in self.layout.precision.items()),
            "ranks": f"{self.layout.tp}, {self.layout.nbytes / 1e6:,.1f} MB each",
            "targets": ", ".join(self.targets),
            "weights": ", ".join(f"{k} {v / 1e6:,.1f} MB" for k, v in self.bytes_by_format().items()),
            "artifact": f"{self.artifact_bytes / 1e6:,.1f} MB and a few MB of kernels and tokenizer",
            "disk needed": f"{self.disk_bytes / 1e6:,.1f} MB while building",
            "peak memory": f"about {self.memory_bytes / 1e6:,.0f} MB",
            "bound": f"{per_token / 1e6:,.1f} MB read per token: at most {1e11 / per_token:,.1f} tokens/s "
            f"for every 100 GB/s of read bandwidth",
        }
        if spec.tie_word_embeddings and not self.layout.tied:
            rows["head"] = "tied to the embedding, stored a second time because their precisions differ"
        width = max(map(len, rows)) + 2
        return "\n".join(f"{k:<{width}}{v}" for k, v in rows.items())


def _elements(role: TensorRole) -> int:
    n = 1
    for size in role.shape:
        n *= size
    return n


def plan(recipe_path: Path, weights: bool = False, progress: bool = True) -> Plan:
    """Reads the recipe and the checkpoint's metadata. weights: download a hub source whole (a build needs that).

    Raises UserError for everything in recipe, config or checkpoint that would stop the build.
    """
    recipe = load_recipe(recipe_path)
    folder, commit, sha256, checkpoint = _source(recipe, weights, progress)
    config = checkpoint.config if checkpoint else json.loads((folder / "config.json").read_bytes())
    spec, names = model_spec(config)
    roles = list(tensors(spec, names))
    if checkpoint:
        checkpoint.check(roles)
    problems = []
    if recipe.limits.context > spec.max_position_embeddings:
        problems.append(
            f"limits.context: {recipe.limits.context} positions, but the model has "
            f"max_position_embeddings {spec.max_position_embeddings}; lower limits.context"
        )
    if unsupported := [t for t in recipe.targets if t.startswith("sm_")]:
        problems.append(
            f"targets: {', '.join(unsupported)}: this version compiles CPU targets only; "
            f"choose of {', '.join(platform.CPU_TARGETS)}, native"
        )
    if problems:
        raise combine(f"{recipe_path}", problems)
    precision: dict[str, Format] = {p: recipe.precision_of(p) for p in get_args(Precision)}
    try:
        layout = Layout(spec, precision, recipe.parallel.tp, _router_format(checkpoint, roles, config))
    except UserError as e:
        raise UserError(f"{recipe_path}: {e}") from e
    targets = tuple(dict.fromkeys(platform.resolve_target(t) for t in recipe.targets))
    return Plan(recipe, recipe_path, folder, commit, checkpoint, spec, roles, layout, targets, sha256)


def _source(
    recipe: Recipe, weights: bool, progress: bool
) -> tuple[Path, str | None, dict[str, str], Checkpoint | None]:
    if recipe.source.folder:
        return recipe.source.folder, None, {}, Checkpoint.open(recipe.source.folder)
    from mkpack.hub import fetch_source

    assert recipe.source.repo
    found = fetch_source(recipe.source.repo, recipe.source.revision, progress=progress, weights=weights)
    return found.folder, found.commit, found.sha256, Checkpoint.open(found.folder) if weights else None


def _router_format(checkpoint: Checkpoint | None, roles: list[TensorRole], config: dict) -> Format:
    """Routers keep the checkpoint's own dtype; float16 is widened. One format serves all layers."""
    if checkpoint is None:
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        return "bf16" if dtype == "bfloat16" else "f32"
    dtypes = {checkpoint.tensors[r.source].dtype for r in roles if r.name.endswith(".router")}
    return "bf16" if dtypes == {"BF16"} else "f32"
