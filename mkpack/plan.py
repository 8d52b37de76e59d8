"""Everything about a build that is known before a weight is read: `mkpack build --dry-run`, and the builder's input."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mkpack import platform, prequantised, schedule
from mkpack.checkpoint import Checkpoint, is_aux
from mkpack.compile import UNTRIED
from mkpack.errors import UserError
from mkpack.layout import Layout
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import LayoutName
from mkpack.models import model_spec
from mkpack.recipe import Recipe, load_recipe, place
from mkpack.spec import Format, ModelSpec, Precision, PrecisionKey, TensorRole, tensors
from mkpack.targets import checked_targets, for_one_rank, layout_name, runs_here
from mkpack.text_tokens import LEGAL, calibration_tokens, quality_tokens, tokenizer, tokenizer_files

if TYPE_CHECKING:
    from mkpack.dummy import Dummy
    from mkpack.manifest import Manifest

# Resident size of Python before any tensor, of Python and torch, and with modelopt, which fp8 needs. Besides, what a
# thread that quantises and packs keeps: chunks, slabs, and the allocator's own leftovers.
PYTHON_BYTES, TORCH_BYTES, MODELOPT_BYTES = 90 << 20, 265 << 20, 510 << 20
THREAD_BYTES = 40 << 20
_HARDWARE: dict[LayoutName, str] = {"cpu": "CPUs", "cuda": "GPUs"}


@dataclass(frozen=True)
class QualityPlan:
    """What the quality is measured on: token ids, the target that runs here, and the layout of the reference, which is
    the same model with every matrix in bf16 on one rank."""

    tokens: tuple[int, ...]
    target: str
    reference: Layout


@dataclass(frozen=True)
class Plan:
    """A recipe, its checkpoint, and what will be made of it. `checkpoint` is None when only config.json is here.
    `files` are config.json and those of tokenizer and licence, by name. `layouts` are those that the targets' kernels
    read; `layout` is that of CPUs, also where no target reads it."""

    recipe: Recipe
    recipe_path: Path
    files: dict[str, Path]
    commit: str | None
    checkpoint: Checkpoint | Dummy | None
    spec: ModelSpec
    roles: list[TensorRole]
    layout: Layout
    layouts: dict[LayoutName, Layout | CudaLayout]
    targets: tuple[str, ...]
    sha256: dict[str, str]  # digests that the hub keeps of source files
    quality: QualityPlan | None
    calibration: tuple[tuple[int, ...], ...] | None  # token ids of the sequences that activations are recorded on
    rank: int | None = None  # the one whose weights alone are wanted, for GPUs; None: all

    @property
    def source(self) -> str:
        source = self.recipe.source
        if source.dummy:
            return f"random weights of seed {source.seed} in the shape of {source.dummy}"
        return f"{source.repo}@{self.commit}" if source.repo else str(source.folder)

    @property
    def ranks(self) -> Sequence[int]:
        """Those whose weights the artifact gets."""
        return range(self.layout.tp) if self.rank is None else (self.rank,)

    @property
    def artifact_bytes(self) -> int:
        """Weights of every layout and rank; kernels, tokenizer and manifest add a few MB."""
        return sum(layout.nbytes * len(self.ranks) for layout in self.layouts.values())

    @property
    def disk_bytes(self) -> int:
        """The blobs, which become the artifact, that of the reference, and what compiling takes."""
        reference = self.quality.reference.nbytes if self.quality else 0
        return self.artifact_bytes + reference + (128 << 20)

    @property
    def memory_bytes(self) -> int:
        """Peak resident size, of calibrating, of quantising (or drawing random weights) or of measuring the quality.

        Quantising: tensors that are quantised together as they are read, their stored form, and what threads take.
        Measuring: the blobs and that of the reference, which are mapped and read whole, and what running both takes.
        """
        return max(self._calibrating_bytes, self._quantising_bytes, self._measuring_bytes)

    @property
    def gpu_bytes(self) -> int | None:
        """What a GPU must hold at least, weights and the KV cache of a rank; None without a GPU target."""
        if "cuda" not in self.layouts:
            return None
        rows = self.layouts["cuda"].heads.kv_heads * self.spec.head_dim
        elements = 2 * self.recipe.limits.context * rows * len(self.spec.layers)
        return self.layouts["cuda"].nbytes + schedule.KV_BYTES["cuda"] * elements

    @property
    def mapped_bytes(self) -> int:
        """Blobs that are mapped while the quality is measured; the system may drop and read them again."""
        return self.layout.nbytes * self.layout.tp + self.quality.reference.nbytes if self.quality else 0

    @property
    def _measuring_bytes(self) -> int:
        if self.quality is None:
            return 0
        scaled = any(fmt == "fp8" for role in self.roles for fmt in self.formats(role))
        context, tokens = len(self.quality.tokens), self.recipe.limits.tokens_per_step
        buffers = 0  # keys and values are most of them
        for layout in (self.layout, self.quality.reference):
            step = schedule.cpu_schedule(layout, context, tokens)
            buffers += sum(b.nbytes for b in step.buffers if b.scope == "shared")
        # Both models' logits as float64, and three arrays more for the divergence between them.
        logits = 5 * 8 * tokens * self.spec.vocab_size
        return (MODELOPT_BYTES if scaled else TORCH_BYTES) + self.mapped_bytes + buffers + logits

    @property
    def _calibrating_bytes(self) -> int:
        """Matrices as they are read and in float32: one, or of experts one a CPU; a dozen activations of a token."""
        if self.calibration is None:
            return 0
        info = self.checkpoint.tensors if self.checkpoint else {}
        largest = 0.0
        for role in self.roles:
            read = prequantised.read_bytes(role, (), info)
            whole = 0 if role.name == "embed" else 4 * _elements(role)
            largest = max(largest, (read + whole) * (platform.cores() if role.precision == "experts" else 1))
        spec = self.spec
        width = max(spec.hidden_size, spec.q_size, spec.dense_intermediate_size or 0)
        tokens, longest = sum(map(len, self.calibration)), max(map(len, self.calibration))
        scores = platform.cores() * 3 * 4 * longest**2
        return TORCH_BYTES + round(largest) + 12 * 4 * tokens * width + scores + platform.cores() * THREAD_BYTES

    @property
    def _quantising_bytes(self) -> int:
        drawn = self.recipe.source.dummy is not None
        imports = peak = PYTHON_BYTES if drawn else TORCH_BYTES
        for group in groups(self.roles):
            if not drawn and any(fmt == "fp8" for role in group for fmt in self.formats(role)):
                imports = MODELOPT_BYTES
            peak = max(peak, imports + self.group_bytes(group))
        return peak + platform.cores() * THREAD_BYTES

    def drawn_rows(self, role: TensorRole) -> slice:
        """Rows of a tensor of random weights that are drawn: of one rank's those that it has."""
        layout = self.layouts.get("cuda")
        if self.rank is None or not isinstance(layout, CudaLayout):
            return slice(None)
        return layout.held(role.name, self.rank)

    def _share(self, role: TensorRole) -> float:
        """Part of a tensor that is read: of random weights that of drawn_rows(), of all others the whole."""
        if not self.recipe.source.dummy:
            return 1.0
        return len(range(role.shape[0])[self.drawn_rows(role)]) / role.shape[0]

    def source_bytes(self, group: list[TensorRole]) -> int:
        """What tensors take in the source, in the formats they have there."""
        info = self.checkpoint.tensors if self.checkpoint else {}
        return round(sum(prequantised.read_bytes(role, (), info) * self._share(role) for role in group))

    def group_bytes(self, group: list[TensorRole]) -> int:
        """Memory that tensors take while they are read, quantised and packed together: as they are read, and of one its
        stored forms. Packing takes a slab at a time, but of an expert for GPUs the whole of gate and up."""
        info = self.checkpoint.tensors if self.checkpoint else {}
        read = sum(prequantised.read_bytes(r, self.formats(r), info) * self._share(r) for r in group)
        wide = {"f32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
        copies = 8 if "cuda" in self.layouts and group[0].precision == "experts" else 1
        # What is stored as it is read needs no copy.
        plain = {"BF16": "bf16", "F32": "f32"}
        dtypes = {plain.get(info[r.source].dtype) for r in group if r.source in info}
        sizes = [_elements(r) * self._share(r) * wide[fmt] for r in group for fmt in self.formats(r) if {fmt} != dtypes]
        reference = max(map(_elements, group)) * 2 if self.quality and dtypes != {"bf16"} else 0
        return round(read + max(sizes, default=0) * copies + reference)

    def formats(self, role: TensorRole) -> list[Format]:
        """Formats a tensor is stored in: one, or two for an embedding whose tied head has another precision."""
        if role.name == "embed" and self.spec.tie_word_embeddings and not self.layout.tied:
            return [self.layout.precision["embeddings"], self.layout.precision["lm_head"]]
        return [self.layout.format_of(role)]

    def notes(self) -> list[str]:
        """What to tell of the targets: which have never run; and of the source: that it has no tokenizer, what becomes
        of matrices it holds quantised, and where its metadata and its tensors disagree."""
        lines = [] if (note := self.tokenizer_note()) is None else [note]
        if self.rank is not None:
            tp = self.layout.tp
            lines.append(f"rank {self.rank} of {tp} alone: made for mkpack bench --rank-of {tp}, it cannot run")
            if left_out := [t for t in self.recipe.targets if t not in self.targets]:
                lines.append(f"left out, for one rank is for GPUs: the targets {', '.join(left_out)}")
            if self.recipe.quality:
                lines.append("left out, for one rank is for GPUs: quality")
        lines += [f"{t}: compiles, and has not run on any GPU yet" for t in self.targets if t in UNTRIED]
        if isinstance(self.checkpoint, Checkpoint):
            wanted = ((role, fmt) for role in self.roles for fmt in self.formats(role))
            lines += prequantised.conversions(wanted, self.checkpoint.tensors)
            lines += self.checkpoint.notes(self.roles)
        return lines

    def tokenizer_note(self) -> str | None:
        """What to tell of a source without a tokenizer."""
        return None if "tokenizer.json" in self.files else "no tokenizer.json: the artifact takes token ids only"

    def tokenizer_files(self) -> dict[str, Path]:
        """Files the runtime reads to turn text into tokens and back; config.json for its stop tokens."""
        return tokenizer_files(self.files)

    def legal_files(self) -> dict[str, Path]:
        """Licence and notice files of the source, by name."""
        return {n: p for n, p in self.files.items() if n.upper().startswith(LEGAL)}

    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of all layouts and of the ranks that are built, scales with their matrices."""
        sizes: dict[str, int] = {}
        for layout in self.layouts.values():
            formats = {s.name: s.format if s.cols > 1 else "norms, biases" for s in layout.sections}
            for section in layout.sections:
                # Scales are layers.0.o.scale for CPUs, and for GPUs dense_scales of dense, expert_scales of experts.
                matrix = section.name.removesuffix(".scale").removesuffix("_scales")
                fmt = formats.get(matrix) or formats[matrix + "s"]
                sizes[fmt] = sizes.get(fmt, 0) + section.nbytes * len(self.ranks)
        return sizes

    def bytes_per_token(self, tokens: int = 1) -> float:
        """Bytes that a step of so many tokens reads of the ranks that are built, of CPUs' blobs where there are any."""
        for_gpus = self.layouts.get("cuda")
        if "cpu" in self.layouts or not isinstance(for_gpus, CudaLayout):
            return schedule.bytes_per_step(self.spec, self.layout.sections, self.layout.tp, tokens)
        return schedule.step_bytes(self.spec, schedule.cuda_phases(for_gpus), tokens) * len(self.ranks)

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.recipe.name,
                "source": self.source,
                "family": self.spec.family,
                "tokenizer": self.tokenizer_note() is None,
                "notes": self.notes(),
                "tensors": len(self.roles),
                "parameters": sum(map(_elements, self.roles)),
                "precision": self.layout.precision,
                "tp": self.layout.tp,
                "rank": self.rank,
                "targets": list(self.targets),
                "bytes_by_format": self.bytes_by_format(),
                "artifact_bytes": self.artifact_bytes,
                "disk_bytes": self.disk_bytes,
                "memory_bytes": self.memory_bytes,
                "gpu_bytes": self.gpu_bytes,
                "bytes_per_token": round(self.bytes_per_token()),
                "bytes_per_step_of_16": round(self.bytes_per_token(16)),
            },
            indent=2,
        )

    def render(self) -> str:
        spec, per_token = self.spec, self.bytes_per_token()
        experts = f", {spec.moe.num_experts} experts top-{spec.moe.top_k}" if spec.moe else ""
        mapped = ""
        if self._measuring_bytes > self._quantising_bytes:
            mapped = f", {self.mapped_bytes / 1e6:,.0f} MB of it the weights mapped to measure the quality"
        rows = {
            "name": self.recipe.name,
            "source": self.source,
            "model": f"{spec.family}, {len(spec.layers)} layers, hidden {spec.hidden_size}{experts}",
            "tensors": f"{len(self.roles)}, {sum(map(_elements, self.roles)) / 1e6:,.1f} M parameters",
            "precision": ", ".join(f"{k} {v}" for k, v in self.layout.precision.items()),
            "ranks": (f"{self.layout.tp}, each " if self.rank is None else f"{self.rank} of {self.layout.tp}, ")
            + " and ".join(f"{x.nbytes / 1e6:,.1f} MB for {_HARDWARE[name]}" for name, x in self.layouts.items()),
            "targets": ", ".join(self.targets),
            "weights": ", ".join(f"{k} {v / 1e6:,.1f} MB" for k, v in self.bytes_by_format().items()),
            "artifact": f"{self.artifact_bytes / 1e6:,.1f} MB and a few MB of kernels and tokenizer",
            "disk needed": f"{self.disk_bytes / 1e6:,.1f} MB while building",
            "peak memory": f"about {self.memory_bytes / 1e6:,.0f} MB{mapped}, and what the system caches of files",
            "bound": f"{per_token / 1e6:,.1f} MB read per token: at most {1e11 / per_token:,.1f} tokens/s "
            f"for every 100 GB/s of read bandwidth",
        }
        if self.gpu_bytes is not None:
            rows["GPU memory"] = f"{self.gpu_bytes / 1e6:,.1f} MB for weights and KV cache, and what CUDA takes itself"
        if spec.tie_word_embeddings and not self.layout.tied:
            rows["head"] = "tied to the embedding, stored a second time because their precisions differ"
        width = max(map(len, rows)) + 2
        lines = [*rows.items(), *(("note", note) for note in self.notes())]
        return "\n".join(f"{k:<{width}}{v}" for k, v in lines)


