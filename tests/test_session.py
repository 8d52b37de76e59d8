"""run and conversations, against a model that is played: what is asked of it, and what is shown."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import played
import pytest
from patience import PATIENCE_S
from played import FakeModel, process, standard_input

from mkpack import cli

NO_MORE = {"trust_kernel": None, "rebuild_kernel": False, "ranks": False, "world": None}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    played.install(monkeypatch)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return played.caller(monkeypatch, capsys)


# -- run -------------------------------------------------------------------------------------------------------------


def test_run_streams_the_answer(call: Any) -> None:
    assert call("run", "a.mkpack", "--prompt", "Hi") == (0, "one two é \n", "")
    load, chat, unload = FakeModel.calls
    assert load == ("load", "a.mkpack", {"target": None, "threads": None, "context": None, "verify": True, **NO_MORE})
    assert chat == ("chat", [("user", "Hi")], {})
    assert unload == ("unload",)


def test_run_passes_what_was_given_and_nothing_else(call: Any) -> None:
    flags = (
        "--system Short --target cpu --threads 2 --ranks --context 64 --no-verify --max-new-tokens 5 --temperature 0.5"
    )
    flags += " --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 7"
    assert call("run", "a.mkpack", "-p", "Hi", *flags.split())[0] == 0
    given = {"target": "cpu", "threads": 2, "context": 64, "verify": False}
    assert FakeModel.calls[0] == ("load", "a.mkpack", given | NO_MORE | {"ranks": True})
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
        (["-p", ""], b"", "--prompt: the prompt is empty; give --prompt TEXT or --prompt-file FILE, pipe"),
        (["--prompt-file", "absent.txt"], b"", "--prompt-file absent.txt: No such file or directory"),
        ([], b"", "standard input: the prompt is empty; give --prompt TEXT"),
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
        monkeypatch.setattr(sys, "stdin", standard_input(b"", terminal=True))
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
