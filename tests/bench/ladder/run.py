"""The ladder: what the parts of the CUDA kernels reach by themselves, beside their bounds. Needs a GPU.

    python tests/bench/ladder/run.py                       # all of it: compiles, runs, one table
    python tests/bench/ladder/run.py ring router           # some of it
    python tests/bench/ladder/run.py --build FOLDER        # only compiles; nvcc may be on another machine
    python tests/bench/ladder/run.py --prebuilt FOLDER

Every program checks what it computes and ends with "ok". The times of one run belong together: its bound is the read
bandwidth measured in the same process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

from mkpack import platform  # noqa: E402

PROGRAMS = ("ring", "exchange", "ranks", "products", "attention", "router")
LIMIT = 90  # seconds a program may take
FLAGS = "-std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I csrc -I csrc/cuda -I tests/bench/ladder".split()


def build(names: list[str], folder: Path) -> None:
    """Compiles them side by side."""
    nvcc = platform.nvcc()
    if nvcc is None:
        sys.exit("nvcc is not here: install the CUDA toolkit, or give the programs with --prebuilt")
    folder.mkdir(parents=True, exist_ok=True)
    running = {
        name: subprocess.Popen([*nvcc.command, *FLAGS, "-o", str(folder / name), str(HERE / f"{name}.cu")], cwd=ROOT)
        for name in names
    }
    if failed := [name for name, process in running.items() if process.wait(timeout=300)]:
        sys.exit(f"did not compile: {', '.join(failed)}")


def run(program: Path) -> tuple[bool, str]:
    """Whether it ended well, and what it said."""
    try:
        done = subprocess.run(
            [program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired as e:
        said = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        return False, f"{said}\ndid not end within {LIMIT} s"
    except OSError as e:
        return False, f"{program}: {e.strerror}"
    return done.returncode == 0 and done.stdout.rstrip().endswith("ok"), done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile into this folder and run nothing")
    parser.add_argument("--prebuilt", type=Path, metavar="FOLDER", help="programs that --build made")
    args = parser.parse_args()
    names = args.names or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if args.build:
        build(names, args.build)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.prebuilt or Path(temporary)).resolve()
        if not args.prebuilt:
            build(names, folder)
        header = f"| {'':9} | {'':46} | {'measured':>9} | {'bound':>9} | unit |      |"
        print(header, "|" + "|".join("-" * len(cell) for cell in header.split("|")[1:-1]) + "|", sep="\n")
        failed, times = [], []
        for name in names:
            start = time.monotonic()
            good, said = run(folder / name)
            times.append(f"{name} {time.monotonic() - start:.1f} s")
            rows = [line for line in said.splitlines() if line.startswith("|")]
            print("\n".join(rows), flush=True)
            if not good:
                failed.append(name)
                print("\n".join(line for line in said.splitlines() if not line.startswith("|"))[-2000:])
    print("took " + ", ".join(times))
    if failed:
        sys.exit(f"WRONG: {', '.join(failed)}")


if __name__ == "__main__":
    main()
