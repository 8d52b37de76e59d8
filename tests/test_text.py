"""mkpack/text.py against tokenizers' own decode and transformers' apply_chat_template."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mkpack.errors import UserError
from mkpack.text import Sampling, Text, checked_sampling

CORPUS = [
    "Hello world, the capital of France is Paris.",
    "naïve café 日本語 😀👩‍👩‍👧 résumé " * 3,
    "a  b   c\n\n\tx = 1",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think it over>", normalized=False)])
    return tokenizer


@cache
def sentencepiece(decoder: str = "replace") -> Tokenizer:
    """A Llama-2-like tokenizer: ▁ for spaces, one in front, byte tokens for what the vocabulary lacks."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_corpus = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trained.train_from_iterator(
        ascii_corpus, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, [tuple(m) for m in model["merges"]], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(SPECIAL)
    if decoder == "replace":
        tokenizer.normalizer = trained.normalizer
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


KINDS = {"byte-level": byte_level, "replace": sentencepiece, "metaspace": lambda: sentencepiece("metaspace")}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make(tokenizer: Tokenizer, tokenizer_config: dict | None = None, **files: object) -> Text:
    content = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config or CONFIG).encode(),
    }
    for name, value in files.items():
        content[f"{name}.json"] = json.dumps(value).encode()
    return Text(content)


@cache
def text_of(kind: str) -> Text:
    return make(KINDS[kind]())


# --- streaming ---------------------------------------------------------------------------------------------------

EMOJI = st.sampled_from(
    ["😀", "👩‍👩‍👧", "🇫🇷", "é", "e\u0301", "日本", "\ufffd", " ", "  ", "\n", "▁", "Ġ", "word ", "\0", "<0xE2>"]
)
UNICODE = st.lists(st.one_of(st.text(max_size=8), EMOJI), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=UNICODE)
def test_stream_joined_equals_the_whole_decode(kind, text):
    side = text_of(kind)
    ids = side.tokenizer.encode(text).ids
    decoder = side.stream()
    pieces = [decoder.push(i) for i in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + decoder.finish() == side.tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_stream_of_any_byte_level_tokens_equals_the_whole_decode(data):
    side = text_of("byte-level")
    ids = data.draw(st.lists(st.integers(0, side.tokenizer.get_vocab_size() + 3), max_size=40))
    assert side.decode(ids) == side.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["replace", "metaspace"])
@given(data=st.binary(max_size=24))
def test_byte_tokens_decode_as_their_bytes(kind, data):
    """Valid runs equal tokenizers; of an invalid one tokenizers drops the valid characters too, the stream not."""
    side = text_of(kind)
    ids = [side.tokenizer.token_to_id("a"), *(side.tokenizer.token_to_id(f"<0x{b:02X}>") for b in data)]
    expected = "a" + data.decode("utf-8", "replace")
    assert side.decode(ids) == expected
    if "\ufffd" not in expected:
        assert side.tokenizer.decode(ids) == expected


def test_a_character_appears_with_its_last_byte():
    side = text_of("replace")
    decoder = side.stream()
    assert [decoder.push(side.tokenizer.token_to_id(f"<0x{b:02X}>")) for b in "😀".encode()] == ["", "", "", "😀"]
    assert decoder.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end_only():
    side = text_of("replace")
    decoder = side.stream()
    assert [decoder.push(side.tokenizer.token_to_id(f"<0x{b:02X}>")) for b in "😀".encode()[:3]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("kind", ["replace", "metaspace"])
def test_leading_space_is_dropped_for_a_text_and_kept_for_a_continuation(kind):
    side = text_of(kind)
    ids = side.tokenizer.encode("the capital", add_special_tokens=False).ids
    for continues, expected in ((False, "the capital"), (True, " the capital")):
        decoder = side.stream(continues=continues)
        assert "".join(map(decoder.push, ids)) == expected


def test_special_tokens_are_skipped_and_other_added_tokens_shown():
    side = text_of("byte-level")
    ids = side.tokenizer.encode("<|im_start|>Hi<think it over>there<|im_end|>").ids
    assert side.decode(ids) == "Hi<think it over>there"


def test_a_decoder_that_needs_the_whole_text_is_refused_by_name():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="WordPiece"):
        make(tokenizer).stream()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])
    with pytest.raises(UserError, match="ByteFallback"):
        make(tokenizer).stream()


