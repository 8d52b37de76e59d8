"""Makes what the GPU suite needs on another machine, one with a GPU but without a network: the demo's artifact in
pieces, kernels of the small models, the program that holds a GPU.

    python tests/gpu/prebuild.py FOLDER
    python -m pytest tests/gpu --prebuilt FOLDER      # there

Needs nvcc and the packages of `make demo`. The kernels are those of the sources as they are now.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]

import holder  # noqa: E402
import pieces  # noqa: E402
from models import SMALL, Kernels  # noqa: E402

from mkpack.artifact import extract, open_artifact  # noqa: E402


def build_artifact(work: Path, target: str) -> Path:
    """The demo's artifact for the GPU and the given CPU target, unpacked."""
    recipe = ROOT / "recipes" / "smollm2-moe"
    text = (recipe / "gpu.yaml").read_text()
    assert "targets: [native, sm_90a]" in text
    (work / "recipe.yaml").write_text(text.replace("[native, sm_90a]", f"[{target}, sm_90a]"))
    for command in (
        [recipe / "make_checkpoint.py", work / "checkpoint"],
        ["-m", "mkpack", "build", work / "recipe.yaml", "--output", work / "demo.mkpack"],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT)
    extract(work / "demo.mkpack", work / "demo")
    return work / "demo"


def make_pieces(demo: Path, gguf: Path | None, folder: Path) -> None:
    if gguf is None:
        sys.path.insert(0, str(ROOT / "recipes" / "smollm2-moe"))
        from make_checkpoint import find_gguf

        gguf = find_gguf()
    pieces.split(demo, gguf, folder)
    with open_artifact(demo) as artifact:
        blobs = [entry.path for entry in artifact.manifest.weights]
    for path in blobs:
        (demo / path).unlink()
    shutil.rmtree(folder / "artifact", ignore_errors=True)
    demo.rename(folder / "artifact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the demo's GGUF file, by default that of the installed package")
    parser.add_argument("--cpu", default="x86-64-v3", help="the other machine's CPU target")
    parser.add_argument("--kernels", action="store_true", help="only those of the small models; leave the artifact")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        if not args.kernels:
            make_pieces(build_artifact(Path(work), args.cpu), args.gguf, folder)
        shutil.rmtree(folder / "kernels", ignore_errors=True)
        Kernels(Path(work) / "kernels", None, emulated=False).keep(SMALL, folder / "kernels")
    holder.compile(folder / "holder")
    for path in sorted(folder.iterdir()):
        size = sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file())
        print(f"{path}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
