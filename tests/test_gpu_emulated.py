"""One artifact, two kernels: the CUDA sources run on the emulated GPU (tests/cuda/emulator) and must say what the CPU's
kernel says. The way is the user's: recipe, build, load, generate."""

from __future__ import annotations

import json

import builds
import emulator
import families
import layerwise
import numpy as np
import pytest

from mkpack import bench, bench_gpu, card, platform, rebuild, session
from mkpack import build as builder
from mkpack import trace as tracing
from mkpack.artifact import extract
from mkpack.errors import UserError
from mkpack.loader import load

BLOCKS = 4  # an emulated GPU is slow, and any number of blocks computes the same
SHAPE = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CPU = platform.resolve_target("native")
PROMPT = [7, 3, 250, 11, 90]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Of an artifact for this machine's CPU and the emulated GPU, which the loader finds."""
    folder = tmp_path_factory.mktemp("emulated")
    with emulator.machine(BLOCKS):
        checkpoint = families.make_checkpoint(folder / "checkpoint", "qwen3_moe", **SHAPE, mlp_only_layers=[1])
        keys = {"targets": ["native", "sm_90a"], "quantise": {"attention": "fp8"}, "limits": {"context": 48}}
        yield builds.write_recipe(folder / "recipe.yaml", checkpoint, **keys)


@pytest.fixture(scope="module")
def artifact(recipe):
    return builder.build(recipe, output=recipe.parent)


@pytest.fixture(scope="module")
def traced(recipe):
    return builder.build(recipe, output=recipe.parent / "traced.mkpack", trace=True)


def test_both_kernels_give_the_same_tokens(artifact):
    found = {}
    for target in ("cpu", "gpu"):
        with load(artifact, target=target) as model:
            assert (model.target == "sm_90a") == (target == "gpu")
            tokens = builds.generated(model, PROMPT, 8)
            model.reset()
            found[target] = tokens, model.step([*PROMPT, *tokens], 8)
    assert found["gpu"][0] == found["cpu"][0]
    assert builds.relative_error(found["gpu"][1], found["cpu"][1]) < 2e-2  # bf16 against float32 activations