# --- plain prompts -----------------------------------------------------------------------------------------------


def test_bos_once_as_the_post_processor_gives_it():
    side = text_of("replace")
    bos = side.tokenizer.token_to_id("<s>")
    plain = side.tokenizer.encode("Hello", add_special_tokens=False).ids
    assert side.encode_raw("Hello") == [bos, *plain]
    assert side.encode_raw("<s>Hello") == side.tokenizer.encode("<s>Hello", add_special_tokens=False).ids
    assert side.encode_raw("<s>Hello")[:2].count(bos) == 1
    assert text_of("byte-level").encode_raw("") == []


@pytest.mark.parametrize("kind", ["byte-level", "replace"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_token_of_the_config_changes_nothing(kind, add_bos, tmp_path):
    config = {**CONFIG, "add_bos_token": add_bos}
    side = make(KINDS[kind](), config)
    oracle = load_oracle(side, tmp_path)
    assert side.encode_raw("Hello world") == oracle("Hello world")["input_ids"]


def test_truncation_and_padding_of_tokenizer_json_are_ignored():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    assert make(tokenizer).encode_raw("Hello world, Paris") == byte_level().encode("Hello world, Paris").ids


def test_a_prompt_that_is_not_unicode_is_refused():
    with pytest.raises(UserError, match="not valid UTF-8"):
        text_of("byte-level").encode_raw("abc\udcff")


# --- chat --------------------------------------------------------------------------------------------------------

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""

TOOLS = """{%- set ns = namespace(n=0) %}
{%- for message in messages %}
{%- if message.role == 'skip' %}{% continue %}{% endif %}
{%- set ns.n = ns.n + 1 %}
{{ message | tojson }}|{{ message.extra | default({'a': [1, 2]}) | tojson(indent=2) }}
{%- if tools %}never{% endif %}
{%- if message.thinking is defined %}{{ raise_exception('no ' + message.role) }}{% endif %}
{%- endfor %}
{{ ns.n }} {{ unk_token }} {{ strftime_now('%%') }}"""

CHATS = [
    [{"role": "user", "content": "Hello <world> & 'you' 😀"}],
    [
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Yes?\n"},
        {"role": "user", "content": "naïve"},
    ],
    [{"role": "user", "content": "x", "name": None, "extra": {"é": "</s>"}}],
]


def load_oracle(side: Text, tmp_path):
    from transformers import AutoTokenizer

    for name, content in side._files.items():
        (tmp_path / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["byte-level", "replace"])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, TOOLS], ids=["chatml", "llama2", "tojson"])
@pytest.mark.parametrize("where", ["config", "file", "named"])
def test_chat_equals_transformers(kind, template, where, tmp_path):
    config = dict(CONFIG)
    if where == "config":
        config["chat_template"] = template
    elif where == "named":
        config["chat_template"] = [
            {"name": "tool_use", "template": "other"},
            {"name": "default", "template": template},
        ]
    side = make(KINDS[kind](), config)
    if where == "file":
        side = Text({**side._files, "chat_template.jinja": template.encode()})
    oracle = load_oracle(side, tmp_path)
    assert side.has_chat_template
    for messages in CHATS:
        for prompt in (True, False):
            expected = oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert side.render_chat(messages, prompt) == expected
            ids = oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert side.encode_chat(messages, prompt) == ids


def test_a_template_that_writes_bos_gives_one():
    side = make(sentencepiece(), {**CONFIG, "chat_template": LLAMA2})
    ids = side.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(side.tokenizer.token_to_id("<s>")) == 1


def chat_error(template: object, messages: list | None = None) -> str:
    side = make(byte_level(), {**CONFIG, "chat_template": template})
    with pytest.raises(UserError) as caught:
        side.encode_chat(messages if messages is not None else CHATS[0])
    return str(caught.value)


def test_no_template_says_raw():
    assert not text_of("byte-level").has_chat_template
    with pytest.raises(UserError, match="no chat template; use --raw"):
        text_of("byte-level").encode_chat(CHATS[0])


