"""The command line against a loader and builders that are played: what is asked of them, and what is shown."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

import mkpack
from mkpack import cli
from mkpack.errors import InternalError, UserError

ROOT = Path(__file__).parent.parent
NO_TRUST = {"trust_kernel": None, "rebuild_kernel": False}
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


class FakeGeneration:
    """Says "one two é " again and again; ends after four pieces unless the prompt asks for more."""

    def __init__(self, model: "FakeModel", prompt: str) -> None:
        self.prompt, self.said, self.result = prompt, 0, None
        self._endless = "endless" in prompt
        self._pause = 0.01 if self._endless else 0.0
        if "refuse" in prompt:
            raise UserError("this model has no chat template; use --raw to give it the prompt as it is")
        if "crash" in prompt:
            raise InternalError("a barrier was awaited for 2 s")

    def __iter__(self) -> Iterator[str]:
        while self._endless or self.said < 4:
            time.sleep(self._pause)
            piece = ("one ", "two ", "é", " ")[self.said % 4]
            self.said += 1
            yield piece
        self._end("stop")

    def _end(self, reason: str) -> None:
        self.result = types.SimpleNamespace(
            stop_reason=reason,
            tokens=tuple(range(self.said + 1)),
            num_new_tokens=self.said + 1,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=0,
            seed=7,
            prefill_s=0.5,
            decode_s=0.02 * self.said,
        )

    def close(self) -> None:
        if self.result is None:
            self._end("cancelled")


class FakeModel:
    calls: list[Any] = []

    def __init__(self, path: Path, **options: Any) -> None:
        if not path.name.endswith(".mkpack"):
            raise UserError(f"{path}: no such file or folder")
        self.calls.append(("load", path.name, options))

    def __enter__(self) -> "FakeModel":
        return self

    def __exit__(self, *error: Any) -> None:
        self.calls.append(("unload",))

    def require_text(self) -> None:
        return None

    def generate(self, prompt: str, **options: Any) -> FakeGeneration:
        self.calls.append(("generate", prompt, options))
        return FakeGeneration(self, prompt)

    def chat(self, messages: list[dict[str, str]], **options: Any) -> FakeGeneration:
        self.calls.append(("chat", [(m["role"], m["content"]) for m in messages], options))
        return FakeGeneration(self, messages[-1]["content"])

    def read_bandwidth(self) -> float:
        return 10e9

    def bytes_per_step(self, position: int) -> float:
        return 100e6 + position


class FakeReport:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def render(self) -> str:
        return f"text of {self.call}"

    def to_json(self) -> str:
        return json.dumps({"call": str(self.call)})


def fake_modules() -> dict[str, Any]:
    """Attributes of the package mkpack that the commands use."""
    return {
        "load": FakeModel,
        "build": types.SimpleNamespace(build=_build),
        "plan": types.SimpleNamespace(plan=lambda recipe: FakeReport("plan", str(recipe))),
        "bench": types.SimpleNamespace(run=lambda path, **options: FakeReport(str(path), options)),
        "trace": types.SimpleNamespace(run=lambda path, out, **options: f"{path} {out} {options}"),
        "quality": types.SimpleNamespace(compare=lambda a, b, **options: FakeReport(str(a), str(b), options)),
    }


def _build(recipe: Path, output: str | None, force: bool, keep_work: bool, console: Any, **flags: bool) -> Path:
    if not recipe.exists():
        raise UserError(f"{recipe}: no such file")
    console.print("step 1 of 1" + "".join(f", {flag}" for flag in flags if flags[flag]))
    path = Path(output) if output else recipe.with_suffix(".mkpack")
    path.write_bytes(b"12345")
    return path


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeModel.calls = []
    for name, module in fake_modules().items():
        monkeypatch.setitem(vars(mkpack), name, module)
    monkeypatch.setattr(sys, "stdin", _stdin(b""))


def _stdin(data: bytes, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    return stream


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """call(arguments, stdin=bytes) -> (exit code, standard output, standard error)."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mkpack", *arguments])
        monkeypatch.setattr(sys, "stdin", _stdin(stdin))
        with pytest.raises(SystemExit) as done:
            cli.main()
        out, err = capsys.readouterr()
        return done.value.code or 0, out, err  # type: ignore[return-value]

    return run


