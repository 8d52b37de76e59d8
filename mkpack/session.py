"""`mkpack run`: where the prompt comes from, how the answer is shown, and the conversation on a terminal."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack.errors import UserError, unreadable, visible

if TYPE_CHECKING:
    from mkpack.generation import Generation, Result
    from mkpack.model import Model

_HELP = "/exit (or Ctrl-D) leaves, /reset forgets the conversation, /stats tells the speed of the last answer"
_WAYS = "give --prompt TEXT or --prompt-file FILE, pipe a text in, or run it on a terminal to talk"
_STOPS = {
    "stop": "stop token",
    "length": "max_new_tokens reached, or the context is full",
    "cancelled": "stopped by you",
}


@dataclass
class Options:
    """What every answer of one `mkpack run` shares. sampling: only what the user gave; the rest is the artifact's."""

    raw: bool = False
    system: str | None = None
    stats: bool = False
    json: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


def sampling(max_new_tokens: int | None, seed: int | None, **given: Any) -> dict[str, Any]:
    """What of it is not None. Raises UserError naming every value that is out of range, before anything is loaded."""
    from mkpack.text import Sampling, checked_sampling

    checked_sampling(Sampling(), given)
    everything = {"max_new_tokens": max_new_tokens, "seed": seed, **given}
    return {name: value for name, value in everything.items() if value is not None}


def find_prompt(prompt: str | None, prompt_file: str | None) -> str | None:
    """The prompt: --prompt, else --prompt-file ("-" is standard input), else standard input when it is no terminal.

    None means a conversation on the terminal. One newline at the end of a file is not part of the prompt. Raises
    UserError when both options are given, and when the file cannot be read, is not UTF-8 or holds nothing.
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("both --prompt and --prompt-file are given; use one of them")
    if prompt is not None:
        return _not_empty(prompt, "--prompt")
    if prompt_file is not None and prompt_file != "-":
        try:
            data = Path(prompt_file).read_bytes()
        except OSError as error:
            raise UserError(f"--prompt-file {prompt_file}: {unreadable(error)}") from error
        return _from_bytes(data, f"--prompt-file {prompt_file}")
    if sys.stdin is None:  # closed by whoever started this process
        raise UserError(f"no prompt: standard input is closed; {_WAYS}")
    if prompt_file is None and sys.stdin.isatty():
        return None
    return _from_bytes(sys.stdin.buffer.read(), "standard input")


def _from_bytes(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {unreadable(error)}") from error
    return _not_empty(text.removesuffix("\n"), where)


def _not_empty(text: str, where: str) -> str:
    if not text:
        raise UserError(f"{where}: the prompt is empty; {_WAYS}")
    return text


def answer(model: Model, prompt: str, options: Options) -> None:
    """One answer on standard output: streamed, or with options.json one JSON object at the end."""
    generation = _start(model, [*_system(options), {"role": "user", "content": prompt}], options)
    pieces: list[str] = []
    try:
        if options.json:
            pieces.extend(generation)
            print(json.dumps(_summary(_ended(generation), "".join(pieces)), ensure_ascii=False), flush=True)
        else:
            _show(generation, pieces)
    finally:
        if options.stats and generation.result is not None:
            print(stats(model, generation.result), file=sys.stderr)


def converse(model: Model, options: Options) -> None:
    """A conversation on the terminal, until Ctrl-D or /exit. Ctrl-C stops an answer and keeps what it said so far."""
    if options.json:
        raise UserError("--json needs a prompt: give --prompt, --prompt-file or standard input")
    model.require_text()
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    print(_HELP)
    history = _system(options)
    last: Result | None = None
    while (line := _read_line()) is not None:
        command = line.strip()
        if not command:
            continue
        if command == "/exit":
            return
        if command == "/reset":
            history = _system(options)
        elif command == "/stats":
            print(stats(model, last) if last else "no answer yet")
        elif command.startswith("/"):
            print(_HELP)
        else:
            turn = [*([] if options.raw else history), {"role": "user", "content": line}]
            pieces: list[str] = []
            try:
                generation = _start(model, turn, options)
                with suppress(KeyboardInterrupt):
                    _show(generation, pieces)
            except UserError as error:
                print(f"mkpack: {error}\n/reset starts a new conversation", file=sys.stderr)
                continue
            history = [*turn, {"role": "assistant", "content": "".join(pieces)}]
            last = generation.result
            if options.stats and last:
                print(stats(model, last), file=sys.stderr)


def _read_line() -> str | None:
    """The next line the user types; None at the end of input. Ctrl-C drops what was typed so far."""
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}")


def _system(options: Options) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system is not None else []


def _start(model: Model, messages: list[dict[str, str]], options: Options) -> Generation[str]:
    if options.raw:
        return model.generate(messages[-1]["content"], raw=True, **options.sampling)
    return model.chat(messages, **options.sampling)


def _show(generation: Generation[str], pieces: list[str]) -> None:
    """Writes text as it comes, also into `pieces`, which holds what was said when Ctrl-C ends it early."""
    ended, terminal = False, sys.stdout.isatty()
    try:
        for piece in generation:
            pieces.append(piece)
            sys.stdout.write(visible(piece) if terminal else piece)
            sys.stdout.flush()
        ended = True
    finally:
        generation.close()
        if pieces or ended:
            print(flush=True)


def _ended(generation: Generation[str]) -> Result:
    assert generation.result is not None, "a generation that ended without an error has a result"
    return generation.result


def _summary(result: Result, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": list(result.tokens),
        "num_prompt_tokens": result.num_prompt_tokens,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "timings": {"prefill_s": result.prefill_s, "decode_s": result.decode_s},
    }


def stats(model: Model, result: Result) -> str:
    """Tokens, time a token, and beside it the time that reading a token's weights and cache takes at least."""
    later = result.num_new_tokens - 1  # the first new token is the prefill's
    lines = [f"prompt: {_speed(result.num_prompt_tokens, result.prefill_s)}"]
    lines.append(
        f"new:    {result.num_new_tokens} tokens" + (f", then {_speed(later, result.decode_s)}" if later else "")
    )
    bandwidth = model.read_bandwidth()
    middle = result.num_cached_tokens + result.num_prompt_tokens + result.num_new_tokens // 2
    nbytes = model.bytes_per_step(position=middle)
    bound = nbytes / bandwidth
    reached = f", {bound / (result.decode_s / later):.0%} of it reached" if later and result.decode_s else ""
    lines.append(
        f"bound:  {bound * 1e3:.2f} ms/token ({nbytes / 1e6:.1f} MB a token at {bandwidth / 1e9:.1f} GB/s){reached}"
    )
    return "\n".join([*lines, f"stop:   {_STOPS.get(result.stop_reason, result.stop_reason)}"])


def _speed(tokens: int, seconds: float) -> str:
    if not tokens or not seconds:
        return f"{tokens} tokens"
    return f"{tokens} tokens in {seconds:.3f} s, {seconds / tokens * 1e3:.2f} ms/token, {tokens / seconds:.1f} tokens/s"
