"""CUDA targets of small models, compiled by g++ for the emulated machine: the numbers of a plain model, the same bits
whatever the order in which warps run, no races, and waits that end."""

from __future__ import annotations

import dataclasses
import re

import emulator
import mistakes
import numpy as np
import plain_model
import pytest
from cuda_models import cuda_layout, muse_spec, small_spec

from mkpack import abi
from mkpack.compile import VARIANTS
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec, SwigluSpec

LIMITS = Limits(context=64, tokens_per_step=16)
TWO_LAYERS = (LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7))
MUSE = muse_spec(
    hidden_size=64,
    vocab_size=13,
    qkv_bias=True,
    o_bias=True,
    layers=(LayerSpec(moe=False, sliding_window=7), LayerSpec(moe=True, rope=False)),
    moe={"expert_bias": True},
)
SIGMOID = small_spec(
    hidden_size=64,
    vocab_size=13,
    qk_norm=True,
    qk_norm_over="projection",
    layers=TWO_LAYERS,
    moe={
        **{"scoring": "sigmoid", "choice_bias": True, "router_bias": True, "router_scale": 0.5},
        **{"norm_topk_eps": 1e-3, "routed_scaling_factor": 2.5},
    },
)
# Layout and blocks: more and fewer of them than there are rows, heads or experts to share.
MODELS = {
    "smallest, routed as MiniMax-M2": (cuda_layout(SIGMOID), 3),
    "every option": (
        cuda_layout(
            small_spec(
                hidden_size=576,
                qk_norm=True,
                qkv_bias=True,
                o_bias=True,
                attention_sinks=True,
                layers=TWO_LAYERS,
                moe={
                    **{"router_bias": True, "expert_bias": True, "routed_scaling_factor": 1.5},
                    "swiglu": SwigluSpec(alpha=1.702, limit=0.7, up_offset=1.0),  # so that much is beyond the limit
                },
            ),
            "f32",
            attention="fp8",
            lm_head="fp8",
        ),
        5,
    ),
    "Muse Spark": (
        cuda_layout(MUSE, attention="fp8", dense="fp8"),
        3,
    ),
    "one block": (cuda_layout(small_spec(head_dim=128, tie_word_embeddings=True, layers=1, moe={"top_k": 1})), 1),
}
PROMPT = [5, 9, 11, 2, 7, 0, 3, 12, 1, 1, 8, 4, 10, 6, 5, 2, 9, 3, 11]  # more than a step takes


@pytest.fixture(scope="module", params=MODELS)
def built(request):
    layout, grid = MODELS[request.param]
    return emulator.Emulated.random(layout, LIMITS, grid)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_logits_and_tokens_of_the_plain_model(built):
    spec = built.layout.spec
    layers = list(range(len(spec.layers)))[::-1]
    logits, _, (tapped_code, tapped, hidden), (bad_code, *_), _, generated = built.calls(
        ("run", [PROMPT], {"cuts": [1, 16]}),
        ("truncate", [0], {}),
        ("try_step_taps", [PROMPT[:16], layers, spec.hidden_size], {}),
        ("try_step_taps", [PROMPT[:1], [len(layers)], spec.hidden_size], {}),
        ("truncate", [0], {}),
        ("generate", [PROMPT], {"max_new_tokens": 6}),
    )
    tokens, code, error = generated
    assert (code, error, len(tokens)) == (abi.OK, "", 6)
    wanted = plain_model.logits(built.layout.spec, built.weights.plain(), [*PROMPT, *tokens])
    assert relative_error(logits, wanted[: len(PROMPT)]) < 2e-2  # bf16 inputs of every product
    assert (tapped_code, bad_code) == (abi.OK, abi.ERR_ARGUMENT)
    assert relative_error(tapped, wanted[:16]) < 2e-2
    states = plain_model.hidden(spec, built.weights.plain(), PROMPT[:16])
    for layer, found in zip(layers, hidden, strict=True):
        assert relative_error(found, states[layer]) < 2e-2
    # every chosen token is as good as the best, but for such an error
    rows = wanted[len(PROMPT) - 1 : -1]
    assert (rows.max(axis=1) - rows[range(6), tokens] < 2e-2 * np.abs(rows).max()).all()


def test_any_order_gives_the_same_bits(built):
    wanted = [("run", [PROMPT], {}), ("truncate", [0], {}), ("generate", [PROMPT[:3]], {"max_new_tokens": 4})]
    first, second = (built.calls(*wanted, seed=seed) for seed in (2, 3))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[2] == second[2]


def test_no_races(built):
    # One launch writes a tile of the KV cache and, once it is full, copies it.
    steps, _, generated = built.calls(
        ("run", [PROMPT], {"cuts": [3]}),
        ("truncate", [0], {}),
        ("generate", [PROMPT], {"max_new_tokens": 2}),
        races=True,
        seed=5,
    )
    assert np.isfinite(steps).all() and generated[1] == abi.OK