def process(*arguments: str, played: bool = True, **options: Any) -> "subprocess.Popen[bytes]":
    """The command line in a process of its own, with the played modules (or the real ones)."""
    play = "import test_cli, mkpack; vars(mkpack).update(test_cli.fake_modules());" if played else ""
    code = f"import sys; sys.argv[0] = 'mkpack'; {play} from mkpack.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TERM": "dumb"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, **options)


# -- help, versions and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)])
def test_help_of_every_command(call: Any, command: list[str]) -> None:
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: mkpack") and "--help" in out


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


# -- run -------------------------------------------------------------------------------------------------------------


def test_run_streams_the_answer(call: Any) -> None:
    assert call("run", "a.mkpack", "--prompt", "Hi") == (0, "one two é \n", "")
    load, chat, unload = FakeModel.calls
    assert load == ("load", "a.mkpack", {"target": None, "threads": None, "context": None, "verify": True, **NO_TRUST})
    assert chat == ("chat", [("user", "Hi")], {})
    assert unload == ("unload",)


def test_run_passes_what_was_given_and_nothing_else(call: Any) -> None:
    flags = "--system Short --target cpu --threads 2 --context 64 --no-verify --max-new-tokens 5 --temperature 0.5"
    flags += " --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 7"
    assert call("run", "a.mkpack", "-p", "Hi", *flags.split())[0] == 0
    given = {"target": "cpu", "threads": 2, "context": 64, "verify": False}
    assert FakeModel.calls[0] == ("load", "a.mkpack", given | NO_TRUST)
    messages, options = FakeModel.calls[1][1:]
    assert messages == [("system", "Short"), ("user", "Hi")]
    assert options == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 7,
    }


def test_raw_and_greedy(call: Any) -> None:
    assert call("run", "a.mkpack", "-p", "Hi", "--raw", "--greedy")[0] == 0
    assert FakeModel.calls[1] == ("generate", "Hi", {"raw": True, "temperature": 0.0})


def test_prompt_from_a_file_or_standard_input(call: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("two\nlines\n\n", encoding="utf-8")
    assert call("run", "a.mkpack", "--prompt-file", str(tmp_path / "p.txt"))[0] == 0
    assert call("run", "a.mkpack", "--prompt-file", "-", stdin="né\n".encode())[0] == 0
    assert call("run", "a.mkpack", stdin=b"piped")[0] == 0
    prompts = [c[1][0][1] for c in FakeModel.calls if c[0] == "chat"]
    assert prompts == ["two\nlines\n", "né", "piped"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        (["-p", "a", "--prompt-file", "b"], b"", "both --prompt and --prompt-file"),
        (["-p", ""], b"", "--prompt: the prompt is empty"),
        (["--prompt-file", "absent.txt"], b"", "--prompt-file absent.txt: No such file or directory"),
        ([], b"", "standard input: the prompt is empty"),
        ([], b"caf\xe9", "standard input: not UTF-8 text (byte 0xe9 at offset 3)"),
        (["-p", "a", "--greedy", "--temperature", "1"], b"", "contradict each other"),
        (["-p", "a", "--raw", "--system", "x"], b"", "--system is a message of the chat template"),
        (["-p", "a", "--top-p", "2", "--min-p", "-1"], b"", "bad sampling values: 2 problems"),
    ],
)
def test_refused_before_anything_is_loaded(call: Any, arguments: list[str], stdin: bytes, text: str) -> None:
    code, out, err = call("run", "a.mkpack", *arguments, stdin=stdin)
    assert (code, out) == (2, "") and text in err
    assert FakeModel.calls == []


def test_a_model_without_chat_template_says_raw(call: Any) -> None:
    code, out, err = call("run", "a.mkpack", "-p", "refuse")
    assert (code, out) == (2, "") and "use --raw" in err
    assert FakeModel.calls[-1] == ("unload",)


def test_stats_stand_beside_the_bound(call: Any) -> None:
    code, out, err = call("run", "a.mkpack", "-p", "12345", "--stats")
    assert (code, out) == (0, "one two é \n")
    assert "prompt: 5 tokens in 0.500 s, 100.00 ms/token, 10.0 tokens/s" in err
    assert "new:    5 tokens, then 4 tokens in 0.080 s, 20.00 ms/token, 50.0 tokens/s" in err
    assert "bound:  10.00 ms/token (100.0 MB a token at 10.0 GB/s), 50% of it reached" in err
    assert "stop:   stop token" in err


