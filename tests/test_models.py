"""Families against transformers: names, shapes, rope tables and the meaning of every field of the spec."""

import copy
import json
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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mkpack.errors import UserError
from mkpack.models import FAMILIES, model_spec, rope
from mkpack.spec import tensors

# As published: the older spellings of transformers 4.
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"mixtral": MIXTRAL_8X7B, "qwen3_moe": QWEN3_30B_A3B}
TOKENS = [0, 5, 9, 100, 200, 33, 44, 55, 66, 77, 88, 99, 5, 9, 4, 180]


def changed(family: str, **changes: Any) -> dict[str, Any]:
    """The published config with some keys set, or removed where the value is ...."""
    config = {**copy.deepcopy(PUBLISHED[family]), **changes}
    return {k: v for k, v in config.items() if v is not ...}


def refusal(config: Any) -> str:
    with pytest.raises(UserError) as error:
        model_spec(config)
    return str(error.value)


@pytest.mark.parametrize("case", families.CASES)
def test_spec_of_a_checkpoint_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    folder = families.make_case(tmp_path, case)
    spec, names = model_spec(json.loads((folder / "config.json").read_text()))
    state = families.checkpoint_tensors(folder)
    roles = list(tensors(spec, names))
    assert {r.source: r.shape for r in roles} == {name: tuple(t.shape) for name, t in state.items()}
    ours = plain_model.logits(spec, {r.name: state[r.source].numpy() for r in roles}, TOKENS)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_give_one_spec(family: str) -> None:
    new = changed(
        family,
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        torch_dtype=...,
        dtype="bfloat16",
    )
    old_key, new_key = (
        ("num_local_experts", "num_experts") if family == "mixtral" else ("num_experts", "num_local_experts")
    )
    new[new_key] = new.pop(old_key)
    assert model_spec(new) == model_spec(PUBLISHED[family])


def test_rope_theta_left_out_means_the_default_of_the_family() -> None:
    for family in FAMILIES:
        default = families.CLASSES[family][0]().rope_parameters["rope_theta"]
        assert model_spec(changed(family, rope_theta=...)) == model_spec(changed(family, rope_theta=default))


def test_yarn_in_the_older_spelling_as_model_cards_write_it() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec, _ = model_spec(changed("qwen3_moe", rope_scaling=yarn))
    both = {**yarn, "rope_type": "yarn", "rope_theta": 1000000.0}
    assert spec == model_spec(changed("qwen3_moe", rope_scaling=..., rope_theta=..., rope_parameters=both))[0]
    assert spec.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def transformers_rope(config: dict[str, Any]) -> tuple[np.ndarray, float, float]:
    """inv_freq, attention_factor and rope_theta."""
    config_class, model_class = families.CLASSES[config["model_type"]]
    parsed = config_class(**copy.deepcopy(config))
    kind = parsed.rope_parameters["rope_type"]
    if kind == "default":
        with torch.device("meta"):
            small = copy.deepcopy(parsed)
            small.num_hidden_layers = 0
            compute = type(model_class(small).model.rotary_emb).compute_default_rope_parameters
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


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(list(FAMILIES)),
    head_dim=st.sampled_from([8, 16, 24, 64, 80, 128, 256]),
    parameters=st.one_of(_rope, _llama3),
    old_spelling=st.booleans(),
)
def test_rope_table_is_that_of_transformers(
    family: str, head_dim: int, parameters: dict[str, Any], old_spelling: bool
) -> None:
    rope_keys: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": ...}
    if old_spelling:
        scaling = {("type" if k == "rope_type" else k): v for k, v in parameters.items() if k != "rope_theta"}
        rope_keys = {"rope_scaling": scaling, "rope_theta": parameters["rope_theta"]}
    config = changed(family, head_dim=head_dim, **{"rope_scaling": ..., **rope_keys})
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


@settings(max_examples=60, deadline=None)
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


BAD_FOR_BOTH = [
    ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
    ({"num_key_value_heads": 5}, ["num_attention_heads = 32", "num_key_value_heads = 5"]),
    ({"head_dim": 17}, ["head_dim", "even", "17"]),
    ({"head_dim": ..., "hidden_size": 100}, ["head_dim is missing", "100"]),
    ({"num_experts_per_tok": 200}, ["num_experts_per_tok = 200"]),
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
    ({"dtype": "float32"}, ["dtype and torch_dtype", "two spellings"]),
    ({"architectures": ["MixtralForSequenceClassification"]}, ["architectures", "ForCausalLM"]),
    ({"auto_map": {"AutoModel": "modeling_x.X"}}, ["auto_map"]),
    ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
    ({"scoring_func": "sigmoid"}, ["scoring_func", "'softmax'"]),
    ({"n_shared_experts": 1}, ["n_shared_experts"]),
    ({"layer_types": ["sliding_attention"]}, ["layer_types", "full_attention"]),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes, said", BAD_FOR_BOTH, ids=[",".join(c) for c, _ in BAD_FOR_BOTH])
def test_refused_by_name(family: str, changes: dict[str, Any], said: list[str]) -> None:
    text = refusal(changed(family, **changes))
    assert "config.json" in text and "\n" not in text, text
    for part in said:
        assert part in text


@pytest.mark.parametrize(
    "family, changes, said",
    [
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


@settings(max_examples=200, deadline=None)
@given(data=st.data(), family=st.sampled_from(list(FAMILIES)))
def test_junk_is_read_or_refused_and_never_crashes(data: st.DataObject, family: str) -> None:
    keys = data.draw(st.lists(st.sampled_from([*PUBLISHED[family], "rope_parameters", "layer_types"]), max_size=4))
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