def _elements(role: TensorRole) -> int:
    n = 1
    for size in role.shape:
        n *= size
    return n


def groups(roles: list[TensorRole]) -> Iterator[list[TensorRole]]:
    """Neighbours that share an NVFP4 tensor scale together, all others alone."""
    for _, group in itertools.groupby(roles, key=lambda role: role.group or role.name):
        yield list(group)


def plan(
    recipe_path: Path,
    weights: bool = False,
    progress: bool = True,
    like: Manifest | None = None,
    rank: int | None = None,
) -> Plan:
    """Reads the recipe and the checkpoint's metadata. weights: download a hub source whole (a build needs that), once
    everything that can be checked without is. like: an artifact whose commit, targets and ranks are to be had again.
    rank: the one whose weights alone are wanted, for the GPU targets alone.

    Raises UserError for everything in recipe, config or checkpoint that would stop the build, InternalError for a
    schedule that does not hold.
    """
    written = recipe = load_recipe(recipe_path)
    if like:
        rank = like.one_rank
    if rank is not None:
        recipe = for_one_rank(recipe, recipe_path, rank)
    found = None
    checkpoint: Checkpoint | Dummy | None = None
    if recipe.source.folder:
        if not recipe.source.folder.is_dir():
            where = place(recipe_path, "source.folder")
            raise UserError(f"recipe refused: {where}: no such folder: {recipe.source.folder}; name a checkpoint's")
        checkpoint = Checkpoint.open(recipe.source.folder)
        files, config = source_files(checkpoint.folder), checkpoint.config
    elif recipe.source.dummy:
        from mkpack.dummy import Dummy

        checkpoint = Dummy.open(recipe.source.dummy, recipe.source.seed)
        files, config = {"config.json": checkpoint.path}, checkpoint.config
    else:
        from mkpack.hub import fetch_source

        assert recipe.source.repo
        revision = (like and like.source.commit) or recipe.source.revision
        found = fetch_source(recipe.source.repo, revision, progress=progress, weights=False)
        files, config = source_files(found.folder), _config(found.folder)
    spec, names = model_spec(config)
    roles = list(tensors(spec, names))
    if checkpoint:
        checkpoint.check(roles)
    precision: dict[PrecisionKey, Format] = recipe.precision
    named: dict[str, Format] = {str(p): fmt for p, fmt in precision.items()}
    router = _router_format(checkpoint, roles, config)
    targets = checked_targets(recipe, recipe_path, spec, precision, router, weights)
    if like and set(like.kernels) != set(targets):  # "native" there was another machine
        again = recipe.model_copy(update={"targets": tuple(like.kernels)})
        targets = checked_targets(again, recipe_path, spec, precision, router, weights)
    text = tokenizer(files)
    try:
        layout = Layout(spec, named, recipe.parallel.tp, router)
    except UserError as e:  # heads that the ranks cannot share
        where = place(recipe_path, "parallel.tp")
        raise UserError(f"recipe refused: {where}: {str(e).removeprefix('parallel.tp: ')}") from e
    tokens = quality_tokens(recipe, recipe_path, text, spec)
    calibration = calibration_tokens(recipe, recipe_path, text, spec)
    if found and weights:
        found = fetch_source(found.repo, found.commit, progress=progress)
        checkpoint = Checkpoint.open(found.folder)
        checkpoint.check(roles)
        router = _router_format(checkpoint, roles, config)
        layout = Layout(spec, named, recipe.parallel.tp, router)
    layouts: dict[LayoutName, Layout | CudaLayout] = {}
    ranks = recipe.parallel.tp, recipe.parallel.per_device
    for name in map(layout_name, targets):
        layouts[name] = layout if name == "cpu" else CudaLayout(spec, precision, router, *ranks)
    measured = None
    if tokens:
        reference = Layout(spec, dict.fromkeys(get_args(Precision), "bf16"), 1, router)
        measured = QualityPlan(tokens, runs_here(targets)[0], reference)
    for target in targets:
        _prove(layouts[layout_name(target)], recipe, target)
    if measured:
        _prove(measured.reference, recipe, f"the reference on {measured.target}")
    commit, sha256 = (found.commit, found.sha256) if found else (None, {})
    return Plan(
        *(written, recipe_path, files, commit, checkpoint, spec, roles, layout, layouts, targets, sha256, measured),
        *(calibration, rank),
    )


