"""A loader and builders that are played, and the command line run against them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mkpack
from mkpack import cli
from mkpack.errors import InternalError, UserError

ROOT = Path(__file__).parent.parent


class FakeGeneration:
    """Says "one two é " again and again; ends after four pieces unless the prompt asks for more."""

    def __init__(self, model: FakeModel, prompt: str) -> None:
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

    def __enter__(self) -> FakeModel:
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


def modules() -> dict[str, Any]:
    """Attributes of the package mkpack that the commands use."""
    return {
        "load": FakeModel,
        "build": types.SimpleNamespace(build=_build),
        "plan": types.SimpleNamespace(plan=lambda recipe, rank: FakeReport("plan", str(recipe), rank)),
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


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this test, mkpack has the played modules."""
    FakeModel.calls = []
    for name, module in modules().items():
        monkeypatch.setitem(vars(mkpack), name, module)
    monkeypatch.setattr(sys, "stdin", standard_input(b""))


def standard_input(data: bytes, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    return stream


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """call(arguments, stdin=bytes) -> (exit code, standard output, standard error), in this process."""

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mkpack", *arguments])
        monkeypatch.setattr(sys, "stdin", standard_input(stdin))
        with pytest.raises(SystemExit) as done:
            cli.main()
        out, err = capsys.readouterr()
        return done.value.code or 0, out, err  # type: ignore[return-value]

    return call


def process(*arguments: str, played: bool = True, **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, with the played modules (or the real ones)."""
    play = "import played, mkpack; vars(mkpack).update(played.modules());" if played else ""
    code = f"import sys; sys.argv[0] = 'mkpack'; {play} from mkpack.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TERM": "dumb"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, **options)
