"""Families against transformers: names, shapes, rope tables and the meaning of every field of the spec."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import families
import numpy as np
import plain_model
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    GPT_OSS_20B,
    MINIMAX_M2,
    MIXTRAL_8X7B,
    MUSE_SPARK_816B,
    PUBLISHED,
    QWEN3_30B_A3B,
    changed,
    keys_of,
    refusal,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.mixtral import modeling_mixtral
from transformers.models.muse_spark import modeling_muse_spark
from transformers.models.qwen3_moe import modeling_qwen3_moe

from mkpack.errors import UserError
from mkpack.models import FAMILIES, model_spec, rope
from mkpack.spec import SwigluSpec, tensors

LEFT_OUT = re.compile(r"^model\.(vision|audio)_")
TOKENS = [0, 5, 9, 100, 200, 33, 44, 55, 66, 77, 88, 99, 5, 9, 4, 180]


@pytest.mark.parametrize("case", families.CASES)
def test_spec_of_a_checkpoint_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    folder = families.make_case(tmp_path, case)
    spec, names = model_spec(json.loads((folder / "config.json").read_text()))
    state = families.checkpoint_tensors(folder)
    roles = list(tensors(spec, names))
    found = {name: tuple(t.shape) for name, t in state.items() if not LEFT_OUT.search(name)}
    assert {r.source: r.source_shape for r in roles} == found
    ours = plain_model.logits(spec, families.by_role(roles, state), TOKENS)
    theirs = families.reference_logits(folder, TOKENS)
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


def test_published_mixtral() -> None:
    spec, names = model_spec(MIXTRAL_8X7B)
    assert (spec.head_dim, spec.num_key_value_heads, len(spec.layers)) == (128, 8, 32)
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.top_k, spec.moe.norm_topk_prob) == (8, 2, True)
    assert (spec.qk_norm, spec.qkv_bias, spec.o_bias, spec.tie_word_embeddings) == (False,) * 4
    parameters = sum(int(np.prod(r.shape)) for r in tensors(spec, names))
    assert parameters == 46_702_792_704


def test_published_qwen3_moe() -> None:
    spec, names = model_spec(QWEN3_30B_A3B)
    assert all(layer.moe and layer.sliding_window is None for layer in spec.layers)
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.top_k) == (128, 8)
    assert spec.qk_norm and spec.dense_intermediate_size is None
    parameters = sum(int(np.prod(r.shape)) for r in tensors(spec, names))
    assert parameters == 30_532_122_624


def test_published_gpt_oss() -> None:
    spec, names = model_spec(GPT_OSS_20B)
    assert [layer.sliding_window for layer in spec.layers] == [128, None] * 12
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.top_k) == (32, 4)
    assert spec.moe.swiglu == SwigluSpec(alpha=1.702, limit=7.0, up_offset=1.0)
    assert spec.qkv_bias and spec.o_bias and spec.attention_sinks and spec.moe.expert_bias and spec.moe.router_bias
    parameters = sum(int(np.prod(r.shape)) for r in tensors(spec, names))
    assert parameters == 20_914_757_184


def test_published_minimax_m2() -> None:
    spec, names = model_spec(MINIMAX_M2)
    assert (spec.head_dim, 2 * len(spec.rope.inv_freq), len(spec.layers)) == (128, 64, 62)
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.top_k) == (256, 8)
    assert (spec.moe.scoring, spec.moe.choice_bias, spec.qk_norm_over) == ("sigmoid", True, "projection")
    shapes = {r.name: r.shape for r in tensors(spec, names)}
    assert shapes["layers.0.q_norm"] == (6144,) and shapes["layers.0.k_norm"] == (1024,)
    assert 228e9 < sum(int(np.prod(s)) for s in shapes.values()) < 229e9


def test_published_muse_spark() -> None:
    spec, names = model_spec(MUSE_SPARK_816B)
    full = [i for i, layer in enumerate(spec.layers) if layer.sliding_window is None]
    assert full == list(range(1, 62, 4)) == [i for i, layer in enumerate(spec.layers) if not layer.rope]
    assert spec.moe is not None and (spec.moe.hidden_size, spec.moe.intermediate_size) == (4096, 4096)
    body = [r for r in tensors(spec, names) if r.name not in ("embed", "lm_head")]
    assert round(sum(int(np.prod(r.shape)) for r in body) / 1e9) in (816, 817)
    assert all(r.source.startswith("model.language_model.") for r in body)


NEW_ROPE: dict[str, dict[str, Any]] = {
    "gpt_oss": {**GPT_OSS_20B["rope_scaling"], "rope_theta": 150000},
    "minimax_m2": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
    "mixtral": {"rope_type": "default", "rope_theta": 1000000.0},
    "muse_spark": {"rope_type": "default", "rope_theta": 500000.0},
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1000000.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_give_one_spec(family: str) -> None:
    experts = {"num_experts", "num_local_experts"}
    (old,) = experts & set(keys_of(family))
    (new,) = experts - {old}
    count = PUBLISHED[family].get("text_config", PUBLISHED[family])[old]
    keys = {old: ..., new: count, "torch_dtype": ..., "dtype": "bfloat16"}
    rope_keys = {"rope_theta": ..., "rope_scaling": ..., "rotary_dim": ..., "rope_parameters": NEW_ROPE[family]}
    assert model_spec(changed(family, **keys, **rope_keys)) == model_spec(PUBLISHED[family])


def test_rope_theta_left_out_means_the_default_of_the_family() -> None:
    for family in FAMILIES:
        default = families.CLASSES[family][0]().get_text_config().rope_parameters.get("rope_theta", 150000.0)
        bare = {"rope_parameters": ...}
        assert model_spec(changed(family, rope_theta=..., **bare)) == model_spec(
            changed(family, rope_theta=default, **bare)
        )


def test_yarn_in_the_older_spelling_as_model_cards_write_it() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec, _ = model_spec(changed("qwen3_moe", rope_scaling=yarn))
    both = {**yarn, "rope_type": "yarn", "rope_theta": 1000000.0}
    assert spec == model_spec(changed("qwen3_moe", rope_scaling=..., rope_theta=..., rope_parameters=both))[0]
    assert spec.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


ROTARY = {
    "gpt_oss": modeling_gpt_oss.GptOssRotaryEmbedding,
    "minimax_m2": modeling_minimax_m2.MiniMaxM2RotaryEmbedding,
    "mixtral": modeling_mixtral.MixtralRotaryEmbedding,
    "muse_spark": modeling_muse_spark.MuseSparkTextRotaryEmbedding,
    "qwen3_moe": modeling_qwen3_moe.Qwen3MoeRotaryEmbedding,
}


def transformers_rope(config: dict[str, Any]) -> tuple[np.ndarray, float, float]:
    """inv_freq, attention_factor and rope_theta."""
    parsed = families.CLASSES[config["model_type"]][0](**copy.deepcopy(config)).get_text_config()
    kind = parsed.rope_parameters["rope_type"]
    if kind == "default":
        compute = ROTARY[config["model_type"]].compute_default_rope_parameters
    else:
        compute = ROPE_INIT_FUNCTIONS[kind]
    inv_freq, attention_factor = compute(parsed)
    return inv_freq.numpy(), attention_factor, parsed.rope_parameters["rope_theta"]


def torch_power(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim) as torch rounds it, which may be one place off the nearest float32."""
    return (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)).numpy()