FAMILIES = {
    "gpt_oss": {"swiglu_limit": 0.7, "intermediate_size": 64, "seed": 2},  # with 0 two tokens are nearly as likely
    "minimax_m2": {"num_local_experts": 9, "num_experts_per_tok": 3, "intermediate_size": 64},
    # A dense layer between two with experts, the last without rope.
    "muse_spark": {
        **{"num_hidden_layers": 3, "moe_hidden_size": 128, "moe_intermediate_size": 64, "attention_bias": True},
        **{"mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 2.5, "sliding_window": 7},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(recipe, family, tmp_path):
    """Families whose features decode_kernel has not, on both kernels, against transformers: more tokens than a step
    takes and than a window holds, one at a time and several."""
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", family, **SHAPE, **FAMILIES[family])
    keys = {"targets": ["native", "sm_90a"], "limits": {"context": 48}}
    path = builder.build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), output=tmp_path)
    prompt, found = [*PROMPT, *range(20, 34)], {}
    for target in ("cpu", "gpu"):
        with load(path, target=target) as model:
            tokens = builds.generated(model, prompt, 6)
            model.reset()
            text = [*prompt, *tokens]
            cuts, layers = ((0, 1), (1, 2), (2, 5), (5, len(text))), range(len(model.spec.layers))
            logits, hidden = zip(*(model.step_taps(text[a:b], layers, b - a) for a, b in cuts), strict=True)
            found[target] = tokens, np.concatenate(logits), np.concatenate(hidden, axis=1)
    assert found["gpu"][0] == found["cpu"][0]
    expected = families.reference_logits(builds.oracle(path, checkpoint, tmp_path), [*prompt, *found["cpu"][0]])
    builds.assert_greedy(expected, prompt, found["gpu"][0])
    assert builds.relative_error(found["cpu"][1], expected) < 2e-3
    # bf16 inputs of every product; Muse Spark multiplies scores by 5.47, and so the roundings of queries and keys
    _, logits, hidden = found["gpu"]
    layers = layerwise.compare(model.spec, builds.plain_weights(path, checkpoint), text, hidden, logits)
    assert layers.worst < 2e-2, layers
    # At one position of MiniMax-M2 a rounding before the last layer's router decided between two experts of the twin.
    errors = [builds.relative_error(a[None], b[None]) for a, b in zip(logits, expected, strict=True)]
    assert sorted(errors)[-2 if family == "minimax_m2" else -1] < (5e-2 if family == "muse_spark" else 3e-2)


def test_text_stops_and_speed_from_an_unpacked_folder(artifact, tmp_path):
    extract(artifact, tmp_path / "folder")
    with load(tmp_path / "folder") as model:
        assert model.target == "sm_90a"
        generation = model.generate("a b", raw=True, max_new_tokens=3, temperature=0.0)
        text = "".join(generation)
        assert text == model.text.tokenizer.decode(list(generation.result.tokens), skip_special_tokens=True)
        first = generation.result.tokens[0]
        stopped = list(model.generate_tokens("a b", raw=True, max_new_tokens=3, temperature=0.0, stop_tokens=[first]))
        assert stopped == [first]
        lines = session.stats(model, generation.result).splitlines()
        kv = 2 * 2 * 2 * 64 * 2  # keys and values of 2 layers and 2 heads of 64, in bfloat16
        assert model.bytes_per_step(position=9) - model.bytes_per_step() == 9 * kv
        assert "tokens/s" in lines[0] and lines[2].startswith("bound:  ") and "MB a token" in lines[2]


def test_bench_measures_steps_of_all_sizes(artifact, monkeypatch):
    """Times are the emulator's own; the checks beside them are real."""
    for name, value in {"RUNS": 2, "STEP_RUNS": 2, "DECODE_TOKENS": 4, "ROOM": 16, "STEP_TOKENS": (1, 16)}.items():
        monkeypatch.setattr(bench_gpu, name, value)
    result = bench.run(artifact, contexts=[20, 5], prompt_tokens=3, new_tokens=4)
    assert [p.context for p in result.points] == [5, 20] and result.gpu == "emulated"
    with load(artifact) as model:
        spec = model.spec
        for point in result.points:
            assert point.repeats and all(s.repeats for s in point.steps) and point.decode_bound_ms > 0
            assert point.gap < 2e-2 and max(s.error for s in point.steps) < 2e-2
            assert point.decode_mb * 1e6 == pytest.approx(model.bytes_per_step(1, point.context + 2))
            for step in point.steps:
                assert spec.moe.top_k <= step.experts <= min(spec.moe.num_experts, step.tokens * spec.moe.top_k)
                assert step.mb * 1e6 == pytest.approx(model.bytes_per_step(step.tokens, point.context, step.experts))
            assert point.steps[0].experts == spec.moe.top_k and point.steps[0].error == 0
    text = result.render()
    assert "runs repeated: equal bits; steps of all sizes and generations agree to " in text and "within 0.02" in text
    assert "random weights" not in text and "3 tokens in, 4 out" in text
    assert card.read_bench(result.to_json().encode(), "-").speeds[1].context == 20


def test_bench_refuses_what_does_not_fit(artifact):
    with pytest.raises(UserError, match="context 40: expected at most "):
        bench.run(artifact, contexts=[40])
    with pytest.raises(UserError, match=r"a generation of 40 \+ 10 tokens: the context holds 48"):
        bench.run(artifact, contexts=[1], prompt_tokens=40, new_tokens=10)
    with pytest.raises(UserError, match="--new-tokens are for GPUs"):
        bench.run(artifact, target="cpu", new_tokens=10)
    with load(artifact, target="cpu") as model, pytest.raises(UserError, match="this kernel times no single step"):
        model.time_step([1])
    with (
        load(artifact) as model,
        pytest.raises(UserError, match="this kernel keeps no times; build the artifact again"),
    ):
        model.trace([1], 1)


def test_a_trace_of_a_few_steps(traced, tmp_path):
    with load(traced) as model:
        kernels = model.manifest.kernels
        assert kernels["sm_90a"].traced and not kernels[CPU].traced
        assert rebuild._unit("again", model.manifest, "sm_90a").traced
        generated = builds.generated(model, PROMPT, 3)
        found = tracing.record(model, 3, 1, 5)
        assert model.length == 5 and builds.generated(model, PROMPT, 3) == generated
    steps, begin, end = found.stamps.shape[0], found.begin, found.end
    assert found.stamps.shape == (3, 3, len(found.names), BLOCKS, 4)
    named = {name: i for i, name in enumerate(found.names)}
    first, last = named["consumers embed"], named["consumers token"]
    assert all((begin[i, 0, first] > 0).all() and (end[i, -1, last] > 0).all() for i in range(steps))
    # Every SM goes through the phases in their order, and the steps follow each other.
    phases = np.concatenate([begin[:, 0, : named["consumers qkv"]], begin[:, 0, named["consumers qkv"] : first + 9]], 1)
    assert (np.diff(phases, axis=1) > 0).all()
    assert (begin[1:, 0, first] > end[:-1, -1, last]).all()
    assert (end[:, :-1, named["dense qkv"]] > 0).all() and (begin[:, -1, named["dense head"]] > 0).any()
    text = tracing.run(traced, tmp_path / "t.json", steps=2, tokens=3, context=4)
    assert "2 steps of 3 tokens at context 4" in text and (tmp_path / "t.html").read_text().startswith("<!DOCTYPE")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(BLOCKS))
    with pytest.raises(UserError, match="context 46: expected at most 44"):
        tracing.run(traced, tmp_path / "u.json", context=46)
    with pytest.raises(UserError, match=r"ends in \.json"):
        tracing.run(traced, tmp_path / "u.txt")
    assert not list(tmp_path.glob("u.*"))


def test_the_bench_of_a_traced_build_tells_its_phases(traced, monkeypatch):
    for name, value in {"RUNS": 1, "STEP_RUNS": 1, "DECODE_TOKENS": 2, "ROOM": 16, "STEP_TOKENS": (1,)}.items():
        monkeypatch.setattr(bench_gpu, name, value)
    result = bench.run(traced, contexts=[5], prompt_tokens=3, new_tokens=2)
    assert {p.name for p in result.phases.phases} >= {"qkv", "attention", "gate/up", "down"}
    assert "phases, at context 5: a step takes " in result.render()


def test_tracing_is_for_gpus(recipe, tmp_path):
    alone = tmp_path / "cpu.yaml"
    alone.write_text(recipe.read_text().replace("- sm_90a\n", "").replace(", sm_90a", ""))
    with pytest.raises(UserError, match="--trace is for targets of GPUs"):
        builder.build(alone, output=tmp_path, trace=True)
