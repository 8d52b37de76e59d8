"""Text to tokens and back: tokenizer, chat template, stop tokens, sampling defaults, UTF-8 streaming.

tokenizers and jinja2 are imported on first use: most commands need neither.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mkpack.errors import UserError, combine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The files a tokenizer is made of; only the first is required. Of config.json only eos_token_id is read.
FILES = (
    "tokenizer.json",
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; 1, 0 or 1 turn top_p, top_k and min_p, penalty off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def problems(self, given: Iterable[str]) -> list[str]:
        """One text for each value that is out of range; those not in `given` are told to be the artifact's."""
        rules: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (lambda x: 0 <= x < math.inf, "a number of at least 0"),
            "top_k": (lambda x: isinstance(x, int) and 0 <= x < 2**31, "a whole number of at least 0 (0 is off)"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (1 is off)"),
            "min_p": (lambda x: 0 <= x <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (lambda x: 0 < x < math.inf, "a number above 0 (1 is off)"),
        }
        found = []
        for name, (holds, expected) in rules.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
                source = "" if name in given else " in the artifact's generation_config.json"
                found.append(f"{name}{source} is {value!r}; expected {expected}")
        return found


class Text:
    """The tokenizer side of one artifact.

    files: content of the files named in FILES, absent ones left out. Raises UserError when tokenizer.json is absent,
    and when a damaged file is first needed.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise UserError("the artifact has no tokenizer.json, so it takes and gives token ids only")
        self._files = dict(files)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(self._files["tokenizer.json"])
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"tokenizer.json cannot be read: {error}; build the artifact again") from error
        # What a training run left there must not cut or fill up prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._files.get(name, b"{}"))
        except ValueError as error:
            raise UserError(f"{name} is not JSON: {error}; build the artifact again") from error
        if not isinstance(value, dict):
            raise UserError(f"{name} holds a {type(value).__name__}, expected an object; build the artifact again")
        return value

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens: {"bos_token": "<s>", ...}, those a chat template can use."""
        merged: dict[str, Any] = {**self._json("special_tokens_map.json"), **self._config}
        extra = merged.get("extra_special_tokens")
        if isinstance(extra, dict):
            merged.update(extra)
        found = {}
        for name, token in merged.items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
        return found

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a generation: those of generation_config, config and tokenizer together, ascending."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            listed = self._json(name).get("eos_token_id")
            for token in listed if isinstance(listed, list) else [] if listed is None else [listed]:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
                    raise UserError(
                        f"{name}: eos_token_id holds {token!r}, expected token ids; build the artifact again"
                    )
                found.add(token)
        eos = self.special_tokens.get("eos_token")
        named = self.tokenizer.token_to_id(eos) if eos else None
        return tuple(sorted(found if named is None else {*found, named}))

    @cached_property
    def defaults(self) -> Sampling:
        """Sampling the model's authors advise; greedy unless generation_config.json says do_sample."""
        config = self._json("generation_config.json")
        values = {f.name: config[f.name] for f in fields(Sampling) if config.get(f.name) is not None}
        if config.get("do_sample") is True:
            values.setdefault("temperature", 1.0)
        else:
            values["temperature"] = 0.0
        return Sampling(**values)

    def encode_raw(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with a BOS when the tokenizer's post-processor adds one. May be empty."""
        ids = self._encode(prompt, special=True)
        bos = self.special_tokens.get("bos_token")
        if bos and prompt.startswith(bos) and ids[:2] == [self.tokenizer.token_to_id(bos)] * 2:
            del ids[0]
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: how Python reads bytes that are not UTF-8
            raise UserError("the prompt holds bytes that are not valid UTF-8; save or type it as UTF-8") from error
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    @property
    def has_chat_template(self) -> bool:
        return "chat_template.jinja" in self._files or bool(self._config.get("chat_template"))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation [{"role": "user", "content": "..."}, ...] through the chat template.

        Raises UserError when there is no template, when it is wrong, or when it refuses the messages.
        """
        return self._encode(self.render_chat(messages, add_generation_prompt), special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that encode_chat encodes."""
        if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise UserError('a chat needs a list of messages like {"role": "user", "content": "Hello"}, at least one')
        # Templates test for absent keys, and print None when it is there.
        plain = [{key: value for key, value in m.items() if value is not None} for m in messages]
        template = self._template
        try:
            text: str = template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # whatever an expression of the template can raise
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
            where = f"line {lines[-1]}: " if lines else ""
            raise UserError(
                f"the chat template refuses the messages: {where}{error}; use --raw to go without"
            ) from error
        return text

    @cached_property
    def _template(self) -> Any:
        import jinja2

        source = self._template_source()
        try:
            return _template_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            line = source.splitlines()[error.lineno - 1].strip() if error.lineno <= source.count("\n") + 1 else ""
            raise UserError(
                f"the chat template is wrong: line {error.lineno}: {error.message}\n  {line}\nuse --raw to go without"
            ) from error

    def _template_source(self) -> str:
        if "chat_template.jinja" in self._files:
            return self._files["chat_template.jinja"].decode("utf-8", "replace")
        found = self._config.get("chat_template")
        if isinstance(found, list):
            named = {
                t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= t.keys()
            }
            if "default" in named or len(named) == 1:
                return str(named["default"] if "default" in named else next(iter(named.values())))
            raise UserError(
                f'tokenizer_config.json has chat templates {", ".join(map(repr, named))} but none named "default"; '
                "use --raw to go without"
            )
        if not isinstance(found, str) or not found:
            raise UserError("this model has no chat template; use --raw to give it the prompt as it is")
        return found

    def stream(self, *, continues: bool = False) -> Decoder:
        """A decoder for one generation. continues: the tokens go on where a text stopped, so that the space the
        tokenizer drops in front of a text's first word is kept."""
        return Decoder(self._token_bytes, continues)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of whole sequence of tokens, special ones left out; bytes that are not UTF-8 become U+FFFD."""
        decoder = self.stream()
        return "".join([*map(decoder.push, tokens), decoder.finish()])

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)


class Decoder:
    """Turns tokens into text as they come. What push and finish return, joined, is the text of all tokens."""

    def __init__(self, token_bytes: TokenBytes, continues: bool) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._strip = 0 if continues else token_bytes.strip_start

    def push(self, token: int) -> str:
        """The text that `token` completes; '' while a character lacks bytes or for a special token."""
        if token in self._token_bytes.special:
            return ""
        data = self._token_bytes.first(token) if self._first else self._token_bytes[token]
        self._first = False
        while self._strip and data:
            if not data.startswith(self._token_bytes.strip_content):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD when the tokens ended inside a character, else ''."""
        return self._utf8.decode(b"", final=True)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte -> the byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """The UTF-8 bytes of each token, read from the tokenizer's decoder and kept once computed.

    A decoder gives text, and text of half a character is already lost; bytes can be joined. Raises UserError when
    the decoder has a step that does not work on one token at a time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.strip_start = 0
        self.strip_content = b" "
        self._alphabet = _byte_level_alphabet()
        self._steps = self._read_steps()

    def _read_steps(self) -> list[dict[str, Any]]:
        decoder = self._tokenizer.decoder
        if decoder is None:
            raise UserError("tokenizer.json has no decoder, so tokens cannot be turned into text")
        pending = [json.loads(decoder.__getstate__())]
        steps: list[dict[str, Any]] = []
        fused = False
        while pending:
            step = pending.pop(0)
            kind = step["type"]
            if kind == "Sequence":
                pending = step["decoders"] + pending
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["stop"] == 0 and step["content"].isascii():
                self.strip_start, self.strip_content = step["start"], step["content"].encode()
            elif not fused and (
                kind in ("ByteLevel", "ByteFallback", "Metaspace", "Strip")
                or (kind == "Replace" and "String" in step["pattern"])
            ):
                steps.append(step)
            else:
                raise UserError(f"tokenizer.json: the decoder step {json.dumps(step)} is not supported")
        return steps

    def __missing__(self, token: int) -> bytes:
        self[token] = self._decode(token, first=False)
        return self[token]

    def first(self, token: int) -> bytes:
        """Bytes of a token that begins a text."""
        return self._decode(token, first=True)

    def _decode(self, token: int, *, first: bool) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:  # ids that only pad the vocabulary
            return b""
        for step in self._steps:
            match step["type"]:
                case "Replace":
                    text = text.replace(step["pattern"]["String"], step["content"])
                case "Metaspace":
                    dropped = first and step["prepend_scheme"] != "never"
                    text = text.replace(step["replacement"], "" if dropped else " ")
                case "Strip":
                    text = _strip(text, step["content"], step["start"], step["stop"])
                case "ByteFallback":
                    if found := _BYTE_TOKEN.fullmatch(text):
                        return bytes([int(found[1], 16)])
                case "ByteLevel":
                    # A character outside the alphabet: an added token, whose text is what it means.
                    known = all(c in self._alphabet for c in text)
                    return bytes(self._alphabet[c] for c in text) if known else text.encode()
        return text.encode()


def _strip(text: str, content: str, start: int, stop: int) -> str:
    left = len(text) - len(text.lstrip(content))
    right = len(text) - len(text.rstrip(content))
    return text[min(left, start) : len(text) - min(right, stop)]


def _template_environment() -> Any:
    """jinja2 as chat templates expect it: sandboxed, with the names that transformers gives them."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks the model's own words for training; here only what is inside."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own escapes for HTML, which would change what the model reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def checked_sampling(defaults: Sampling, given: Mapping[str, Any], extra: Iterable[str] = ()) -> Sampling:
    """`defaults` with the values of `given` that are not None; every problem in one UserError, `extra` included."""
    values = {name: value for name, value in given.items() if value is not None}
    sampling = Sampling(**{f.name: values.get(f.name, getattr(defaults, f.name)) for f in fields(Sampling)})
    problems = [*sampling.problems(values), *extra]
    if problems:
        raise combine("bad sampling values", problems)
    return sampling
