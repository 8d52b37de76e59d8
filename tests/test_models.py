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
from mkpack.models import FAMILIES, model_spec
from mkpack.spec import RopeSpec, tensors

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
    assert np.abs(ours - theirs).max() < 2e-4 * np.abs(theirs).max()


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
    old_key, new_key = ("num_local_experts", "num_experts") if family == "mixtral" else ("num_experts", "num_local_experts")
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


def transformers_rope(config: dict[str, Any]) -> tuple[np.ndarray, float]:
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
    return inv_freq.numpy(), attention_factor


def assert_same_rope(ours: RopeSpec, theirs: tuple[np.ndarray, float]) -> None:
    inv_freq = np.array(ours.inv_freq, dtype=np.float32)
    assert inv_freq.tolist() == list(ours.inv_freq), "not float32 values"
    assert inv_freq.shape == theirs[0].shape
    # torch's float32 power may be off by one place, ours is the nearest float32; the reciprocal can double that.
    places = np.abs(inv_freq.view(np.int32).astype(np.int64) - theirs[0].view(np.int32))
    assert places.max() <= 2 and (places == 0).mean() > 0.7
    assert ours.attention_factor == np.float32(theirs[1])


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
