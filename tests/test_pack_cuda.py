"""The CUDA blob: its bytes are where csrc/cuda/layout.cuh says, and every tensor comes back bit for bit."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import kernels
import numpy as np
import pytest
from cuda_models import cuda_spec

from mkpack import compile, pack_cuda, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.formats import QTensor
from mkpack.layout_cuda import CudaLayout, tile_bytes
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter, unpack
from mkpack.spec import LayerSpec

LIMITS = Limits(context=1000, tokens_per_step=16)


def random_model(layout: CudaLayout, experts=(0, 1, 127)) -> dict[str, QTensor]:
    """Every tensor but most experts, whose bytes stay holes in the file."""
    rng = np.random.default_rng(7)
    found = {}
    for role in kernels.roles(layout.spec):
        parts = role.name.split(".")
        if "experts" in parts:
            if int(parts[3]) in experts:
                found[role.name] = kernels.random_qtensor(rng, "nvfp4", role.shape)
                if parts[-1] == "up":
                    gate = found[role.name.removesuffix("up") + "gate"]
                    up = found[role.name]
                    found[role.name] = QTensor("nvfp4", up.shape, up.data, up.scale, gate.scale2)
        else:
            found[role.name] = kernels.random_qtensor(rng, "f32" if len(role.shape) == 1 else "bf16", role.shape)
    return found


def write(layout: CudaLayout, path: Path, model: dict[str, QTensor], order=None) -> np.ndarray:
    with CudaBlobWriter(layout, path) as writer:
        for name in order or model:
            writer.put(name, model[name], model[name].format)
    return np.memmap(path, np.uint8, mode="r")


def same(a: QTensor, b: QTensor) -> bool:
    arrays = [(a.data, b.data), (a.scale, b.scale), (a.scale2, b.scale2)]
    return (a.format, a.shape) == (b.format, b.shape) and all(
        (x is None and y is None) or np.array_equal(x, y) for x, y in arrays
    )


@pytest.mark.parametrize(
    "spec",
    [
        cuda_spec(layers=(LayerSpec(moe=True),) * 2, vocab_size=72),
        cuda_spec(moe={"intermediate_size": 768}, tie_word_embeddings=True),
    ],
    ids=["two layers", "tied, 768"],
)
def test_tensors_come_back_bit_for_bit(spec, tmp_path):
    layout = CudaLayout(spec)
    model = random_model(layout)
    blob = write(layout, tmp_path / "blob", model)
    assert len(blob) == layout.nbytes
    for name, q in model.items():
        assert same(unpack(layout, blob, name), q), name
    if spec.tie_word_embeddings:
        assert np.array_equal(unpack(layout, blob, "lm_head").data, model["embed"].data)
    backwards = write(layout, tmp_path / "again", model, list(model)[::-1])
    for name, q in model.items():
        assert same(unpack(layout, backwards, name), q), name


def test_unknown_tensors(tmp_path):
    layout = CudaLayout(cuda_spec())
    for name in ("layers.0.q_bias", "nothing", "layers.x.q"):
        with pytest.raises(KeyError):
            unpack(layout, np.zeros(0, np.uint8), name)


def test_gate_and_up_belong_together(tmp_path):
    layout = CudaLayout(cuda_spec())
    model = random_model(layout, experts=(3,))
    gate, up = model["layers.0.experts.3.gate"], model["layers.0.experts.3.up"]
    other = QTensor("nvfp4", up.shape, up.data, up.scale, up.scale2 * 2)
    with CudaBlobWriter(layout, tmp_path / "blob") as writer:
        writer.put("layers.0.experts.3.gate", gate, "nvfp4")
        with pytest.raises(
            ValueError, match=r"layers\.0\.experts\.3\.gate and up have the tensor scales .*: must share"
        ):
            writer.put("layers.0.experts.3.up", other, "nvfp4")
    with (
        pytest.raises(ValueError, match=r"only one of gate and up was given: layers\.0\.experts\.3\.gate"),
        CudaBlobWriter(layout, tmp_path / "blob") as writer,
    ):
        writer.put("layers.0.experts.3.gate", gate, "nvfp4")


# -- against layout.cuh ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[512, 768])
def twin(request, tmp_path_factory):
    """(layout, a function that runs the C++ twin)."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    layout = CudaLayout(cuda_spec(moe={"intermediate_size": request.param}))
    folder = tmp_path_factory.mktemp("twin")
    (folder / "model.h").write_text(cuda_header(layout, LIMITS, "sm_90a"))
    csrc, source = compile.sources(), Path(__file__).parent / "cuda" / "layout_twin.cpp"
    flags = ["-std=c++20", "-O2", "-D__host__=", "-D__device__=", f"-I{csrc}", f"-I{csrc / 'cuda'}", f"-I{folder}"]
    subprocess.run([*compiler.command, *flags, str(source), "-o", str(folder / "twin")], check=True)

    def run(*arguments: object, data: bytes = b"") -> bytes:
        return subprocess.run(
            [folder / "twin", *map(str, arguments)], input=data, capture_output=True, check=True
        ).stdout

    return layout, run


