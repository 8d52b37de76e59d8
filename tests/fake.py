"""A fake kernel, a small C library that says what the first bytes of its weights tell it to, and artifacts of it."""

from __future__ import annotations

import functools
import json
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mkpack import platform, trust
from mkpack.artifact import write_artifact
from mkpack.manifest import FORMAT_VERSION, KernelEntry, Limits, Manifest, Producer, Source, WeightsEntry
from mkpack.spec import LayerSpec, ModelSpec, RopeSpec

CONTEXT = 64
TARGET = platform.CPU_TARGETS[-1]
CSRC = Path(__file__).parent.parent / "csrc"

# The weights are int32: a count, then what mk_generate does, over and over: a token, or one of these.
FAIL, WAIT, TOP_K, CENTIGRADE, MAX_NEW, SEED = -1, -2, -3, -4, -5, -6

FAKE = r"""
#include "abi.h"
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
struct mk_model { const int32_t* script; int32_t context, length, threads; std::atomic<int> cancelled; };
static thread_local const char* error = "";
extern "C" {
const char* mk_describe(void) { return DESCRIPTION; }
const char* mk_last_error(void) { return error; }
int32_t mk_create(const mk_options* o, mk_model** out) {
  if (o->num_ranks != 1 || (uintptr_t)o->weights[0] % 4096) { error = "bad weights"; return MK_ERR_ARGUMENT; }
  if (o->wait_limit_s == 77) { error = "no memory for the cache"; return MK_ERR_MEMORY; }
  *out = new mk_model{(const int32_t*)o->weights[0], o->context, 0, o->threads, {0}};
  return MK_OK;
}
void mk_destroy(mk_model* m) { delete m; }
int32_t mk_length(const mk_model* m) { return m->length; }
int32_t mk_truncate(mk_model* m, int32_t n) { m->length = n; return MK_OK; }
int32_t mk_step(mk_model* m, const int32_t* t, int32_t n, float* logits, int32_t rows) {
  if (n < 1 || n > 4 || m->length + n > m->context) { error = "bad step"; return MK_ERR_ARGUMENT; }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VOCAB; v++)
      logits[r * VOCAB + v] = t[n - rows + r] * 1000 + m->length + n - rows + r + v / 1024.f;
  m->length += n;
  return MK_OK;
}
int32_t mk_generate(mk_model* m, const int32_t*, int32_t n, const mk_request* q, mk_token_callback callback, void* user,
                    mk_result* r) {
  m->cancelled = 0;
  memset(r, 0, sizeof *r);
  if (m->length + n > m->context) { error = "full"; return MK_ERR_CONTEXT; }
  m->length += n;
  r->num_prompt_tokens = n;
  r->prefill_s = 0.5;
  r->decode_s = 0.25;
  for (int i = 0;; i++) {
    int32_t token = m->script[1 + i % m->script[0]];
    if (token == -1) { error = "worker 3 did not arrive"; return MK_ERR_TIMEOUT; }
    if (token == -2) { while (!m->cancelled) usleep(1000); }
    if (token == -3) token = q->top_k;
    if (token == -4) token = (int)(q->temperature * 100 + 0.5f);
    if (token == -5) token = q->max_new_tokens;
    if (token == -6) token = (int)(q->seed % 97);
    if (m->cancelled) { r->stop_reason = MK_STOP_CANCELLED; return MK_OK; }
    if (r->num_new_tokens++) m->length++;
    if (callback(user, token)) { r->stop_reason = MK_STOP_CANCELLED; return MK_OK; }
    for (int s = 0; s < q->num_stop_tokens; s++)
      if (q->stop_tokens[s] == token) { r->stop_reason = MK_STOP_TOKEN; return MK_OK; }
    if (r->num_new_tokens == q->max_new_tokens) { r->stop_reason = MK_STOP_LENGTH; return MK_OK; }
    if (m->length == m->context) { r->stop_reason = MK_STOP_CONTEXT; return MK_OK; }
  }
}
void mk_cancel(mk_model* m) { m->cancelled = 1; }
int32_t mk_read_bandwidth(mk_model* m, double* b) { *b = 1e9 * m->threads; return MK_OK; }
}
"""


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>"), AddedToken("<user>")])
    return tokenizer


TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 6
END, USER = TOKENIZER.token_to_id("<end>"), TOKENIZER.token_to_id("<user>")
CHAT = "{% for m in messages %}{{ '<user>' if m.role == 'user' }}{{ m.content }}<end>{% endfor %}"
TOKENIZER_FILES: dict[str, bytes] = {
    "tokenizer/tokenizer.json": TOKENIZER.to_str().encode(),
    "tokenizer/tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": CHAT}).encode(),
    "tokenizer/generation_config.json": json.dumps({"do_sample": True, "temperature": 0.5, "top_k": 33}).encode(),
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@functools.cache
def kernel(description: str, source: str = FAKE) -> bytes:
    """A compiled fake kernel."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "fake.cpp"), Path(folder, "fake.so")
        code.write_text(f"#define DESCRIPTION {json.dumps(description)}\n#define VOCAB {VOCAB}\n{source}")
        subprocess.run([*compiler.command, "-shared", "-fPIC", f"-I{CSRC}", "-o", str(library), str(code)], check=True)
        return library.read_bytes()


SPEC = ModelSpec(
    family="fake",
    vocab_size=VOCAB,
    hidden_size=16,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    rope=RopeSpec(inv_freq=(1.0,) * 8),
    qk_norm=False,
    qkv_bias=False,
    o_bias=False,
    layers=(LayerSpec(moe=False),),
    moe=None,
    dense_intermediate_size=16,
)
DESCRIPTION = '{"abi": 1, "model": "fake"}'


def artifact(
    folder: Path,
    script: list[int],
    *,
    name: str = "fake",
    targets: tuple[str, ...] = (TARGET,),
    described: str = DESCRIPTION,
    compiled: str | None = None,
    source: str = FAKE,
    files: dict[str, bytes] = TOKENIZER_FILES,
    weights: bytes | None = None,
    trusted: bool = True,
) -> Path:
    """Writes an artifact of the fake kernel whose weights hold `script`, as if it was built here when `trusted`."""
    blob = weights or struct.pack(f"<{len(script) + 1}i", len(script), *script).ljust(8192, b"\0")
    library = kernel(compiled or described, source)
    entries: list[tuple[str, Path | bytes]] = [("weights/rank0.bin", blob), *files.items()]
    entries += [(f"kernels/{target}.so", library) for target in targets]

    def manifest(digests):
        return Manifest(
            format_version=FORMAT_VERSION,
            minimum_runtime="0.1",
            name=name,
            license="apache-2.0",
            producer=Producer(
                mkpack="0.1.0", commit=None, dirty=None, python="3", torch=None, modelopt=None, compilers={}
            ),
            source=Source(kind="folder", repo=None, commit=None, files={}),
            recipe="name: fake\n",
            build_key="0" * 64,
            spec=SPEC,
            precision={},
            limits=Limits(context=CONTEXT, tokens_per_step=4),
            tp=1,
            kernels={
                t: KernelEntry(path=f"kernels/{t}.so", layout="cpu", description=described, compiler="g++", requires={})
                for t in targets
            },
            weights=[WeightsEntry(layout="cpu", rank=0, path="weights/rank0.bin", nbytes=len(blob))],
            sections={"cpu": []},
            tokenizer_files=list(files),
            quality=None,
            entries=digests,
        )

    path = folder / f"{name}.mkpack"
    written = write_artifact(path, entries, manifest)
    if trusted:
        trust.remember([written.entries[k.path].sha256 for k in written.kernels.values()], "built", name)
    return path


HELLO = [*ids("Héllo 😀!"), END]