def assert_same_rope(config: dict[str, Any]) -> None:
    """Bit-equal tables given torch's power; and ours, the nearest float32, is at most one place from torch's."""
    inv_freq, attention_factor, theta = transformers_rope(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "_pos_freqs", torch_power)
        ours = model_spec(config)[0].rope
    assert list(ours.inv_freq) == inv_freq.tolist()
    assert ours.attention_factor == np.float32(attention_factor)
    head_dim = 2 * len(inv_freq)
    power, theirs = rope._pos_freqs(theta, head_dim), torch_power(theta, head_dim)
    assert power.dtype == theirs.dtype and np.abs(power.view(np.int32) - theirs.view(np.int32)).max() <= 1
    np.testing.assert_allclose(model_spec(config)[0].rope.inv_freq, inv_freq, rtol=5e-7)


_theta = st.sampled_from([1e4, 10000, 1e5, 5e5, 1e6, 150000.0, 1e7, 31337.5])
_factor = st.sampled_from([1.0, 2, 3.7, 4.0, 8.0, 32.0])
_old_context = st.sampled_from([64, 2048, 4096, 8192, 32768])
_rope = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": _theta}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "rope_theta": _theta, "factor": _factor}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "rope_theta": _theta,
            "factor": _factor,
        },
        optional={
            "original_max_position_embeddings": _old_context,
            "attention_factor": st.sampled_from([0.5, 1.0, 1.3]),
            "beta_fast": st.sampled_from([0, 16, 32.0]),
            "beta_slow": st.sampled_from([0, 1, 2.0]),
            "mscale": st.sampled_from([0, 0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0, 0.707, 1.0]),
            "truncate": st.booleans(),
        },
    ),
)
_llama3 = st.builds(
    lambda low, above, rest: {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": low + above, **rest},
    st.sampled_from([1, 1.0, 2.0]),
    st.sampled_from([1, 3.0, 0.5]),
    st.fixed_dictionaries(
        {"rope_theta": _theta, "factor": _factor}, optional={"original_max_position_embeddings": _old_context}
    ),
)


@settings(max_examples=150)
@given(
    family=st.sampled_from(list(FAMILIES)),
    head_dim=st.sampled_from([8, 16, 24, 64, 80, 128, 256]),
    parameters=st.one_of(_rope, _llama3),
    old_spelling=st.booleans(),
    partial=st.sampled_from([0.25, 0.5, 1.0, None]),
)
def test_rope_table_is_that_of_transformers(
    family: str, head_dim: int, parameters: dict[str, Any], old_spelling: bool, partial: float | None
) -> None:
    if family == "minimax_m2" and partial and head_dim * partial % 2 == 0:
        parameters = {**parameters, "partial_rotary_factor": partial}
    rope_keys: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": ...}
    if old_spelling:
        scaling = {("type" if k == "rope_type" else k): v for k, v in parameters.items() if k != "rope_theta"}
        rope_keys = {"rope_scaling": scaling, "rope_theta": parameters["rope_theta"]}
    other: dict[str, Any] = {"rope_scaling": ..., "rope_parameters": ..., "rotary_dim": ..., "layer_rope_theta": ...}
    config = changed(family, head_dim=head_dim, **{**other, **rope_keys})
    assert_same_rope(config)


def test_original_context_beside_the_section_wins_as_in_transformers() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = changed("mixtral", head_dim=128, rope_scaling=scaling, original_max_position_embeddings=8192)
    assert_same_rope(config)
    assert model_spec(config) != model_spec(changed("mixtral", rope_scaling=scaling))


def test_mixtral_null_kv_heads_means_one_per_query_head() -> None:
    assert model_spec(changed("mixtral", num_key_value_heads=None))[0].num_key_value_heads == 32


def test_sliding_windows() -> None:
    def windows(family: str, **changes: Any) -> set[int | None]:
        return {layer.sliding_window for layer in model_spec(changed(family, **changes))[0].layers}

    assert windows("mixtral", sliding_window=4096) == {4096}
    assert windows("qwen3_moe", sliding_window=512) == {None}
    assert windows("qwen3_moe", sliding_window=512, use_sliding_window=True, max_window_layers=0) == {512}
    sliding = ["sliding_attention"] * 48
    on = {"use_sliding_window": True, "max_window_layers": ..., "layer_types": sliding}
    assert windows("qwen3_moe", **{**on, "sliding_window": 512}) == {512}
    # The window's default, which transformers takes when only the switch is there.
    default = transformers.Qwen3MoeConfig(use_sliding_window=True).sliding_window
    assert windows("qwen3_moe", **{**on, "sliding_window": ...}) == {default}


@settings(max_examples=60)
@given(
    num_layers=st.integers(1, 12),
    step=st.integers(1, 5),
    dense=st.sets(st.integers(0, 11)),
)
def test_dense_layers_are_those_of_transformers(num_layers: int, step: int, dense: set[int]) -> None:
    sizes = dict(families.PLAIN["qwen3_moe"])
    keys = {
        "num_hidden_layers": num_layers,
        "decoder_sparse_step": step,
        "mlp_only_layers": sorted(i for i in dense if i < num_layers),
    }
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**sizes, **keys}))
    theirs = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    spec, _ = model_spec(changed("qwen3_moe", **keys))
    assert [layer.moe for layer in spec.layers] == theirs
    assert (spec.moe is not None) == any(theirs)
    assert (spec.dense_intermediate_size is None) == all(theirs)


