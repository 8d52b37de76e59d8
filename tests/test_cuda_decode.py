"""decode_kernel, the tuned way for one token a step, on the emulated machine, at shapes just large enough for it."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import emulator
import kernels
import numpy as np
import plain_model
import pytest
from cuda_models import cuda_layout, cuda_spec
from patience import PATIENCE_S

from mkpack import abi
from mkpack.compile import VARIANTS
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec

LIMITS = Limits(context=32, tokens_per_step=16)
# model.cu that goes on to 16 KV splits at position 20 and to 32 at 21.
SOURCE = Path(__file__).parent / "cuda" / "early_splits.cu"
BF16 = cuda_spec(
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=67,
    layers=(LayerSpec(moe=True),) * 2,
    moe={"num_experts": 32, "intermediate_size": 256},
)
FP8 = cuda_spec(
    num_attention_heads=16, num_key_value_heads=2, vocab_size=67, moe={"num_experts": 12, "intermediate_size": 512}
)
# Layout and blocks: every one owns at most 16 hidden rows.
MODELS = {
    "bf16": (cuda_layout(BF16), 64),
    "fp8": (cuda_layout(FP8, attention="fp8", lm_head="fp8"), 128),
}
PROMPT = [5, 9, 11, 2, 7, 0, 3, 12, 1, 1, 8, 4, 10, 6, 5, 2, 9, 3, 11]  # its last tile is not full: it changes hands
# Without top_k and top_p, which look at the order of logits: that of near-ties depends on the last bits.
SAMPLED = {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 7}


def build(name: str) -> emulator.Emulated:
    layout, grid = MODELS[name]
    add = '#include "decode_block.cuh"\nstatic_assert(mk::kFastDecode);\n'
    return emulator.Emulated.random(layout, LIMITS, grid, source=SOURCE, add=add)


@pytest.fixture(scope="module")
def bf16():
    return build("bf16")


@pytest.fixture(scope="module")
def fp8():
    return build("fp8")


def check_tokens(built: emulator.Emulated, prompt: list[int], count: int) -> None:
    """Greedy tokens, against the plain model."""
    ((tokens, code, error),) = built.calls(("generate", [prompt], {"max_new_tokens": count}))
    assert (code, error, len(tokens)) == (abi.OK, "", count)
    wanted = plain_model.logits(built.layout.spec, built.weights.plain(), [*prompt, *tokens])
    rows = wanted[len(prompt) - 1 : -1]
    # every chosen token is as good as the best, but for bf16's error
    assert (rows.max(axis=1) - rows[range(count), tokens] < 2e-2 * np.abs(rows).max()).all()


def test_tokens_while_the_kv_splits_grow(bf16):
    check_tokens(bf16, PROMPT, 4)


def test_fp8(fp8):
    check_tokens(fp8, PROMPT[:3], 2)


def test_sparing_registers_changes_no_bit(bf16):
    sparing = dataclasses.replace(bf16, header=VARIANTS[1] + bf16.header)
    drawn = ("generate", [PROMPT[:1]], {**SAMPLED, "max_new_tokens": 3})
    assert sparing.calls(drawn) == bf16.calls(drawn)


def test_sampling_is_that_of_the_step_kernel(bf16):
    # one token a generation never leaves the step kernel, which runs what is given
    one = {**SAMPLED, "max_new_tokens": 1}
    ((tokens, code, _),) = bf16.calls(("generate", [PROMPT[:3]], {**SAMPLED, "max_new_tokens": 3}))
    assert code == abi.OK and len(set(tokens)) > 1
    alone = bf16.calls(("generate", [PROMPT[:3]], one), *(("generate", [[t]], one) for t in tokens[:-1]))
    assert [a[0][0] for a in alone] == tokens


def test_one_launch_after_the_other(bf16):
    """A stop token, a sampled generation, the end of the context: what one leaves behind, the next does not see."""
    prompt = PROMPT[:3]
    tokens: list[int] = []
    for _ in range(2):
        logits = plain_model.logits(bf16.layout.spec, bf16.weights.plain(), [*prompt, *tokens])
        tokens.append(int(logits[-1].argmax()))
    assert tokens[0] != tokens[1]
    stopped, length, _, drawn, _, again, _, last, end = bf16.calls(
        ("generate", [prompt], {"max_new_tokens": 40, "stop": [66, tokens[1]]}),
        ("length", [], {}),
        ("truncate", [0], {}),
        ("generate", [prompt], {**SAMPLED, "max_new_tokens": 2}),
        ("truncate", [0], {}),
        ("generate", [prompt], {"max_new_tokens": 2}),
        ("truncate", [0], {}),
        ("generate", [[*PROMPT, *PROMPT[:12]]], {"max_new_tokens": 40}),
        ("length", [], {}),
    )
    assert (stopped, length) == ((tokens, abi.OK, ""), 4)
    assert again == stopped and drawn[1] == abi.OK
    assert (last[1], len(last[0]), end) == (abi.OK, 2, LIMITS.context)


def test_the_host_ends_it(bf16):
    """A cancellation that comes while the resident kernel runs."""
    work = pickle.dumps((bf16.library(), bf16.layout, bf16.blob))
    done = subprocess.run([sys.executable, __file__], input=work, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    tokens, code, reason = pickle.loads(done.stdout)
    assert (code, reason) == (abi.OK, abi.STOP_CANCELLED) and 2 <= len(tokens) < 30


def _cancelled() -> None:
    """In a process of its own, which the emulator may end."""
    kernel, layout, blob = pickle.load(sys.stdin.buffer)
    with kernels.running(kernel, layout, LIMITS, [np.memmap(blob, np.uint8, "r")], wait_limit_s=1e6) as model:
        # decode_kernel is launched when the callback of the first token has returned
        timer = threading.Timer(0.5, model.lib.mk_cancel, [model.handle])
        found = model.generate(PROMPT[:3], callback=lambda _: timer.is_alive() or timer.start(), max_new_tokens=30)
        sys.stdout.buffer.write(pickle.dumps((found.tokens, found.code, found.result.stop_reason)))


if __name__ == "__main__":
    _cancelled()
