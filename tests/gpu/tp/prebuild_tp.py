"""Makes what `make gpu-test-tp` needs on another machine, one with GPUs but without nvcc: kernels for so many GPUs, the
ladder's program of exchanges, the one that takes a GPU's SMs.

    python tests/gpu/tp/prebuild_tp.py FOLDER --gpus 1 2
    python -m pytest tests/gpu/tp --prebuilt FOLDER      # there

Needs nvcc. The kernels are those of the sources as they are now."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "tests"), str(ROOT)]

from models import SMALL, Kernels, Small  # noqa: E402

from mkpack import compile, platform  # noqa: E402
from mkpack import plan as planner  # noqa: E402
from mkpack.codegen_cuda import cuda_header  # noqa: E402
from mkpack.errors import UserError  # noqa: E402
from mkpack.layout_cuda import CudaLayout, cuda_refusals  # noqa: E402

RANKS = (2, 4, 8)
# Models and the ranks that can share their heads.
MODELS = {
    "fp8, biases, windows": (2, 4),
    "Qwen3's shape, two layers": (2, 4, 8),
    "sigmoids, norms over all heads": (2, 4),
    "Muse Spark: dense layers, narrow experts, norms after, gates": (2, 4),
}
PLACED = "fp8, biases, windows"  # of them what test_processes.py runs, of two ranks
BENCH = ROOT / "recipes" / "bench" / "qwen3-30b-a3b.yaml"
# For eight ranks, a GPU each.
MUSE = [ROOT / "recipes" / "bench" / f"muse-spark-816b-a42b{kind}.yaml" for kind in ("", "-fp8")]


def on_each(tp: int, gpus: int) -> int:
    """Of so many ranks those that share a GPU."""
    return max(1, tp // gpus)


def refusals(name: str, tp: int) -> list[str]:
    """What the kernel does not take of a model with so many ranks."""
    one = SMALL[name].layout
    return cuda_refusals(one.spec, one.precision, tp, one.router_format)


def small_models(gpus: int) -> Iterator[tuple[str, Small]]:
    for name, ranks in MODELS.items():
        yield name, SMALL[name]
        for tp in ranks:
            if not refusals(name, tp):
                yield f"{name}, {tp} ranks", SMALL[name].of_ranks(tp, on_each(tp, gpus))


def bench_recipe(folder: Path, tp: int, per_device: int) -> Path:
    """The recipe of BENCH with so many ranks."""
    text = BENCH.read_text().replace("dummy: ", f"dummy: {BENCH.parent}/")
    (folder / "recipe.yaml").write_text(f"{text}parallel: {{tp: {tp}, per_device: {per_device}}}\n")
    return folder / "recipe.yaml"


def launched_recipe(folder: Path) -> Path:
    """A small artifact of two ranks that may share a GPU, random weights, no tokenizer."""
    config = json.loads((BENCH.parent / "qwen3-30b-a3b.config.json").read_text())
    config |= {"vocab_size": 1021, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 128, "intermediate_size": 512, "max_position_embeddings": 256}
    (folder / "launched.config.json").write_text(json.dumps(config))
    (folder / "launched.yaml").write_text(
        "name: launched\nsource: {dummy: launched.config.json, seed: 0}\nquantise: {experts: nvfp4}\n"
        "targets: [sm_90a]\nlimits: {context: 256}\nparallel: {tp: 2, per_device: 2}\n"
    )
    return folder / "launched.yaml"


def bench_kernel(folder: Path, recipe: Path) -> Path:
    """The kernel of a recipe for sm_90a, compiled."""
    todo = planner.plan(recipe)
    layout = todo.layouts["cuda"]
    assert isinstance(layout, CudaLayout)
    header = cuda_header(layout, todo.recipe.limits, "sm_90a")
    return compile.compile_kernels([compile.Unit("unit", "sm_90a", header)], folder)["unit"].path


def compile_programs(folder: Path) -> None:
    """`ranks` and `spinner.so` into a folder. UserError without nvcc."""
    nvcc = platform.nvcc()
    if nvcc is None:
        raise UserError("nvcc is not here, and no --prebuilt folder was given")
    ladder = ROOT / "tests" / "bench" / "ladder" / "run.py"
    subprocess.run([sys.executable, ladder, "ranks", "--build", folder], check=True, timeout=400)
    flags = ["-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
    flags += ["-gencode", "arch=compute_90a,code=sm_90a"]
    command = [*nvcc.command, *flags, str(HERE / "spinner.cu"), "-o", str(folder / "spinner.so")]
    subprocess.run(command, check=True, timeout=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], choices=(1, 2, 4, 8), help="numbers of GPUs")
    parser.add_argument("--small", action="store_true", help="without kernels of recipes/bench, minutes each")
    parser.add_argument("--processes", action="store_true", help="only what test_processes.py needs")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not args.processes:
        compile_programs(folder)
    models = [(f"{key}, {gpus} GPUs", key, model) for gpus in args.gpus for key, model in small_models(gpus)]
    wanted = {name: model for name, key, model in models if not args.processes or key == f"{PLACED}, 2 ranks"}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        shutil.rmtree(folder / "kernels", ignore_errors=True)
        Kernels(Path(work) / "kernels", None, emulated=False).keep(wanted, folder / "kernels")
        place = Path(work) / "launched"
        place.mkdir()
        shutil.copyfile(bench_kernel(place, launched_recipe(place)), folder / "launched.so")
        for tp, each in sorted({(tp, on_each(tp, gpus)) for gpus in args.gpus for tp in (1, *RANKS)}):
            if args.small or args.processes:
                break
            place = Path(work) / f"{tp}-{each}"
            place.mkdir()
            try:
                made = bench_kernel(place, bench_recipe(place, tp, each))
                shutil.copyfile(made, folder / f"qwen3-{tp}-{each}.so")
            except UserError as e:  # more ranks on a GPU than its blocks can hold
                print(f"{BENCH.name}, {tp} ranks, {each} a GPU: {e}")
        for recipe in [] if args.small or args.processes else MUSE:
            place = Path(work) / recipe.stem
            place.mkdir()
            shutil.copyfile(bench_kernel(place, recipe), folder / f"{recipe.stem}.so")
    for path in sorted(folder.iterdir()):
        size = sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file())
        print(f"{path}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