def test_unknown_model_type_names_the_nearest_and_the_supported() -> None:
    text = refusal({"model_type": "qwen3moe"})
    assert "qwen3moe" in text and 'did you mean "qwen3_moe"' in text and "mixtral" in text
    assert "model_type is missing" in refusal({"hidden_size": 8})
    assert "model_type" in refusal({"model_type": ["mixtral"]}) and "list" in refusal([])


# Changes that all families refuse, but for those in OWN: what is not part of the arithmetic they implement.
BAD_FOR_ALL = [
    ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
    ({"num_key_value_heads": 5}, ["num_attention_heads = ", "num_key_value_heads = 5"]),
    ({"head_dim": 17}, ["head_dim", "even", "17"]),
    ({"head_dim": ..., "hidden_size": 100}, ["head_dim is missing", "100"]),
    ({"num_experts_per_tok": 300}, ["num_experts_per_tok = 300"]),
    ({"hidden_size": ...}, ["hidden_size is missing"]),
    ({"hidden_size": "4096"}, ["hidden_size", "whole number", "'4096'"]),
    ({"vocab_size": 0}, ["vocab_size", "found 0"]),
    ({"vocab_size": True}, ["vocab_size", "found true"]),
    ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "10000"]),
    ({"rms_norm_eps": -1e-5}, ["rms_norm_eps", "above 0"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"rope_theta": 0.5}, ["rope_theta"]),
    ({"rope_theta": 10**400}, ["rope_theta", "above 0"]),
    ({"rope_theta": "big"}, ["rope_theta", "big"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "yarn"]),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, ["'longrope'"]),
    ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, ["'yarm'", 'did you mean "yarn"']),
    ({"rope_scaling": {"rope_type": "yarn"}}, ["factor is missing", "yarn"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}}, ["beta_fast", "linear"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, ["truncate", "true or false"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "above 0"]),
    ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["partial_rotary_factor"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling", "section"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, ["disagree"]),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, ["rope_theta", "disagree"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["high_freq_factor"],
    ),
    ({"dtype": "float8_e4m3fn", "torch_dtype": ...}, ["float8_e4m3fn", "bfloat16"]),
    ({"dtype": "float32", "torch_dtype": "bfloat16"}, ["dtype and torch_dtype", "two spellings"]),
    ({"architectures": ["MixtralForSequenceClassification"]}, ["architectures", "expected a ...For"]),
    ({"auto_map": {"AutoModel": "modeling_x.X"}}, ["auto_map"]),
    ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
    ({"scoring_func": "sigmoid"}, ["scoring_func", "'softmax'"]),
    ({"n_shared_experts": 1}, ["n_shared_experts"]),
    ({"layer_types": ["sliding_attention"]}, ["layer_types", "full_attention"]),
]


