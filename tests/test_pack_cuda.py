"""The CUDA blob: its bytes are where csrc/cuda/layout.cuh says, and every tensor comes back bit for bit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernels
import numpy as np
import pytest
from cuda_models import cuda_layout, cuda_spec, muse_spec, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from mkpack import compile, pack_cuda, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.formats import QTensor
from mkpack.layout_cuda import CudaLayout, tile_bytes
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter, unpack
from mkpack.spec import LayerSpec

LIMITS = Limits(context=1000, tokens_per_step=16)
TWO_LAYERS = (LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7))
# Columns of one page and of several, whose last is short; fp8 shares that are full and half empty.
LAYOUTS = {
    "smallest": cuda_layout(small_spec(hidden_size=64, vocab_size=13, layers=TWO_LAYERS)),
    "every option": cuda_layout(
        small_spec(hidden_size=576, qk_norm=True, qkv_bias=True, o_bias=True, layers=TWO_LAYERS),
        "f32",
        attention="fp8",
        lm_head="fp8",
    ),
    "two pages, tied": cuda_layout(
        small_spec(
            hidden_size=2880,
            head_dim=128,
            tie_word_embeddings=True,
            qkv_bias=True,
            layers=1,
            moe={"num_experts": 2, "intermediate_size": 2112},
        )
    ),
    "tied, fp8 head": cuda_layout(
        small_spec(hidden_size=192, vocab_size=101, tie_word_embeddings=True, o_bias=True, moe={"top_k": 1}),
        lm_head="fp8",
    ),
    "biases of everything": cuda_layout(
        small_spec(
            hidden_size=64,
            num_attention_heads=6,
            qkv_bias=True,
            o_bias=True,
            attention_sinks=True,
            layers=TWO_LAYERS,
            moe={"num_experts": 5, "router_bias": True, "choice_bias": True, "scoring": "sigmoid", "expert_bias": True},
        ),
    ),
    "norms over all heads": cuda_layout(
        small_spec(qk_norm=True, qk_norm_over="projection", layers=2, moe={"choice_bias": True, "scoring": "sigmoid"})
    ),
    "fp8 attention": cuda_layout(
        small_spec(hidden_size=2112, vocab_size=72, qk_norm=True, moe={"intermediate_size": 192}), attention="fp8"
    ),
    "Muse Spark": cuda_layout(muse_spec()),
    "Muse Spark, fp8": cuda_layout(muse_spec(hidden_size=2112), attention="fp8", dense="fp8"),
    "dense layers": cuda_layout(small_spec(layers=(LayerSpec(moe=False), *TWO_LAYERS), dense_intermediate_size=200)),
}
VECTORS = (
    *("attn_norm", "mlp_norm", "q_norm", "k_norm", "q_bias", "o_bias"),
    *("sinks", "router_bias", "choice_bias", "gate_up_bias", "down_bias"),
)
Model = list[tuple[str, QTensor]]  # in canonical order; what a tied head is stored as comes last, as "embed" again


def random_model(layout: CudaLayout) -> Model:
    rng = np.random.default_rng(7)
    found = []
    for role in kernels.roles(layout.spec):
        q = kernels.random_qtensor(rng, layout.format_of(role), role.shape)
        if q.scale is not None:  # every byte, not only the likely ones
            q = QTensor(q.format, q.shape, q.data, rng.integers(0, 256, q.scale.shape, dtype=np.uint8), q.scale2)
        found.append((role.name, q))
    if layout.spec.tie_word_embeddings and not layout.tied:
        found.append(("embed", kernels.random_qtensor(rng, layout.precision["lm_head"], found[0][1].shape)))
    return found


def write(layout: CudaLayout, path: Path, model: Model) -> np.ndarray:
    with CudaBlobWriter(layout, path) as writer:
        for name, q in model:
            writer.put(name, q, q.format)
    return np.memmap(path, np.uint8, mode="r")


def same(a: QTensor, b: QTensor) -> bool:
    arrays = [(a.data, b.data), (a.scale, b.scale), (a.scale2, b.scale2)]
    return (a.format, a.shape) == (b.format, b.shape) and all(
        (x is None and y is None) or np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in arrays
    )


@pytest.fixture(params=LAYOUTS)
def layout(request) -> CudaLayout:
    return LAYOUTS[request.param]


def test_tensors_come_back_bit_for_bit(layout, tmp_path):
    model = random_model(layout)
    blob = write(layout, tmp_path / "blob", model)
    assert len(blob) == layout.nbytes
    for name, q in dict(model[::-1]).items():  # the first of two tensors "embed" is the rows to look up
        assert same(unpack(layout, blob, name), q), name
    if layout.spec.tie_word_embeddings:
        head = [q for name, q in model if name == "embed"][-1]
        assert same(unpack(layout, blob, "lm_head"), head)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("muse", [False, True])
def test_ranks_hold_the_rows_of_their_shares(tp, precision, muse, tmp_path):
    """Hidden 832 is 52 units, experts 64 wide 8, 67 tokens 9, a dense layer of 72 9: not all ranks have as many rows of
    each."""
    options = {"num_attention_heads": 8, "qkv_bias": True, "o_bias": True, "attention_sinks": True, "layers": 1}
    options |= {"qk_norm": True, "qk_norm_over": "projection"}
    spec = small_spec(hidden_size=832, **options, moe={"expert_bias": True, "router_bias": True})
    if muse:
        spec = muse_spec(hidden_size=832, num_attention_heads=8)
    one = cuda_layout(spec, attention=precision, lm_head=precision, dense=precision)
    layout = CudaLayout(spec, one.precision, tp=tp)
    model = random_model(layout)
    paths = [tmp_path / f"{r}" for r in range(tp)]
    with CudaBlobWriter(layout, paths) as writer:
        seals = [writer.put(name, q, q.format) for name, q in model]
        assert all(writer.holds(found) for found in seals) and writer.blobs == tp
    blobs = [np.memmap(path, np.uint8, mode="r") for path in paths]
    for rank, blob in enumerate(blobs):
        assert len(blob) == layout.nbytes
        for name, q in model:
            rows = slice(None) if name == "embed" else layout.rows(name, rank)
            scale2 = q.scale2[rows] if q.format == "fp8" and q.scale2 is not None else q.scale2
            data = q.data[rows]
            scale = None if q.scale is None else q.scale[rows]
            part = QTensor(q.format, (len(data), *q.shape[1:]), data, scale, scale2)
            assert same(unpack(layout, blob, name, rank), part), (rank, name)
    # What several ranks have is the same there, and of the rest every row is somewhere.
    for name, q in model:
        held = {r for rank in range(tp) for r in range(q.shape[0])[layout.rows(name, rank)]}
        assert held == set(range(q.shape[0])), name
    with pytest.raises(ValueError, match=f"{tp} ranks, 1 blobs"):
        CudaBlobWriter(layout, tmp_path / "one")


@st.composite
def layouts(draw) -> CudaLayout:
    attention, head = (draw(st.sampled_from(["bf16", "fp8"])) for _ in range(2))
    flags = ("qk_norm", "qkv_bias", "o_bias", "tie_word_embeddings", "attention_sinks")
    spec = small_spec(
        hidden_size=draw(st.sampled_from([64, 128, 192, 576, 1088])),
        head_dim=draw(st.sampled_from([64, 128])),
        num_attention_heads=4,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        vocab_size=draw(st.sampled_from([1, 7, 8, 67, 257])),
        layers=draw(st.integers(1, 2)),
        moe={
            "num_experts": 2,
            "intermediate_size": draw(st.sampled_from([64, 192, 2112])),
            "expert_bias": draw(st.booleans()),
        },
        **{flag: draw(st.booleans()) for flag in flags},
    )
    return cuda_layout(spec, draw(st.sampled_from(["bf16", "f32"])), attention=attention, lm_head=head)


@given(layout=layouts())
@settings(max_examples=15)
def test_unpacking_undoes_packing(layout, tmp_path_factory):
    model = random_model(layout)
    blob = write(layout, tmp_path_factory.mktemp("any") / "blob", model)
    for name, q in dict(model[::-1]).items():
        assert same(unpack(layout, blob, name), q), name


def test_order_and_threads_do_not_matter(layout, tmp_path):
    model = random_model(layout)
    blob = write(layout, tmp_path / "blob", model)
    assert np.array_equal(write(layout, tmp_path / "backwards", model[::-1]), blob)
    with CudaBlobWriter(layout, tmp_path / "threads") as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: writer.put(*item, item[1].format), model))
    assert (tmp_path / "threads").read_bytes() == blob.tobytes()


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.q_bias",
        "layers.0.sinks",
        "layers.0.gate_up_bias",
        "layers.0.experts.0.gate_bias",
        "nothing",
        "layers.x.q",
        "layers.1.q",
        "layers.0.experts.3.up",
        "layers.0.experts.0.q",
    ],
)
def test_unknown_tensors(name, tmp_path):
    layout = cuda_layout(small_spec(layers=1))
    with pytest.raises(KeyError):
        unpack(layout, np.zeros(layout.nbytes, np.uint8), name)
    with CudaBlobWriter(layout, tmp_path / "blob") as writer, pytest.raises(KeyError):
        writer.put(name, kernels.random_qtensor(np.random.default_rng(0), "nvfp4", (64, 192)), "nvfp4")
    assert not any((tmp_path / "blob").read_bytes())


def test_gate_and_up_belong_together(tmp_path):
    layout = cuda_layout(small_spec())
    gate = dict(random_model(layout))["layers.0.experts.1.gate"]
    with (
        pytest.raises(ValueError, match=r"only one of gate and up was given: layers\.0\.experts\.1\.gate"),
        CudaBlobWriter(layout, tmp_path / "blob") as writer,
    ):
        writer.put("layers.0.experts.1.gate", gate, "nvfp4")


# -- against layout.cuh ------------------------------------------------------------------------------------------------

Twin = Callable[..., bytes]


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> Callable[[CudaLayout], Twin]:
    """Layout -> a function that runs its C++ twin, compiled once."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    csrc, source = compile.sources(), Path(__file__).parent / "cuda" / "layout_twin.cpp"
    programs: dict[int, Path] = {}

    def program(layout: CudaLayout) -> Path:
        folder = tmp_path_factory.mktemp("twin")
        (folder / "model.h").write_text(cuda_header(layout, LIMITS, "sm_90a"))
        flags = ["-std=c++20", "-O2", f"-I{csrc}", f"-I{csrc / 'cuda'}", f"-I{folder}"]
        subprocess.run([*compiler.command, *flags, str(source), "-o", str(folder / "twin")], check=True)
        return folder / "twin"

    def twin(layout: CudaLayout) -> Twin:
        if id(layout) not in programs:
            programs[id(layout)] = program(layout)

        def run(*arguments: object, data: bytes = b"") -> bytes:
            command = [programs[id(layout)], *map(str, arguments)]
            return subprocess.run(command, input=data, capture_output=True, check=True).stdout

        return run

    return twin


