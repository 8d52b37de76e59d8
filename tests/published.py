"""config.json of the models that the families are named after, as published, and how tests change and refuse them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mkpack.errors import UserError
from mkpack.models import model_spec

# The older spellings of transformers 4, but for Muse Spark.
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
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {"fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
MUSE_SPARK_816B: dict[str, Any] = {
    "architectures": ["MuseSparkForConditionalGeneration"],
    "audio_config": {"model_type": "muse_spark_audio"},
    "dtype": "bfloat16",
    "model_type": "muse_spark",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": 20.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 16384,
        "layer_rope_theta": [0 if (61 - i) % 4 == 0 else 500000.0 for i in range(62)],
        "layer_types": ["full_attention" if (61 - i) % 4 == 0 else "sliding_attention" for i in range(62)],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["sparse"] * 62,
        "model_type": "muse_spark_text",
        "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "num_local_experts": 256,
        "output_multiplier": 0.1767766952966369,
        "post_norm_eps": 1e-08,
        "qk_scale_factor": 5.4730064863875,
        "residual_gate_temperature": 0.3,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "routed_scaling_factor": 1.0,
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "vocab_size": 202048,
    },
    "vision_config": {"model_type": "muse_spark_vision"},
}
PUBLISHED = {
    "gpt_oss": GPT_OSS_20B,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL_8X7B,
    "muse_spark": MUSE_SPARK_816B,
    "qwen3_moe": QWEN3_30B_A3B,
}
# Keys that stand beside text_config, where there is one.
_OUTER = ("architectures", "auto_map", "dtype", "model_type", "quantization_config", "text_config", "torch_dtype")


def keys_of(family: str) -> list[str]:
    """Every key that a family's published config.json has, those of its text_config included."""
    config = PUBLISHED[family]
    return [*config, *config.get("text_config", {})]


def changed(family: str, **changes: Any) -> dict[str, Any]:
    """The published config with some keys set, or removed where the value is ...."""
    config = copy.deepcopy(PUBLISHED[family])
    for key, value in changes.items():
        nested = key not in _OUTER and isinstance(config.get("text_config"), dict)
        section = config["text_config"] if nested else config
        section.pop(key, None)
        if value is not ...:
            section[key] = value
    return config


def refusal(config: Any) -> str:
    with pytest.raises(UserError) as error:
        model_spec(config)
    return str(error.value)