def test_json_is_one_object(call: Any) -> None:
    code, out, err = call("run", "a.mkpack", "-p", "12345", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "text": "one two é ",
        "tokens": [0, 1, 2, 3, 4],
        "num_prompt_tokens": 5,
        "stop_reason": "stop",
        "seed": 7,
        "timings": {"prefill_s": 0.5, "decode_s": 0.08},
    }
    assert "é" in out and out.count("\n") == 1


def test_ctrl_c_ends_cleanly() -> None:
    with process(
        "run", "a.mkpack", "-p", "endless", "--stats", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(4) == b"one "  # it came while the answer still goes on
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert out.endswith(b"\n") and b"Traceback" not in err
    assert b"stop:   stopped by you" in err


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
    assert command.returncode == 2 and err.startswith(b"mkpack: error: no prompt: give --prompt")


# -- a conversation on a terminal ------------------------------------------------------------------------------------


@pytest.fixture
def converse(call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """converse(lines, arguments) -> (exit code, standard output, standard error) on a played terminal."""

    def run(lines: list[str], *arguments: str) -> tuple[int, str, str]:
        script = iter(lines)

        def read_line(prompt: str) -> str:
            line = next(script, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", read_line)
        monkeypatch.setattr(sys, "argv", ["mkpack", "run", "a.mkpack", *arguments])
        monkeypatch.setattr(sys, "stdin", _stdin(b"", terminal=True))
        with pytest.raises(SystemExit) as done:
            cli.main()
        out, err = capsys.readouterr()
        return done.value.code or 0, out, err  # type: ignore[return-value]

    return run


def _chats() -> list[Any]:
    return [c[1] for c in FakeModel.calls if c[0] in ("chat", "generate")]


def test_turns_remember_each_other(converse: Any) -> None:
    code, out, _ = converse(["first", "", "second", "/reset", "third"], "--system", "S")
    assert code == 0 and out.count("one two é \n") == 3
    first = [("system", "S"), ("user", "first")]
    assert _chats() == [
        first,
        [*first, ("assistant", "one two é "), ("user", "second")],
        [("system", "S"), ("user", "third")],
    ]


def test_raw_turns_do_not(converse: Any) -> None:
    assert converse(["first", "second"], "--raw")[0] == 0
    assert _chats() == ["first", "second"]


def test_commands_of_a_conversation(converse: Any) -> None:
    code, out, _ = converse(["/stats", "^C", "/what", "12345", "/stats", "/exit", "not reached"])
    assert code == 0 and _chats() == [[("user", "12345")]]
    assert "no answer yet" in out and out.count("/exit (or Ctrl-D) leaves") == 3
    assert "50% of it reached" in out


def test_a_refused_turn_does_not_end_the_conversation(converse: Any) -> None:
    code, _, err = converse(["first", "refuse", "second"])
    assert code == 0 and "mkpack: this model has no chat template" in err and "/reset" in err
    assert [c[-1] for c in _chats()] == [("user", "first"), ("user", "refuse"), ("user", "second")]
    assert ("user", "refuse") not in _chats()[-1]


def test_json_needs_a_prompt(converse: Any) -> None:
    code, _, err = converse([], "--json")
    assert code == 2 and "--json needs a prompt" in err


def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    master, slave = pty.openpty()
    running = process("run", "a.mkpack", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        _until(master, b"> ")
        os.write(master, b"endless\n")
        _until(master, b"one two")
        running.send_signal(signal.SIGINT)
        _until(master, b"> ")
        os.write(master, b"/stats\n")
        assert b"stopped by you" in _until(master, b"stopped by you")
        os.write(master, b"/exit\n")
        assert running.wait(timeout=PATIENCE_S) == 0
    finally:
        running.kill()
        running.wait()
        os.close(master)


def _until(terminal: int, text: bytes) -> bytes:
    seen, end = b"", time.monotonic() + PATIENCE_S
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{text!r} did not come, only {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


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
    assert call("build", "r.yaml", "--dry-run") == (0, "text of ('plan', 'r.yaml')\n", "")
    assert json.loads(call("build", "r.yaml", "--dry-run", "--json")[1]) == {"call": "('plan', 'r.yaml')"}


def test_bench_and_eval_pass_their_options(call: Any) -> None:
    _, out, _ = call("bench", "a.mkpack", "--threads", "2", "--context", "64", "--context", "128")
    options = {"target": None, "threads": 2, "contexts": [64, 128], "prompt_tokens": None, "new_tokens": None}
    assert out == f"text of ('a.mkpack', {options})\n"
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