OWN = {
    "minimax_m2": ("auto_map", "partial_rotary_factor", "scoring_func"),
    "muse_spark": ("final_logit_softcapping",),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes, said", BAD_FOR_ALL, ids=[",".join(c) for c, _ in BAD_FOR_ALL])
def test_refused_by_name(family: str, changes: dict[str, Any], said: list[str]) -> None:
    if set(changes) & set(OWN.get(family, ())):
        pytest.skip("the family has this feature")
    if any(key.startswith("rope_") for key in changes):
        # Of a config in the other spelling, only the theta stays.
        theta = {"rope_theta": NEW_ROPE[family]["rope_theta"]}
        changes = {"rope_scaling": ..., "rope_parameters": ..., "layer_rope_theta": ..., **theta, **changes}
    text = refusal(changed(family, **changes))
    assert "config.json" in text and "\n" not in text, text
    for part in said:
        assert part in text


@pytest.mark.parametrize(
    "family, changes, said",
    [
        ("gpt_oss", {"layer_types": ["full_attention"] * 23}, ["layer_types", "24 layers"]),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 24}, ["layer_types", "sliding_attention"]),
        ("gpt_oss", {"sliding_window": ...}, ["sliding_window is missing"]),
        ("gpt_oss", {"swiglu_limit": 0}, ["swiglu_limit", "above 0"]),
        ("gpt_oss", {"rotary_dim": 32}, ["rotary_dim", "not supported"]),
        ("minimax_m2", {"rotary_dim": 63}, ["rotary_dim = 63", "even"]),
        ("minimax_m2", {"rotary_dim": 256}, ["rotary_dim = 256", "head_dim = 128"]),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, ["partial_rotary_factor = 0.25 and rotary_dim = 64"]),
        ("minimax_m2", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "at most 1"]),
        ("minimax_m2", {"scoring_func": "softmax"}, ["scoring_func", "'sigmoid'"]),
        ("minimax_m2", {"use_routing_bias": False}, ["use_routing_bias"]),
        ("minimax_m2", {"qk_norm_type": "per_head"}, ["qk_norm_type", "'per_layer'"]),
        ("minimax_m2", {"attn_type_list": [0] + [1] * 61}, ["attn_type_list"]),
        ("minimax_m2", {"layernorm_mlp_beta": 2.0}, ["layernorm_mlp_beta"]),
        ("minimax_m2", {"shared_intermediate_size": 1536}, ["shared_intermediate_size"]),
        ("muse_spark", {"text_config": ...}, ["text_config", "section"]),
        ("muse_spark", {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ("muse_spark", {"layer_rope_theta": [0] * 61}, ["layer_rope_theta", "62 layers"]),
        ("muse_spark", {"layer_rope_theta": [1e4] * 62}, ["layer_rope_theta", "0 or 500000.0"]),
        ("muse_spark", {"mlp_layer_types": ["shared"] * 62}, ["mlp_layer_types", "'sparse' or 'dense'"]),
        ("muse_spark", {"moe_hidden_size": ...}, ["moe_hidden_size is missing"]),
        ("muse_spark", {"residual_gate_temperature": 0}, ["residual_gate_temperature", "above 0"]),
        ("mixtral", {"attention_bias": True}, ["attention_bias"]),
        ("mixtral", {"norm_topk_prob": False}, ["norm_topk_prob"]),
        ("mixtral", {"mlp_only_layers": [1]}, ["mlp_only_layers"]),
        ("mixtral", {"sliding_window": 0}, ["sliding_window"]),
        ("mixtral", {"sliding_window": 8, "use_sliding_window": False}, ["use_sliding_window"]),
        ("mixtral", {"num_experts": 9}, ["num_local_experts and num_experts", "two spellings"]),
        ("mixtral", {"intermediate_size": ...}, ["intermediate_size is missing"]),
        ("qwen3_moe", {"num_key_value_heads": None}, ["num_key_value_heads is missing"]),
        ("qwen3_moe", {"moe_intermediate_size": ...}, ["moe_intermediate_size is missing"]),
        ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": ...}, ["intermediate_size is missing"]),
        ("qwen3_moe", {"mlp_only_layers": [48]}, ["mlp_only_layers", "0 to 47"]),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ("qwen3_moe", {"attention_bias": 1}, ["attention_bias", "true or false"]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}, ["max_window_layers = 48"]),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 48},
            ["layer_types", "sliding_attention"],
        ),
    ],
)
def test_refused_by_name_in_one_family(family: str, changes: dict[str, Any], said: list[str]) -> None:
    text = refusal(changed(family, **changes))
    assert "\n" not in text, text
    for part in said:
        assert part in text


