"""Checkpoint and recipe -> artifact -> tokens, held against transformers in float32 on the dequantised weights.

Norm of the logits' error: the largest, over all positions, of ||found - expected|| / ||expected||.
"""

from __future__ import annotations

import builds
import families
import numpy as np
import pytest

from mkpack.build import build
from mkpack.loader import load

NVFP4 = dict.fromkeys(("experts", "dense", "attention", "lm_head", "embeddings"), "nvfp4")
FP8 = dict.fromkeys(NVFP4, "fp8")
BF16 = dict.fromkeys(NVFP4, "bf16")

# A case of families.CASES with options of its checkpoint and keys of its recipe. Every format meets every kind of
# matrix, both instruction sets, both families; shapes that only the kernel sees are tested with the kernel.
CASES = [
    ("mixtral-plain", {}, {}),
    ("mixtral-3-kv-heads", {}, {"quantise": NVFP4}),
    ("mixtral-5-experts-intermediate-48", {}, {"quantise": {"experts": "fp8", "attention": "nvfp4"}}),
    ("mixtral-tied-vocab-275", {}, {"quantise": NVFP4, "targets": ["x86-64-v3"]}),
    ("mixtral-hidden-72-head-dim-24", {}, {"quantise": FP8, "limits": {"context": 100, "tokens_per_step": 5}}),
    ("mixtral-sliding-window", {"dtype": "bfloat16"}, {"quantise": BF16, "targets": ["x86-64-v3"]}),
    ("qwen3-3-kv-heads-attention-bias", {}, {"quantise": {"attention": "nvfp4", "lm_head": "fp8"}}),
    ("qwen3-top-1-not-renormalised", {"dtype": "bfloat16"}, {"quantise": {"embeddings": "fp8"}}),
    ("qwen3-tied-vocab-275", {}, {"quantise": {"embeddings": "fp8", "lm_head": "nvfp4"}}),
    ("qwen3-dense-layers", {}, {"quantise": {"dense": "nvfp4", "experts": "bf16"}, "parallel": {"tp": 2}}),
    ("minimax-plain", {}, {"quantise": NVFP4}),
    ("minimax-3-kv-heads-of-20", {"dtype": "bfloat16"}, {"quantise": {"attention": "fp8"}, "parallel": {"tp": 3}}),
    ("gpt-oss-plain", {"dtype": "bfloat16"}, {"targets": ["x86-64-v3"]}),
    ("gpt-oss-odd-shapes", {}, {"quantise": {**NVFP4, "experts": "fp8"}, "parallel": {"tp": 6}}),
    ("muse-spark-plain", {"dtype": "bfloat16"}, {"quantise": {"dense": "nvfp4"}}),
    ("muse-spark-odd-shapes", {}, {"quantise": BF16, "parallel": {"tp": 3}}),
    ("muse-spark-dense-layers-biases", {"max_shard_size": "90KB"}, {"quantise": FP8, "targets": ["x86-64-v3"]}),
    ("qwen3-yarn", {"max_shard_size": "50KB"}, {"quantise": {**NVFP4, "attention": "fp8"}}),
]


def final_norm(reference) -> np.ndarray:
    weights = [w for name, w in reference.named_parameters() if name.endswith("model.norm.weight")]
    return weights[0].detach().numpy() if len(weights) == 1 else 1.0


@pytest.mark.parametrize(("case", "options", "keys"), CASES, ids=[case for case, _, _ in CASES])
def test_tokens_of_an_artifact_are_those_of_transformers(tmp_path, case, options, keys):
    checkpoint = families.make_case(tmp_path / "checkpoint", case, **options)
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys), output=tmp_path)
    reference = builds.oracle(path, checkpoint, tmp_path)
    prompt = np.random.default_rng(1).integers(0, reference.config.get_text_config().vocab_size, 21).tolist()
    with load(path, threads=2) as model:
        tokens = builds.generated(model, prompt, 64)
        model.reset()
        spec = model.spec
        layers = list(range(len(spec.layers)))[::-1]
        logits, hidden = model.step_taps([*prompt, *tokens], layers, len(prompt) + 64)
    expected = families.reference_logits(reference, [*prompt, *tokens])
    assert len(tokens) == 64
    builds.assert_greedy(expected, prompt, tokens)
    assert builds.relative_error(logits, expected) < 2e-3
    states = families.reference_hidden(reference, [*prompt, *tokens])
    assert hidden.shape == states[1:].shape
    for layer, found in zip(layers[1:], hidden[1:], strict=True):  # the last layer's are behind the final norm there
        assert builds.relative_error(found, states[layer + 1]) < 2e-3
    scaled = hidden[0] / np.sqrt((hidden[0] ** 2).mean(axis=1, keepdims=True) + spec.rms_norm_eps)
    assert builds.relative_error(scaled * final_norm(reference), states[-1]) < 2e-3
