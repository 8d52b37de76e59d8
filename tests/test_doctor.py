import http.server
import importlib.metadata
import json
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants
from patience import PATIENCE_S

from mkpack import cli, doctor, platform


@pytest.fixture(autouse=True)
def good_machine(monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    """Everything is there; tests take things away."""
    versions = {
        "torch": "2.13.0",
        "nvidia-modelopt": "0.47.0",
        "safetensors": "0.8.0",
        "requests": "2.32",
        "ninja": "1.13",
    }
    monkeypatch.setattr(doctor, "version", lambda name: _version(versions, name))
    monkeypatch.setattr(platform, "cpu_levels", lambda: ["x86-64-v3"])
    monkeypatch.setattr(platform, "compiler", lambda: platform.Compiler(("/bin/g++",), "g++ 12.2.0"))
    monkeypatch.setattr(platform, "supports", lambda found, level: True)
    monkeypatch.setattr(platform, "gpus", lambda: [platform.Gpu("NVIDIA H200", "9.0", 143 << 30, "580.65")])
    h200 = platform.CudaDevice("NVIDIA H200", "9.0", 132)
    monkeypatch.setattr(platform, "cuda_driver", lambda: platform.CudaDriver("13.0", (h200,)))
    monkeypatch.setattr(platform, "nvcc", lambda: platform.Compiler(("/bin/nvcc",), "13.0"))
    monkeypatch.setattr(platform, "total_memory", lambda: 24 << 30)
    monkeypatch.setattr(platform, "free_disk", lambda path: 100 << 30)
    monkeypatch.setattr(platform, "glibc", lambda: "2.36")
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def _version(versions: dict[str, str], name: str) -> str:
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *values: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _row(name: str) -> doctor.Row:
    return next(row for row in doctor.diagnose().rows if row.name == name)


def test_a_good_machine(hub: str) -> None:
    diagnosis = doctor.diagnose()
    assert {row.state for row in diagnosis.rows} == {"ok"}
    assert all(ability.works for ability in diagnosis.abilities)
    assert diagnosis.exit_code == 0
    text = diagnosis.render()
    assert "NVIDIA H200 (sm_90, 153.5 GB), driver 580.65 for CUDA 13.0; first: 132 SMs, runs sm_90a" in text
    assert f"{hub} answers, with a token" in text and "hf_secret" not in text
    assert "build CPU artifacts: works here" in text


def test_no_processor_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "cpu_levels", lambda: [])
    monkeypatch.setattr(platform, "missing_features", lambda level: ["avx2", "fma"])
    diagnosis = doctor.diagnose()
    assert diagnosis.exit_code == 1
    assert "lacks avx2, fma" in diagnosis.render()
    assert "run CPU artifacts: does not work here (see CPU features)" in diagnosis.conclusions()


def test_no_compiler_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "compiler", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    diagnosis = doctor.diagnose()
    assert diagnosis.exit_code == 0
    assert "apt-get install g++" in diagnosis.render()
    assert "build CPU artifacts: does not work here (see compiler)" in diagnosis.conclusions()


@pytest.mark.parametrize(("known", "state"), [("x86-64-v3", "warn"), ("none", "missing")])
def test_an_old_compiler(monkeypatch: pytest.MonkeyPatch, known: str, state: str) -> None:
    monkeypatch.setattr(platform, "supports", lambda found, level: level == known)
    row = _row("compiler")
    assert row.state == state and "does not know -march=x86-64-v4" in row.found


def test_missing_packages_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: _version({}, name))
    row = _row("torch")
    assert (row.state, row.fix) == ("missing", 'pip install "mkpack[build]"')
    assert "(see torch, nvidia-modelopt, safetensors, requests)" in doctor.diagnose().conclusions()[1].replace(
        "ninja, ", ""
    )


def test_offline_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(doctor, "_reach", lambda url: pytest.fail("asked the network"))
    assert _row("hub").found == "switched off by HF_HUB_OFFLINE"


def test_a_hub_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    row = _row("hub")
    assert row.state == "missing" and row.found.startswith("http://127.0.0.1:9: ") and "HF_ENDPOINT" in row.fix


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        over.wait(PATIENCE_S)
        raise OSError

    monkeypatch.setattr(doctor.urllib.request, "urlopen", hang)
    monkeypatch.setattr(doctor, "_HUB_TIMEOUT_S", 0.1)
    try:
        assert "no answer in" in _row("hub").found
    finally:
        over.set()


def test_little_disk_and_memory_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "free_disk", lambda path: 1 << 30)
    monkeypatch.setattr(platform, "total_memory", lambda: 1 << 30)
    assert _row("hub cache").state == _row("memory").state == "warn"
    assert doctor.diagnose().exit_code == 0


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mkpack", "doctor", "--json"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    document = json.loads(capsys.readouterr().out)
    assert done.value.code == 0
    assert document["abilities"]["run CPU artifacts"] == {"works": True, "lacking": []}
    assert {"name": "nvcc", "state": "ok", "found": "CUDA 13.0 (/bin/nvcc)", "fix": ""} in document["rows"]


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "gpus", lambda: [])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    doctor.show(doctor.diagnose())
    out = capsys.readouterr().out
    assert "how to get it" in out and "none by nvidia-smi" in out and "run CPU artifacts: works here" in out