def test_sizes_equal_those_of_the_kernel(twin):
    layout, run = twin
    found = dict(line.split() for line in run("sizes").decode().splitlines())
    expected = {
        "qkv_bytes": layout.qkv_bytes,
        "dense_layer_bytes": layout.dense_layer_bytes,
        "pair_bytes": layout.pair_bytes,
        "expert_bytes": layout.expert_bytes,
        "router_bytes": layout.router_bytes,
        "norm_layer": layout.norm_layer,
        **layout.norm_offsets,
        "pair_tile": tile_bytes(2048),
        "down_tile": tile_bytes(layout.spec.moe.intermediate_size),
        "qkv_rows": layout.qkv_rows,
        "k_at": pack_cuda.dense_offset(layout, "k"),
        "v_at": pack_cuda.dense_offset(layout, "v"),
    }
    assert {name: int(value) for name, value in found.items()} == expected


@pytest.mark.parametrize("cols", [2048, 4096])
def test_pages_equal_those_of_the_kernel(twin, cols):
    """Elements that are all different, so that each is told from every other."""
    _, run = twin
    data = np.arange(65536, dtype=np.uint16).reshape(-1, cols)
    assert run("matrix", len(data), cols, data=data.tobytes()) == pack_cuda.pack_pages(data).tobytes()


def test_expert_bytes_equal_those_of_the_kernel(twin, tmp_path):
    layout, run = twin
    model = random_model(layout, experts=(5,))
    parts = [model[f"layers.0.experts.5.{part}"] for part in ("gate", "up", "down")]
    rng = np.random.default_rng(1)  # every scale byte, not only the likely ones
    parts = [
        QTensor(q.format, q.shape, q.data, rng.integers(0, 256, q.scale.shape, dtype=np.uint8), q.scale2) for q in parts
    ]
    model.update({f"layers.0.experts.5.{name}": q for name, q in zip(("gate", "up", "down"), parts, strict=True)})
    blob = write(layout, tmp_path / "blob", model)
    start = layout.offset("experts") + 5 * layout.expert_bytes
    data = b"".join(a.tobytes() for q in parts for a in (q.data, q.scale))
    assert run("expert", data=data) == blob[start : start + layout.expert_bytes].tobytes()
    scales = blob[layout.offset("expert_scales") :][5 * 8 :][:8].view(np.float32)
    assert list(scales) == [parts[0].scale2[0], parts[2].scale2[0]]


def test_packing_is_fast():
    """A 30B model has 16 GB of experts: well above the speed of any disk they are read from."""
    rng = np.random.default_rng(0)
    gate, up = (kernels.random_qtensor(rng, "nvfp4", (768, 2048)) for _ in range(2))
    pages = rng.integers(0, 65536, (1024, 2048), dtype=np.uint16)

    def rate(nbytes, work):
        times = []
        for _ in range(5):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return nbytes / min(times)

    assert rate(gate.shape[0] // 8 * tile_bytes(2048), lambda: pack_cuda.pack_nvfp4(gate, up)) > 300e6
    assert rate(pages.nbytes, lambda: pack_cuda.pack_pages(pages)) > 300e6