def test_all_problems_come_in_one_message() -> None:
    text = refusal(changed("mixtral", hidden_act="gelu", vocab_size=-1, num_experts_per_tok=9, attention_bias=True))
    assert "4 problems" in text
    for key in ("hidden_act", "vocab_size", "num_experts_per_tok", "attention_bias"):
        assert key in text


_junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70000),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), st.integers() | st.text(), max_size=3
    ),
)


@settings(max_examples=200)
@given(data=st.data(), family=st.sampled_from(list(FAMILIES)))
def test_junk_is_read_or_refused_and_never_crashes(data: st.DataObject, family: str) -> None:
    keys = data.draw(st.lists(st.sampled_from([*keys_of(family), "rope_parameters", "layer_types"]), max_size=4))
    config = changed(family, **{key: data.draw(_junk, label=key) for key in keys if key != "model_type"})
    try:
        spec, names = model_spec(config)
    except UserError as error:
        assert "config.json" in str(error)
    else:
        assert all(size >= 1 for role in tensors(spec, names) for size in role.shape)


def test_checkpoint_maker_is_repeatable_and_complete(tmp_path: Path) -> None:
    one = families.make_checkpoint(tmp_path / "one", "mixtral", dtype="bfloat16", max_shard_size="40KB")
    two = families.make_checkpoint(tmp_path / "two", "mixtral", dtype="bfloat16")
    other = families.make_checkpoint(tmp_path / "other", "mixtral", dtype="bfloat16", seed=1)
    a, b, c = (families.checkpoint_tensors(folder) for folder in (one, two, other))
    assert all(t.dtype == torch.bfloat16 for t in a.values())
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert (one / "model.safetensors.index.json").exists() and len(list(one.glob("*.safetensors"))) > 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(one)
    text = "in the café, naïve 😀"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == families.BOS and max(ids) < 288
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_replaced_weights_reach_the_reference(tmp_path: Path) -> None:
    folder = families.make_checkpoint(tmp_path, "qwen3_moe")
    before = families.reference_logits(folder, TOKENS)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    state = families.checkpoint_tensors(folder)
    same = families.reference_logits(folder, TOKENS, {name: state[name].numpy()})
    assert np.array_equal(before, same)
    assert not np.array_equal(before, families.reference_logits(folder, TOKENS, {name: 2 * state[name].numpy()}))
    with pytest.raises(ValueError, match="no tensor"):
        families.reference(folder, {"model.layers.9.x": np.zeros(1)})


def test_greedy_is_the_argmax_of_each_step(tmp_path: Path) -> None:
    folder = families.make_checkpoint(tmp_path, "mixtral")
    new = families.greedy(folder, TOKENS[:4], 5)
    rows = families.reference_logits(folder, TOKENS[:4] + new)
    assert new == rows[3:-1].argmax(axis=-1).tolist() and len(set(new)) > 2
