"""The way of a GPU target, from recipe to loaded model, without a GPU: a fake kernel stands for the compiled one, which
tests/test_cuda_host.py and the emulator run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import builds
import fake
import families
import numpy as np
import pytest

from mkpack import build as builder
from mkpack import compat, pack_cuda, platform
from mkpack import plan as planner
from mkpack.artifact import extract, open_artifact
from mkpack.build import build
from mkpack.compile import CUDA_TARGETS, Kernel, Unit
from mkpack.describe import describe
from mkpack.errors import InternalError, UserError
from mkpack.formats import dequantise
from mkpack.layout_cuda import GRID, CudaLayout
from mkpack.loader import load
from mkpack.native import Library
from mkpack.platform import CudaDevice, CudaDriver, Gpu
from mkpack.spec import tensors

CPU = platform.CPU_TARGETS[-1]
DRIVER = CudaDriver("13.0", (CudaDevice("NVIDIA H200", "9.0", 132),))
# Small, and within what the GPU kernel takes; the same for every rank of the CPU.
SHAPE = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
# Tells what the first page of its weights adds up to, and can be told to refuse to start or to generate.
SOURCE = fake.FAKE.replace(
    "*b = 1e9 * m->threads;", "*b = 0; for (int i = 0; i < 4096; i++) *b += ((const uint8_t*)m->script)[i];"
)


@pytest.fixture
def machine(monkeypatch):
    """A CPU of the lowest level, and a GPU or none."""
    monkeypatch.setattr(platform, "cpu_levels", lambda: [CPU])

    def play(driver: CudaDriver | None) -> None:
        monkeypatch.setattr(platform, "cuda_driver", lambda: driver)

    play(DRIVER)
    return play


@pytest.fixture
def compiled(monkeypatch) -> list[Unit]:
    """Kernels are fake ones with the description of the real; the list tells which were asked for."""
    asked: list[Unit] = []

    def compile_kernels(units: list[Unit], folder: Path, stop: object) -> dict[str, Kernel]:
        made = {}
        for unit in units:
            text = re.search(r'description\[\] = R"mk\((.*)\)mk"', unit.header)
            assert text
            path = folder / f"{unit.name}.so"
            path.write_bytes(fake.kernel(text[1], SOURCE))
            needs: dict[str, object] = {"cpu": unit.target}
            if unit.target in CUDA_TARGETS:
                needs = {"gpu": unit.target, "cuda": "13.0", "sms": GRID[unit.target]}
            made[unit.name] = Kernel(path, "fake 1.0", {**needs, "system": "linux"})
        asked.extend(units)
        return made

    monkeypatch.setattr(builder, "compile_kernels", compile_kernels)
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler(("/bin/nvcc",), "13.0"))
    return asked


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return families.make_checkpoint(tmp_path_factory.mktemp("gpu") / "checkpoint", "mixtral", **SHAPE)


def recipe(tmp_path: Path, checkpoint: Path, targets: list[str], **keys: Any) -> Path:
    return builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, targets=targets, **keys)


def first_page(path: Path, name: str) -> float:
    with open_artifact(path) as artifact:
        return float(sum(artifact.read(name)[:4096]))


def test_both_layouts_hold_the_same_tensors(compiled, machine, checkpoint, tmp_path):
    quantise = {"attention": "fp8", "lm_head": "fp8"}
    path = build(recipe(tmp_path, checkpoint, [CPU, "sm_90a", "sm_100a"], quantise=quantise), output=tmp_path)
    assert [unit.target for unit in compiled] == [CPU, "sm_90a", "sm_100a"]
    assert f"kGrid = {GRID['sm_100a']};" in compiled[2].header
    with open_artifact(path) as artifact:
        m = artifact.manifest
        assert not artifact.verify(full=True)
        blob = np.frombuffer(artifact.read("weights/cuda-0.bin"), np.uint8)
    assert {t: k.layout for t, k in m.kernels.items()} == {CPU: "cpu", "sm_90a": "cuda", "sm_100a": "cuda"}
    assert [(w.layout, w.rank, w.path) for w in m.weights] == [
        ("cpu", 0, "weights/cpu-0.bin"),
        ("cuda", 0, "weights/cuda-0.bin"),
    ]
    assert m.producer.compilers["nvcc"] == "13.0"
    layout = CudaLayout(m.spec, m.precision, "f32")
    assert m.sections["cuda"] == layout.sections and m.weights[1].nbytes == layout.nbytes == len(blob)
    stored = builds.dequantised(path, checkpoint)  # of the CPU's blob
    _, names = planner.model_spec(json.loads((checkpoint / "config.json").read_bytes()))
    for role in tensors(m.spec, names):
        assert np.array_equal(dequantise(pack_cuda.unpack(layout, blob, role.name)), stored[role.source]), role.name
    text = describe(m)
    assert "cuda, rank 0 of 1" in text and "bytes of a rank's cuda weights by kind:" in text
    assert "needs cuda 13.0, gpu sm_90a, sms 132, system linux" in text


def test_a_gpu_target_alone_packs_nothing_for_cpus(compiled, machine, checkpoint, tmp_path):
    made = recipe(tmp_path, checkpoint, ["sm_90a"])
    todo = planner.plan(made)
    path = build(made, output=tmp_path)
    with open_artifact(path) as artifact:
        m = artifact.manifest
        assert list(m.sections) == ["cuda"] and [w.path for w in m.weights] == ["weights/cuda-0.bin"]
        assert todo.artifact_bytes == m.weights[0].nbytes < path.stat().st_size < todo.disk_bytes
        assert sum(todo.bytes_by_format().values()) == sum(s.nbytes for s in m.sections["cuda"])
    kv_cache = 2 * 2 * 128 * 64 * 2  # keys and values of 128 positions, 64 wide, of 2 layers, in bfloat16
    assert todo.gpu_bytes == todo.artifact_bytes + kv_cache == json.loads(todo.to_json())["gpu_bytes"]
    assert f"GPU memory   {todo.gpu_bytes / 1e6:,.1f} MB" in todo.render()
    assert "for GPUs" in todo.render() and "for CPUs" not in todo.render()
    extract(path, tmp_path / "folder")
    for place in (path, tmp_path / "folder"):
        with load(place) as model:
            assert model.target == "sm_90a" and model.read_bandwidth() == first_page(path, "weights/cuda-0.bin")
            assert model.step([1, 2]).shape == (1, 288)
    machine(None)
    with pytest.raises(UserError, match="sm_90a needs an NVIDIA GPU of compute capability 9.0; this machine has no"):
        load(path)


def test_the_gpu_goes_first_and_can_be_chosen_or_not(compiled, machine, checkpoint, tmp_path):
    path = build(recipe(tmp_path, checkpoint, [CPU, "sm_90a"]), output=tmp_path)
    sums = {"sm_90a": first_page(path, "weights/cuda-0.bin"), CPU: first_page(path, "weights/cpu-0.bin")}
    assert len(set(sums.values())) == 2

    def chosen(target: str | None = None) -> str:
        with load(path, target=target) as model:
            assert model.read_bandwidth() == sums[model.target]
            return model.target

    assert chosen() == chosen("gpu") == chosen("sm_90a") == "sm_90a"
    assert chosen("cpu") == chosen(CPU) == CPU
    machine(CudaDriver("13.0", (CudaDevice("NVIDIA L4", "8.9", 58),)))
    assert chosen() == CPU
    for wanted, said in (("gpu", "target gpu does not run on this machine"), ("sm_80", "no such kernel, it has")):
        with pytest.raises(UserError, match=said) as caught:
            load(path, target=wanted, context=100_000)
        assert "context 100000" in str(caught.value)


def test_a_gpu_that_refuses_names_the_way_to_the_cpu(compiled, machine, checkpoint, tmp_path):
    path = build(recipe(tmp_path, checkpoint, [CPU, "sm_90a"]), output=tmp_path)
    with pytest.raises(UserError, match="out of memory: no memory for the cache; --target cpu runs it on this machine"):
        load(path, wait_limit=77)
    with pytest.raises(UserError) as caught:
        load(path, wait_limit=77, target="cpu")
    assert "--target" not in str(caught.value)


def test_damage_of_the_other_layout_does_not_stop_a_load(compiled, machine, checkpoint, tmp_path):
    path = build(recipe(tmp_path, checkpoint, [CPU, "sm_90a"]), output=tmp_path)
    folder = tmp_path / "folder"
    extract(path, folder)
    blob = bytearray((folder / "weights/cpu-0.bin").read_bytes())
    blob[-1] ^= 1
    (folder / "weights/cpu-0.bin").write_bytes(blob)
    with load(folder, target="gpu") as model:
        model.step([1])
    with load(folder, target="cpu") as model, pytest.raises(UserError, match="weights/cpu-0.bin: sha256 expected"):
        model.step([1])


def test_requests_that_a_kernel_refuses_are_the_users_to_mend(compiled, machine, checkpoint, tmp_path):
    path = build(recipe(tmp_path, checkpoint, ["sm_90a"]), output=tmp_path)
    with load(path) as model:
        for code, kind in ((-1, UserError), (-5, InternalError)):
            assert isinstance(model._native._library.error(code, "generating"), kind)


@pytest.mark.parametrize("shape", ["dummy", "folder"])
def test_the_number_of_cores_changes_no_byte(compiled, machine, checkpoint, tmp_path, monkeypatch, shape):
    source = {"dummy": str(checkpoint / "config.json")} if shape == "dummy" else {"folder": str(checkpoint)}
    made = recipe(tmp_path, checkpoint, [CPU, "sm_90a"], source=source, quantise={"attention": "fp8"})
    found = set()
    for cores in (1, 5):
        monkeypatch.setattr(platform, "cores", lambda cores=cores: cores)
        found.add(build(made, output=tmp_path, force=True).read_bytes())
    assert len(found) == 1


@pytest.mark.skipif(platform.nvcc() is None, reason="no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda")
def test_a_kernel_of_nvcc_is_the_one_of_the_manifest(checkpoint, tmp_path, monkeypatch, capsys):
    """Built for real, reported, and without a GPU refused before it is loaded."""
    from rich.console import Console

    path = build(recipe(tmp_path, checkpoint, ["sm_90a"]), output=tmp_path, console=Console(stderr=True, width=300))
    assert " registers, " in capsys.readouterr().err
    with open_artifact(path) as artifact:
        kernel = artifact.manifest.kernels["sm_90a"]
        library = Library(artifact.read(kernel.path), kernel.path)
    assert library.describe() == kernel.description and kernel.compiler.startswith("nvcc ")
    library.close()
    monkeypatch.setattr(platform, "cuda_driver", lambda: None)
    with pytest.raises(UserError, match="this machine has no working NVIDIA driver"):
        load(path)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(path: Path, building: bool = False) -> list[str]:
    with pytest.raises(UserError) as caught:
        planner.plan(path, weights=building)
    return str(caught.value).replace("recipe refused: ", "recipe refused\n  - ", 1).split("\n")[1:]


def test_everything_that_the_gpu_kernel_does_not_take_is_in_one_message(compiled, tmp_path):
    case = families.make_checkpoint(tmp_path / "c", "mixtral", **{**SHAPE, "head_dim": 32, "intermediate_size": 72})
    keys = {"quantise": {"experts": "fp8", "embeddings": "fp8"}, "limits": {"context": 999}}
    made = recipe(tmp_path, case, ["sm_90a", "sm_100a"], **keys)
    text = "\n".join(refusal(made))
    for part in (
        "quantise.experts: is fp8, the kernel takes nvfp4 (target sm_90a, sm_100a)",
        "quantise.embeddings: is fp8, the kernel takes bf16",
        "targets: sm_90a, sm_100a: head_dim is 32",
        "targets: sm_90a, sm_100a: moe intermediate_size is 72, the kernel takes multiples of 64",
        "limits.context: 999 positions",
    ):
        assert part in text, part
    lines = made.read_text().splitlines()
    line = 1 + next(i for i, row in enumerate(lines) if row.strip().startswith("experts:"))
    assert f"{made}:{line}: quantise.experts" in text


def test_nvcc_is_needed_to_build_and_not_to_plan(compiled, checkpoint, tmp_path, monkeypatch):
    made = recipe(tmp_path, checkpoint, ["sm_90a", "sm_100a"])
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler(("/opt/nvcc",), "12.4"))
    assert "sm_90a, sm_100a" in planner.plan(made).render()
    (found,) = refusal(made, building=True)
    assert "targets: target sm_100a: needs nvcc of CUDA 12.8 or newer, found 12.4 (/opt/nvcc)" in found
    monkeypatch.setattr(platform, "nvcc", lambda: None)
    assert len([line for line in refusal(made, building=True) if "nvcc is not here" in line]) == 2
    with pytest.raises(UserError, match="nvcc is not here"):
        build(made, output=tmp_path)
    assert not (tmp_path / "tiny.mkpack").exists()


def test_what_only_compiles_is_said(checkpoint, tmp_path):
    def notes(*targets: str) -> str:
        return "\n".join(planner.plan(recipe(tmp_path, checkpoint, list(targets))).notes())

    assert "sm_100a: compiles, and has not run on any GPU yet" in notes("sm_90a", "sm_100a")
    assert "sm_" not in notes("sm_90a", CPU)


def test_quality_is_measured_on_a_cpu(compiled, machine, checkpoint, tmp_path):
    (found,) = refusal(recipe(tmp_path, checkpoint, ["sm_90a"], quality={"tokens": 20}))
    assert "none of the targets sm_90a runs on this machine's CPU" in found
    assert planner.plan(recipe(tmp_path, checkpoint, ["sm_90a", CPU], quality={"tokens": 20})).quality.target == CPU


def test_the_recipes_for_gpus_are_within_the_kernels_limits():
    root = Path(__file__).parents[1] / "recipes"
    for name in ("bench/qwen3-30b-a3b.yaml", "bench/qwen3-30b-a3b-fp8.yaml"):
        todo = planner.plan(root / name)
        assert todo.targets == ("sm_90a",) and list(todo.layouts) == ["cuda"]
        assert 17e9 < todo.artifact_bytes < 20e9 and todo.disk_bytes < 21e9 and todo.memory_bytes < 4e9
    assert todo.layout.precision["attention"] == todo.layout.precision["lm_head"] == "fp8"


# -- disk --------------------------------------------------------------------------------------------------------------


def test_the_disk_holds_the_blobs_once(compiled, machine, checkpoint, tmp_path, monkeypatch):
    """Where a file system can give parts of a file back: the blobs are empty when the artifact is written."""
    if not platform.can_punch_holes(tmp_path):
        pytest.skip("this file system keeps every block of a file")
    made = recipe(tmp_path, checkpoint, [CPU, "sm_90a"])
    todo = planner.plan(made)
    left: list[int] = []
    written = builder.write_artifact

    def watched(path: Path, entries: Any, *rest: Any) -> Any:
        blobs = [source.path for _, source in entries if not isinstance(source, bytes | Path)]
        assert len(blobs) == 2 and all(blob.stat().st_blocks for blob in blobs)
        found = written(path, entries, *rest)
        left.extend(blob.stat().st_blocks * 512 for blob in blobs)
        return found

    monkeypatch.setattr(builder, "write_artifact", watched)
    whole = build(made, output=tmp_path)
    assert left == [0, 0]
    with open_artifact(whole) as artifact:
        assert not artifact.verify()
    monkeypatch.setattr(platform, "free_disk", lambda folder: todo.disk_bytes)
    build(made, output=tmp_path, force=True)
    for keep, punched in ((True, True), (False, False)):
        monkeypatch.setattr(platform, "can_punch_holes", lambda folder, punched=punched: punched)
        with pytest.raises(UserError, match="of disk, .* are free"):
            build(made, output=tmp_path, force=True, keep_work=keep)


# -- this machine ------------------------------------------------------------------------------------------------------


def test_the_doctor_tells_what_a_gpu_runs(machine, monkeypatch):
    from mkpack import doctor

    monkeypatch.setattr(platform, "gpus", lambda: [Gpu("NVIDIA H200", "9.0", 143 << 30, "580.65")])
    row = doctor._gpu()
    assert (row.state, row.fix) == ("ok", "")
    assert row.found == "NVIDIA H200 (sm_90, 153.5 GB), driver 580.65 for CUDA 13.0; first: 132 SMs, runs sm_90a"
    machine(CudaDriver("12.4", (CudaDevice("NVIDIA H100 PCIe", "9.0", 114),)))
    row = doctor._gpu()
    assert row.state == "warn" and row.found.endswith("first: 114 SMs, runs no target of this version")
    assert "sm_90a is compiled for 132 multiprocessors" in row.fix
    machine(None)
    assert doctor._gpu().state == "missing" and "none that CUDA shows this process" in doctor._gpu().found
    monkeypatch.setattr(platform, "gpus", lambda: [])
    assert doctor._gpu().found == "none by nvidia-smi"


def test_what_the_doctor_asks_is_what_the_loader_asks(machine):
    assert compat.gpu_targets() == ["sm_90a"]
    machine(CudaDriver("13.0", (CudaDevice("NVIDIA B200", "10.0", 148),)))
    assert compat.gpu_targets() == ["sm_100a"]
    machine(None)
    assert compat.gpu_targets() == []