def given_bytes(q: QTensor) -> bytes:
    return b"".join(a.tobytes() for a in (q.data, q.scale, q.scale2) if a is not None)


def test_sizes_equal_those_of_the_kernel(layout, twins):
    found = dict(line.split() for line in twins(layout)("sizes").decode().splitlines())
    vectors = {name: layout.vectors[name][0] for name in VECTORS}
    expected = {
        "qkv_bytes": layout.qkv_bytes,
        "dense_layer_bytes": layout.dense_layer_bytes,
        "head_bytes": layout.head_bytes,
        "head_rows": layout.head_rows,
        "pair_bytes": layout.pair_bytes,
        "expert_bytes": layout.expert_bytes,
        "dense_scale_layer": layout.dense_scale_layer,
        "router_bytes": layout.router_bytes,
        "norm_layer": layout.norm_layer,
        **vectors,
        "pair_tile": tile_bytes(layout.expert_hidden),
        "down_tile": tile_bytes(layout.spec.moe.intermediate_size),
        "qkv_rows": layout.qkv_rows,
        "k_at": pack_cuda.dense_offset(layout, "k"),
        "v_at": pack_cuda.dense_offset(layout, "v"),
    }
    assert {name: int(value) for name, value in found.items()} == expected


def test_the_blob_equals_that_of_the_kernel(layout, twins, tmp_path):
    model = random_model(layout)
    given_ = list(model)
    if layout.tied:
        given_.append(model[0])
    data = b"".join(given_bytes(q) for _, q in given_)
    assert twins(layout)("blob", data=data) == write(layout, tmp_path / "blob", model).tobytes()


