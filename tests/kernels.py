"""Tiny models without a checkpoint: random tensors in any format, packed, compiled and run through the C ABI."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkpack import abi, codegen, compile, formats, platform
from mkpack.compile import Unit
from mkpack.formats import QTensor
from mkpack.layout import Layout
from mkpack.manifest import Limits
from mkpack.native import Library
from mkpack.pack import BlobWriter
from mkpack.spec import Format, LayerSpec, ModelSpec, MoeSpec, RopeSpec, SourceNames, TensorRole, tensors

PRECISIONS = ("embeddings", "lm_head", "attention", "experts", "dense")
TARGETS = platform.cpu_levels()  # what this machine can run, best first


def precision(default: Format = "bf16", **formats_: Format) -> dict[str, Format]:
    return {**dict.fromkeys(PRECISIONS, default), **formats_}


def tiny_spec(**changes: Any) -> ModelSpec:
    """A two-layer mixture of experts whose sizes are awkward but small; `changes` replace fields of ModelSpec.

    layers: a list of LayerSpec, or the number of plain MoE layers. moe: a MoeSpec, or a dict of changes to it.
    """
    head_dim = changes.get("head_dim", 8)
    layers = changes.pop("layers", 2)
    moe = changes.pop("moe", {})
    if isinstance(moe, dict):
        moe = MoeSpec(**{"num_experts": 5, "top_k": 2, "intermediate_size": 24, "norm_topk_prob": True, **moe})
    inv_freq = 10000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    fields: dict[str, Any] = {
        "family": "tiny",
        "vocab_size": 67,
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rope": RopeSpec(inv_freq=tuple(float(f) for f in inv_freq.astype(np.float32))),
        "qk_norm": False,
        "qkv_bias": False,
        "o_bias": False,
        "layers": tuple(LayerSpec(moe=True) for _ in range(layers)) if isinstance(layers, int) else tuple(layers),
        "moe": moe,
        "dense_intermediate_size": None,
    }
    return ModelSpec(**{**fields, **changes})


def roles(spec: ModelSpec) -> list[TensorRole]:
    return list(tensors(spec, SourceNames(fused="rows")))  # which have biases too


def random_qtensor(rng: np.random.Generator, fmt: Format, shape: tuple[int, ...], size: float = 1.0) -> QTensor:
    """A tensor of `fmt` whose values have a standard deviation of about `size`; every finite code may appear."""
    if len(shape) == 1 or fmt == "f32":
        return QTensor("f32", shape, (size * rng.standard_normal(shape)).astype(np.float32))
    rows, cols = shape
    if fmt == "bf16":
        return QTensor("bf16", shape, formats.f32_to_bf16((size * rng.standard_normal(shape)).astype(np.float32)))
    if fmt == "fp8":
        codes = rng.integers(0, 255, shape, dtype=np.uint8)
        codes[codes == 0x7F] = 0x80  # NaN; -0 instead
        spread = formats.e4m3_to_f32(codes).std() or 1.0
        scale2 = size / spread * rng.uniform(0.5, 1.5, rows)
        return QTensor("fp8", shape, codes, None, scale2.astype(np.float32))
    blocks = -(-cols // 16)
    data = rng.integers(0, 256, (rows, blocks, 16 // 2), dtype=np.uint8)
    if missing := blocks * 16 - cols:  # columns that are not there are zero
        nibbles = np.stack([data & 15, data >> 4], -1).reshape(rows, blocks * 16)
        nibbles[:, -missing:] = 0
        data = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
    # Mostly scales of one size, some zero, some subnormal, some large.
    scale = rng.integers(0x30, 0x48, (rows, blocks), dtype=np.uint8)
    odd = rng.random((rows, blocks))
    scale = np.where(odd < 0.03, rng.integers(0, 8, scale.shape, dtype=np.uint8), scale)
    scale = np.where(odd > 0.99, np.uint8(0x50), scale)
    q = QTensor("nvfp4", shape, data.reshape(rows, blocks * 8), scale, np.ones(1, np.float32))
    spread = float(formats.dequantise(q).std()) or 1.0
    return QTensor("nvfp4", shape, q.data, q.scale, np.array([size / spread], np.float32))


def _random_tensor(rng: np.random.Generator, role: TensorRole, fmt: Format, centered: bool) -> QTensor:
    """Sizes that keep activations near 1, a router that decides clearly and logits that stand apart."""
    if role.name.endswith("norm"):
        mean = 0 if centered and role.name != "final_norm" else 1
        return QTensor("f32", role.shape, (mean + 0.2 * rng.standard_normal(role.shape)).astype(np.float32))
    if role.name.endswith("_bias"):
        return random_qtensor(rng, "f32", role.shape, 0.3)
    if role.name.endswith(("sinks", "_residual_gate")):
        return random_qtensor(rng, "f32", role.shape, 0.5)
    if role.name == "embed":
        return random_qtensor(rng, fmt, role.shape, 0.3)
    gain = 2.0 if role.name.endswith(".q") else 4.0 if role.name.endswith("router") or role.name == "lm_head" else 1.0
    return random_qtensor(rng, fmt, role.shape, gain / role.shape[1] ** 0.5)


@dataclass
class Weights:
    """Canonical tensors of a model. head: what a tied head with a precision of its own is stored as."""

    layout: Layout
    tensors: dict[str, QTensor]
    head: QTensor | None = None

    @staticmethod
    def random(layout: Layout, seed: int = 0, changed: Mapping[str, QTensor] | None = None) -> Weights:
        rng = np.random.default_rng(seed)
        centered = layout.spec.centered_norms
        found = {r.name: _random_tensor(rng, r, layout.format_of(r), centered) for r in roles(layout.spec)}
        found |= _down_input_scales(layout, seed)
        found.update(changed or {})
        head = None
        if layout.spec.tie_word_embeddings and not layout.tied:
            head = random_qtensor(rng, layout.precision["lm_head"], found["embed"].shape, 0.3)
        return Weights(layout, found, head)

    def plain(self) -> dict[str, np.ndarray]:
        """float32 by canonical name, as plain_model wants them (of an untied model or one without `head`)."""
        return {name: formats.dequantise(q) for name, q in self.tensors.items()}

    def blobs(self, folder: Path, order: Iterable[str] | None = None) -> list[np.ndarray]:
        """The packed blob of every rank, page-aligned uint8 arrays."""
        paths = [folder / f"rank-{r}.bin" for r in range(self.layout.tp)]
        with BlobWriter(self.layout, paths) as writer:
            for name in order or self.tensors:
                writer.put(name, self.tensors[name], self.tensors[name].format)
            if self.head is not None:
                writer.put("embed", self.head, self.head.format)
        return [np.memmap(path, np.uint8, mode="r") for path in paths]


def _down_input_scales(layout: Layout, seed: int) -> dict[str, QTensor]:
    """Global scales under which some blocks saturate, and some are too faint for a scale of their own."""
    found = {}
    for section in layout.sections:
        if section.name.endswith(".down_input_scale"):
            assert layout.spec.moe
            rng = np.random.default_rng([seed, int(section.name.split(".")[1])])
            values = (10.0 ** rng.uniform(-4, 2, layout.spec.moe.num_experts)).astype(np.float32)
            found[section.name] = QTensor("f32", values.shape, values)
    return found


class Kernels:
    """Compiled kernels of this test session, by the text of their header: a compilation takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def of_session(factory: pytest.TempPathFactory) -> Kernels:
        folder = factory.getbasetemp() / "kernels"
        folder.mkdir(exist_ok=True)
        return Kernels(folder)

    def path(self, layout: Layout, limits: Limits, target: str = TARGETS[0]) -> Path:
        return self.paths([(layout, limits, target)])[0]

    def paths(self, wanted: Sequence[tuple[Layout, Limits, str]], fast: bool = False) -> list[Path]:
        """Several at once, compiled side by side. fast: less optimised; every multiply-add is written out, so the
        results are the same."""
        units = {}
        for layout, limits, target in wanted:
            header = codegen.model_header(layout, limits, target)
            name = hashlib.sha256(f"{fast} {header}".encode()).hexdigest()[:16]
            units[name] = Unit(name, target, header)
        missing = [u for name, u in units.items() if not (self.folder / name / "kernel.so").exists()]
        if missing:
            with pytest.MonkeyPatch.context() as patch:
                if fast:
                    patch.setattr(compile, "CPU_FLAGS", [f.replace("-O3", "-O1") for f in compile.CPU_FLAGS])
                compile.compile_kernels(missing, self.folder)
        return [self.folder / name / "kernel.so" for name in units]


