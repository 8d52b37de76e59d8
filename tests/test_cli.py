"""The command line against a loader and builders that are played: help, errors, broken pipes, what is asked of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import played
import pytest
from patience import PATIENCE_S
from played import ROOT, process

import mkpack

COMMANDS = [
    "build",
    "run",
    "inspect",
    "verify",
    "sign",
    "trust",
    "push",
    "pull",
    "unpack",
    "graph",
    "bench",
    "trace",
    "eval",
    "doctor",
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    played.install(monkeypatch)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return played.caller(monkeypatch, capsys)


# -- help, versions and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)])
def test_help_of_every_command(call: Any, command: list[str]) -> None:
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: mkpack") and "--help" in out


def test_the_list_of_commands_cuts_nothing_off(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in call("--help")[1].replace("COMMAND [ARGS]...", "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['mkpack', 'run', '--help']\nfrom mkpack.cli import main\ntry: main()\n"
        "except SystemExit: pass\nprint(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    # typer itself brings pydantic.
    heavy = {
        "torch",
        "modelopt",
        "transformers",
        "numpy",
        "rich",
        "huggingface_hub",
        "tokenizers",
        "jinja2",
        "filelock",
    }
    assert not heavy & set(done.stderr.split())
    assert "--max-new-tokens" in done.stdout


def test_help_is_fast() -> None:
    def seconds(running: "subprocess.Popen[bytes]") -> float:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        assert running.returncode == 0
        return used.ru_utime + used.ru_stime

    # Processor time is what a user waits on an idle core: 0.17 s where the imports that it cannot do without take
    # 0.085 s. Slow machines stretch both, busy neighbours now one and now the other, hence several tries.
    least = [sys.executable, "-c", "import typer, pydantic"]
    assert any(
        seconds(process("run", "--help", played=False, stdout=subprocess.DEVNULL))
        < 3.5 * seconds(subprocess.Popen(least))
        for _ in range(10)
    )


def test_version(call: Any) -> None:
    assert call("--version") == (0, f"mkpack {mkpack.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nothing", "--prompt", "x"),
        ("inspect", "nothing"),
        ("verify", "nothing"),
        ("unpack", "nothing", "folder"),
        ("build", "nothing"),
    ],
)
def test_an_unknown_file_is_one_line_and_exit_2(call: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mkpack: error: nothing: no such file") and err.count("\n") == 1


def test_wrong_usage_is_exit_2(call: Any) -> None:
    code, out, err = call("run", "a.mkpack", "--max-new-tokens", "0")
    assert (code, out) == (2, "") and "--max-new-tokens" in err and "Traceback" not in err


def test_an_internal_error_is_exit_1(call: Any) -> None:
    code, _, err = call("run", "a.mkpack", "-p", "crash")
    assert (code, err) == (1, "mkpack: internal error: a barrier was awaited for 2 s\n")


# -- standard input and output that are closed or full ----------------------------------------------------------------


def test_a_closed_pipe_is_quiet() -> None:
    with process("run", "a.mkpack", "-p", "endless", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(4) == b"one "
        running.stdout.close()
        assert running.wait(timeout=PATIENCE_S) == 1
        assert running.stderr.read() == b""


def test_a_pipe_closed_before_the_last_flush_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    running = process("--help", played=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, err) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        running = process("--help", played=False, stdout=full, stderr=subprocess.PIPE)
        _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 1
    assert err == b"mkpack: error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", [["--version"], ["run", "a.mkpack", "-p", "hi"]])
def test_a_closed_standard_output_is_no_crash(arguments: list[str]) -> None:
    command = process(*arguments, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0 and err == b""


def test_a_closed_standard_input_is_no_prompt() -> None:
    command = process("run", "a.mkpack", stderr=subprocess.PIPE, preexec_fn=lambda: os.close(0))
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 2 and err.startswith(
        b"mkpack: error: no prompt: standard input is closed; give --prompt"
    )


# -- the other commands ----------------------------------------------------------------------------------------------


def test_build(call: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\n")
    code, out, err = call("build", str(recipe))
    assert (code, out) == (0, f"{tmp_path / 'r.mkpack'}\n") and "step 1 of 1" in err
    code, out, _ = call("build", str(recipe), "--output", str(tmp_path / "o.mkpack"), "--json")
    assert json.loads(out) == {"artifact": str(tmp_path / "o.mkpack"), "bytes": 5}


def test_a_folder_that_is_not_there_is_no_file_name(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: a\nsource: {folder: none}\n")
    command = process("build", str(recipe), "-o", f"{tmp_path}/new/", played=False, stderr=subprocess.PIPE)
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 2 and b"/new/: no such folder; make it first" in err
    assert not (tmp_path / "new").exists()


def test_dry_run_builds_nothing(call: Any, tmp_path: Path) -> None:
    assert call("build", "r.yaml", "--dry-run") == (0, "text of ('plan', 'r.yaml', None)\n", "")
    assert json.loads(call("build", "r.yaml", "--dry-run", "--json")[1]) == {"call": "('plan', 'r.yaml', None)"}
    assert call("build", "r.yaml", "--dry-run", "--rank", "7")[1] == "text of ('plan', 'r.yaml', 7)\n"


def test_bench_and_eval_pass_their_options(call: Any) -> None:
    _, out, _ = call("bench", "a.mkpack", "--threads", "2", "--ranks", "--context", "64", "--context", "128")
    options = {"target": None, "threads": 2, "ranks": True, "contexts": [64, 128]}
    options |= {"prompt_tokens": None, "new_tokens": None, "rank_of": None, "rank": None, "world": None}
    assert out == f"text of ('a.mkpack', {options})\n"
    assert "'rank_of': 8, 'rank': 3," in call("bench", "a.mkpack", "--rank-of", "8", "--rank", "3")[1]
    _, out, _ = call("eval", "a.mkpack", "--against", "b.mkpack", "--tokens", "9")
    assert out == "text of ('a.mkpack', 'b.mkpack', {'text': None, 'tokens': 9, 'threads': None})\n"
    assert call("eval", "a.mkpack")[0] == 2


def test_trace_and_a_build_for_it(call: Any, tmp_path: Path) -> None:
    _, out, _ = call("trace", "a.mkpack", "-o", "t.json", "--tokens", "4", "--context", "9")
    assert out == "a.mkpack t.json {'target': None, 'steps': 3, 'tokens': 4, 'context': 9}\n"
    assert call("trace", "a.mkpack")[0] == call("trace", "a.mkpack", "-o", "t.json", "--tokens", "17")[0] == 2
    recipe = tmp_path / "r.yaml"
    recipe.write_text("")
    told = [call("build", str(recipe), *flags)[2] for flags in ((), ("--trace",), ("--strict",))]
    assert ["trace" in text for text in told] == [False, True, False]
    assert ["strict" in text for text in told] == [False, False, True]