@given(rows=st.integers(1, 40), chunks=st.integers(1, 50), fmt=st.sampled_from(["bf16", "fp8"]))
@settings(max_examples=40)
def test_pages_equal_those_of_the_kernel(twins, rows, chunks, fmt):
    q = kernels.random_qtensor(np.random.default_rng(0), fmt, (rows, 64 * chunks))
    packed = pack_cuda.pack_pages(q.data)
    run = twins(LAYOUTS["smallest"])
    assert run("matrix", rows, 64 * chunks, fmt, data=given_bytes(q)) == packed.tobytes()
    assert np.array_equal(pack_cuda.unpack_pages(packed, fmt, rows, 64 * chunks), q.data)


@given(chunks=st.integers(1, 100), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_tiles_equal_those_of_the_kernel(twins, chunks, seed):
    rng = np.random.default_rng(seed)
    cols, one = 64 * chunks, np.ones(1, np.float32)
    data, scale = (rng.integers(0, 256, (2, 8, cols // n), dtype=np.uint8) for n in (2, 16))
    low, high = (QTensor("nvfp4", (8, cols), data[i], scale[i], one) for i in range(2))
    packed = pack_cuda.pack_nvfp4(low, high)
    run = twins(LAYOUTS["smallest"])
    assert run("tile", cols, data=data.tobytes() + scale.tobytes()) == packed.tobytes()
    for q, (found_data, found_scale) in zip((low, high), pack_cuda.unpack_nvfp4(packed, cols), strict=True):
        assert np.array_equal(found_data, q.data) and np.array_equal(found_scale, q.scale)


def test_packing_is_fast():
    """A 30B model has 16 GB of experts: well above the speed of any disk they are read from."""
    rng = np.random.default_rng(0)
    gate, up = (kernels.random_qtensor(rng, "nvfp4", (768, 2048)) for _ in range(2))
    bf16 = rng.integers(0, 65536, (512, 1024), dtype=np.uint16)  # slabs, as the writer cuts them
    fp8 = rng.integers(0, 256, (512, 2048), dtype=np.uint8)

    def rate(nbytes, work):
        times = []
        for _ in range(5):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return nbytes / min(times)

    assert rate(gate.shape[0] // 8 * tile_bytes(2048), lambda: pack_cuda.pack_nvfp4(gate, up)) > 300e6
    assert rate(bf16.nbytes, lambda: pack_cuda.pack_pages(bf16)) > 300e6
    assert rate(fp8.nbytes, lambda: pack_cuda.pack_pages(fp8)) > 300e6


def test_the_shape_of_qwen3_comes_back(tmp_path):
    """Sparse: two experts of 128, the others stay holes of the file."""
    layout = cuda_layout(cuda_spec(moe={"intermediate_size": 768}))
    rng = np.random.default_rng(1)
    names = [f"layers.0.experts.{e}.{part}" for e in (0, 127) for part in ("gate", "up", "down")]
    roles = {role.name: role for role in kernels.roles(layout.spec)}
    model = [(n, kernels.random_qtensor(rng, "nvfp4", roles[n].shape)) for n in names]
    blob = write(layout, tmp_path / "blob", model)
    for name, q in model:
        assert same(unpack(layout, blob, name), q), name