def _prove(layout: Layout | CudaLayout, recipe: Recipe, target: str) -> None:
    context, tokens = recipe.limits.context, recipe.limits.tokens_per_step
    if isinstance(layout, CudaLayout):
        proofs = schedule.cuda_proofs(layout, context, target)
    else:
        proofs = (schedule.cpu_schedule(layout, context, tokens, target),)
    for found in proofs:
        schedule.check(found)


def source_files(folder: Path) -> dict[str, Path]:
    """config.json and the files of tokenizer and licence that are there, by name."""
    aux = {path.name: path for path in sorted(folder.iterdir()) if is_aux(path.name) and path.is_file()}
    return {**aux, "config.json": folder / "config.json"}


def _config(folder: Path) -> dict[str, Any]:
    """config.json of a source whose weights are not here, so that there is no Checkpoint to ask."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as e:
        raise UserError(f"{folder / 'config.json'} is not readable as JSON: {e}") from e
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} is not a JSON object")
    return config


def _router_format(checkpoint: Checkpoint | Dummy | None, roles: list[TensorRole], config: dict) -> Format:
    """Routers keep the checkpoint's own dtype; float16 is widened. One format serves all layers."""
    if checkpoint is None:
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        return "bf16" if dtype == "bfloat16" else "f32"
    dtypes = {checkpoint.tensors[r.source].dtype for r in roles if r.name.endswith(".router")}
    return "bf16" if dtypes == {"BF16"} else "f32"