def test_template_errors_name_the_line():
    message = chat_error("{{ bos_token }}\n{% for m in messages %}\n{{ m.content \n{% endfor %}")
    assert "chat template is wrong: line " in message and "--raw" in message
    message = chat_error("a\n\n{{ messages[0].nothing.more }}")
    assert "line 3: " in message and "nothing" in message
    assert "line 3: Roles must alternate" in chat_error(LLAMA2, [{"role": "assistant", "content": "x"}])
    assert "line 1: " in chat_error("{{ messages + 1 }}")


def test_template_cannot_leave_the_sandbox():
    for escape in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__.x }}"):
        assert "unsafe" in chat_error(escape)


def test_named_templates_without_default():
    message = chat_error([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}])
    assert "'a', 'b'" in message and '"default"' in message
    side = make(byte_level(), {**CONFIG, "chat_template": [{"name": "only", "template": "x"}]})
    assert side.render_chat(CHATS[0]) == "x"


@pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "x"}], [{"role": 1}]])
def test_messages_that_are_none_are_refused(messages):
    assert "at least one" in chat_error(CHATML, messages)


# --- stop tokens and defaults ------------------------------------------------------------------------------------


def test_stop_tokens_are_the_union_of_all_sources():
    end = byte_level().token_to_id("</s>")
    assert make(byte_level()).stop_tokens == (end,)
    side = make(byte_level(), generation_config={"eos_token_id": [7, 5]}, config={"eos_token_id": 9})
    assert side.stop_tokens == tuple(sorted({5, 7, 9, end}))
    assert make(byte_level(), {"eos_token": {"content": "<|im_end|>"}}).stop_tokens == (4,)
    assert make(byte_level(), {"eos_token": "not there"}, generation_config={"eos_token_id": None}).stop_tokens == ()
    side = Text({"tokenizer.json": byte_level().to_str().encode(), "special_tokens_map.json": b'{"eos_token": "</s>"}'})
    assert side.stop_tokens == (end,)
    with pytest.raises(UserError, match="generation_config.json: eos_token_id holds 'x'"):
        make(byte_level(), generation_config={"eos_token_id": "x"}).stop_tokens  # noqa: B018


def test_defaults_come_from_generation_config():
    assert make(byte_level()).defaults == Sampling()
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": None, "repetition_penalty": 1.1}
    assert make(byte_level(), generation_config=config).defaults == Sampling(0.0, 20, 0.9, 0.0, 1.1)
    side = make(byte_level(), generation_config={**config, "do_sample": True})
    assert side.defaults == Sampling(0.6, 20, 0.9, 0.0, 1.1)
    assert make(byte_level(), generation_config={"do_sample": True}).defaults.temperature == 1.0


def test_bad_sampling_values_are_listed_together():
    with pytest.raises(UserError) as caught:
        checked_sampling(
            Sampling(top_p=5.0),
            {"temperature": float("nan"), "top_k": 1.5, "min_p": True, "repetition_penalty": None},
            ["seed is -1"],
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "bad sampling values: 5 problems"
    assert [line.split()[1] for line in lines[1:]] == ["temperature", "top_k", "top_p", "min_p", "seed"]
    assert "generation_config.json" in lines[3] and "generation_config.json" not in lines[1]
    assert checked_sampling(Sampling(), {"temperature": 1, "top_k": None}) == Sampling(temperature=1)


# --- damaged files -----------------------------------------------------------------------------------------------


def test_damaged_files_are_named():
    with pytest.raises(UserError, match="no tokenizer.json"):
        Text({})
    with pytest.raises(UserError, match="tokenizer.json cannot be read"):
        Text({"tokenizer.json": b"{}"}).encode_raw("x")
    with pytest.raises(UserError, match="tokenizer_config.json is not JSON"):
        Text({"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": b"{"}).encode_raw("x")
    with pytest.raises(UserError, match="generation_config.json holds a list"):
        make(byte_level(), generation_config=[]).defaults  # noqa: B018


def test_importing_is_cheap():
    code = (
        "import sys, mkpack.text; print([m for m in ('tokenizers', 'jinja2', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