@dataclass
class Generated:
    tokens: list[int]
    code: int
    error: str
    result: abi.Result


@dataclass
class Model:
    """A running kernel through the raw ABI, so that codes and texts are seen as they are."""

    lib: ctypes.CDLL
    handle: ctypes.c_void_p
    vocab_size: int
    tokens_per_step: int
    keep: list[Any] = field(default_factory=list)

    def error(self) -> str:
        return str(self.lib.mk_last_error().decode())

    def length(self) -> int:
        return int(self.lib.mk_length(self.handle))

    def truncate(self, length: int) -> int:
        return int(self.lib.mk_truncate(self.handle, length))

    def try_step(self, tokens: Sequence[int], num_logits: int | None = None) -> tuple[int, np.ndarray]:
        n = len(tokens) if num_logits is None else num_logits
        out = np.full((max(n, 0), self.vocab_size), np.nan, np.float32)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        target = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if n else None
        return int(self.lib.mk_step(self.handle, ids, len(tokens), target, n)), out

    def step(self, tokens: Sequence[int], num_logits: int | None = None) -> np.ndarray:
        code, out = self.try_step(tokens, num_logits)
        assert code == abi.OK, self.error()
        return out

    def try_step_taps(
        self, tokens: Sequence[int], layers: Sequence[int], hidden_size: int
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """(code, logits of all tokens, hidden [len(layers), len(tokens), hidden_size])."""
        out = np.full((len(tokens), self.vocab_size), np.nan, np.float32)
        hidden = np.full((len(layers), len(tokens), hidden_size), np.nan, np.float32)
        ids, taps = (ctypes.c_int32 * len(tokens))(*tokens), (ctypes.c_int32 * len(layers))(*layers)
        rows, states = (a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (out, hidden))
        n = len(tokens)
        return int(self.lib.mk_step_taps(self.handle, ids, n, rows, n, taps, len(layers), states)), out, hidden

    def run(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> np.ndarray:
        """Logits [len(tokens), vocab] of a fresh sequence; cuts: sizes of the first chunks, then full steps."""
        assert self.truncate(0) == abi.OK
        return np.concatenate([self.step(tokens[a:b]) for a, b in self._chunks(len(tokens), cuts)])

    def run_taps(self, tokens: Sequence[int], cuts: Sequence[int], spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
        """The same, and the hidden states [layers, len(tokens), hidden_size] after every layer."""
        assert self.truncate(0) == abi.OK
        found = []
        for a, b in self._chunks(len(tokens), cuts):
            code, *both = self.try_step_taps(tokens[a:b], range(len(spec.layers)), spec.hidden_size)
            assert code == abi.OK, self.error()
            found.append(both)
        logits, hidden = zip(*found, strict=True)
        return np.concatenate(logits), np.concatenate(hidden, axis=1)

    def _chunks(self, count: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        at, sizes = 0, list(cuts)
        while at < count:
            end = min(count, at + (sizes.pop(0) if sizes else self.tokens_per_step))
            yield at, end
            at = end

    def trace(self, tokens: Sequence[int], steps: int) -> tuple[int, list[str], np.ndarray]:
        """(code, names of rows, stamps) of mk_trace."""
        shape, ids = abi.TraceShape(), (ctypes.c_int32 * len(tokens))(*tokens)
        code = int(self.lib.mk_trace(self.handle, ids, len(tokens), steps, None, ctypes.byref(shape)))
        stamps = np.zeros((steps, shape.layers, shape.rows, shape.sms, 4), np.int64)
        if code == abi.OK:
            target = stamps.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
            code = int(self.lib.mk_trace(self.handle, ids, len(tokens), steps, target, ctypes.byref(shape)))
        return code, (shape.names or b"").decode().split("\n"), stamps

    def time_rank(self, tokens: Sequence[int]) -> tuple[int, str, int, int, float, float]:
        """(code, error, exchanges, bytes, experts with and without exchanges) of mk_time_rank."""
        found, ids = abi.RankTiming(), (ctypes.c_int32 * len(tokens))(*tokens)
        code = int(self.lib.mk_time_rank(self.handle, ids, len(tokens), ctypes.byref(found)))
        error = self.error() if code else ""
        return code, error, found.exchanges, found.bytes, found.step.experts, found.without.experts

    def generate(
        self, prompt: Sequence[int], callback: Any = None, *, stop: Sequence[int] = (), **request: Any
    ) -> Generated:
        """callback(token) -> true to end it; request: fields of mk_request, greedy and 8 tokens by default."""
        got: list[int] = []

        @abi.TokenCallback
        def on_token(_user: int | None, token: int) -> int:
            got.append(token)
            return int(bool(callback and callback(token)))

        values = {"top_p": 1.0, "repetition_penalty": 1.0, "max_new_tokens": 8, **request}
        ids = (ctypes.c_int32 * len(stop))(*stop)
        req = abi.Request(stop_tokens=ids if stop else None, num_stop_tokens=len(stop), **values)
        result = abi.Result()
        prompt_ids = (ctypes.c_int32 * max(len(prompt), 1))(*prompt)
        code = self.lib.mk_generate(self.handle, prompt_ids, len(prompt), req, on_token, None, result)
        return Generated(got, code, self.error() if code else "", result)


def try_create(lib: ctypes.CDLL, layout: Layout, blobs: Sequence[np.ndarray], **options: Any) -> tuple[int, Any]:
    """mk_create with good options where `options` say nothing else: (code, handle)."""
    pointers = (ctypes.c_void_p * len(blobs))(*(b.ctypes.data for b in blobs))
    values = {
        "weights": pointers,
        "weights_bytes": layout.nbytes,
        "num_ranks": len(blobs),
        "threads": 2,
        "wait_limit_s": 60.0,
        **options,
    }
    handle = ctypes.c_void_p()
    return int(lib.mk_create(abi.Options(**values), ctypes.byref(handle))), handle


@contextmanager
def running(
    kernel: Path, layout: Layout, limits: Limits, blobs: Sequence[np.ndarray], **options: Any
) -> Iterator[Model]:
    """A model that is destroyed and unloaded at the end. options: threads, context, wait_limit_s of mk_options."""
    library = Library(kernel.read_bytes(), str(kernel))
    try:
        code, handle = try_create(library.lib, layout, blobs, **options)
        assert code == abi.OK, library.lib.mk_last_error().decode()
        try:
            yield Model(library.lib, handle, layout.spec.vocab_size, limits.tokens_per_step, [blobs])
        finally:
            library.lib.mk_destroy(handle)
    finally:
        library.close()