def test_a_forgotten_proxy_fence_is_found():
    layout, grid = MODELS["smallest, routed as MiniMax-M2"]
    without = '#include "ptx.cuh"\n#define fence_copies() ((void)0)\n'
    mutated = emulator.Emulated.random(layout, LIMITS, grid, add=without)
    with pytest.raises(AssertionError) as caught:
        mutated.calls(("generate", [PROMPT], {"max_new_tokens": 1}), races=True)
    report = str(caught.value)
    assert re.search(r"the read by a bulk copy of block \d: .*ExpertStream::cache", report)
    assert re.search(
        r"comes without a proxy fence after the write by block \d, warp \d+, lane \d+: .*step_attention", report
    )


@pytest.fixture(scope="module")
def followed():
    """A model's ordinary build, and that for racecheck: pages copied by stores that the tool sees."""
    layout, grid = MODELS["smallest, routed as MiniMax-M2"]
    built = emulator.Emulated.random(layout, LIMITS, grid)
    return built, dataclasses.replace(built, header="#define MK_RACECHECK\n" + built.header)


def test_the_build_for_racecheck_changes_no_bit(followed):
    calls = ("run", [PROMPT], {"cuts": [3]}), ("truncate", [0], {}), ("generate", [PROMPT], {"max_new_tokens": 2})
    first, second = followed[0].calls(*calls), followed[1].calls(*calls, races=True, seed=5)
    assert first[0].tobytes() == second[0].tobytes()
    assert first[2] == second[2] and first[2][1] == abi.OK


@pytest.mark.parametrize("mistake", mistakes.MISTAKES)
def test_a_mistake_in_the_build_for_racecheck_is_found(followed, mistake):
    """By the emulated machine; tests/gpu/test_random.py asks it of racecheck."""
    with mistakes.sources(mistake):
        wrong = dataclasses.replace(followed[1], header=f"// {mistake}\n{followed[1].header}")
        with pytest.raises(AssertionError) as caught:
            wrong.calls(("generate", [PROMPT], {"max_new_tokens": 1}), races=True)
    report = str(caught.value)
    assert "emulator: race at byte" in report and "step_dense.cuh" in report


def test_a_warp_that_learns_of_the_end_too_early():
    """A warp without pages in the last layer may look whether the consumers left when they have, from that layer's
    barrier: it must come to the one that they wait at."""
    dense_last = (LayerSpec(moe=True, rope=False), LayerSpec(moe=False, sliding_window=7))
    layout = cuda_layout(muse_spec(hidden_size=64, vocab_size=13, layers=dense_last), attention="fp8", dense="fp8")
    late = """#include "ptx.cuh"
    namespace mk {
    template <class T>
    T load_late(const T& word) {
      for (int i = 0; threadIdx.x / 64 == 1 && i < 4000 && !load_unordered(word); i++) __nanosleep(20);
      return load_unordered(word);
    }
    }  // namespace mk
    #define load_unordered load_late
    """
    calls = (("generate", [PROMPT[:1]], {"max_new_tokens": 2}),)
    found = [emulator.Emulated.random(layout, LIMITS, 2, add=add).calls(*calls)[0] for add in ("", late)]
    assert found[0] == found[1] and found[0][1] == abi.OK


def test_attention_over_many_positions():
    """Over more positions than there is time for here a unit of attention has several blocks of rows. With the limit at
    none: three blocks, for four squads."""
    layout = cuda_layout(
        small_spec(hidden_size=64, vocab_size=13, num_attention_heads=6, num_key_value_heads=2, layers=TWO_LAYERS)
    )
    ordinary = emulator.Emulated.random(layout, LIMITS, 3)
    many = dataclasses.replace(ordinary, header=f"// many positions\n{ordinary.header}")
    text = PROMPT * 3
    with mistakes.changed("cuda/step_block.cuh", [("kFewTiles = 64;", "kFewTiles = 0;")]):
        (found,) = many.calls(("run", [text], {"cuts": [16]}), races=True)
    wanted = plain_model.logits(layout.spec, many.weights.plain(), text)
    assert relative_error(found, wanted) < 2e-2


def test_a_wait_that_ends_says_so(built):
    if built.layout is MODELS["one block"][0]:
        pytest.skip("nobody waits for another block")
    # The last block starts after 2 s; the others give up before.
    first, second = built.calls(
        ("generate", [PROMPT[:2]], {}), ("try_step", [[1]], {}), wait_limit_s=0.5, late=2 * 10**9, stall=5000
    )
    assert first[1] == second[0] == abi.ERR_TIMEOUT
    assert re.match(r"a wait of 0.5 s ended: SM \d+ made no progress in phase ", first[2])


def test_sparing_registers_changes_no_bit():
    """What is compiled again where the tuned code spills: compile.VARIANTS."""
    layout = cuda_layout(
        small_spec(hidden_size=64, vocab_size=13, layers=TWO_LAYERS, moe={"intermediate_size": 768}), lm_head="fp8"
    )
    tuned = emulator.Emulated.random(layout, LIMITS, 3)
    sparing = dataclasses.replace(tuned, header=VARIANTS[1] + tuned.header)
    drawn = {"max_new_tokens": 3, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    calls = (
        ("run", [PROMPT], {"cuts": [1, 16]}),
        ("generate", [PROMPT[:2]], {"max_new_tokens": 3}),
        ("generate", [PROMPT[:2]], drawn),
    )
    first, second = tuned.calls(*calls), sparing.calls(*calls, races=True)
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1:] == second[1:]
    assert all(code == abi.OK for _, code, _ in second[1:])
