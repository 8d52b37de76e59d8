"""Tiny random checkpoints of every family, and what transformers computes with them: the oracle of the tests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mkpack.spec import TensorRole

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CLASSES = {
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "muse_spark": (transformers.MuseSparkConfig, transformers.MuseSparkForConditionalGeneration),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
BOS, EOS, IM_START, IM_END = range(4)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
# Bytes come after the special tokens, then what these merges make, as far as vocab_size goes.
SMALLEST_VOCAB = len(SPECIAL) + 256
_MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "o n", "Ġ a", "r e", "in g", "Ġ Ġ", "Ã ©")

# Sizes of the plain model of a family; cases and callers override single keys.
_SHARED: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
PLAIN: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **_SHARED,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rope_parameters": None,
    },
    "minimax_m2": {
        **_SHARED,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mixtral": {**_SHARED, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_SHARED,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    # Keys of the text model; the towers are there to be left out.
    "muse_spark": {
        **_SHARED,
        "num_hidden_layers": 4,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# name -> (family, overrides): shapes and features that go wrong first.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-plain": ("mixtral", {}),
    "mixtral-3-kv-heads": ("mixtral", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}),
    "mixtral-5-experts-intermediate-48": ("mixtral", {"num_local_experts": 5, "intermediate_size": 48}),
    "mixtral-top-1": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-top-all-1-layer": ("mixtral", {"num_experts_per_tok": 4, "num_hidden_layers": 1}),
    "mixtral-tied-vocab-275": ("mixtral", {"tie_word_embeddings": True, "vocab_size": 275}),
    "mixtral-untied-vocab-301": ("mixtral", {"vocab_size": 301}),
    "mixtral-hidden-72-head-dim-24": (
        "mixtral",
        {"hidden_size": 72, "num_attention_heads": 3, "head_dim": 24, "num_key_value_heads": 1},
    ),
    "mixtral-hidden-derived-head-dim": ("mixtral", {"hidden_size": 96, "head_dim": None, "num_attention_heads": 6}),
    "mixtral-sliding-window": ("mixtral", {"sliding_window": 5}),
    "mixtral-llama3": ("mixtral", {"rope_parameters": _LLAMA3}),
    "mixtral-1-expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3-plain": ("qwen3_moe", {}),
    "qwen3-3-kv-heads-attention-bias": (
        "qwen3_moe",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "attention_bias": True},
    ),
    "qwen3-5-experts-intermediate-48": (
        "qwen3_moe",
        {"num_experts": 5, "moe_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3-top-1-not-renormalised": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3-top-all-1-layer": ("qwen3_moe", {"num_experts_per_tok": 4, "num_hidden_layers": 1}),
    "qwen3-tied-vocab-275": ("qwen3_moe", {"tie_word_embeddings": True, "vocab_size": 275}),
    "qwen3-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 80},
    ),
    "qwen3-all-dense": ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    "qwen3-sliding-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3-unused-window": ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 3}),
    "qwen3-yarn": ("qwen3_moe", {"rope_parameters": _YARN}),
    "minimax-plain": ("minimax_m2", {}),
    "minimax-3-kv-heads-of-20": (
        "minimax_m2",
        {
            **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 20, "hidden_size": 72},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        },
    ),
    "minimax-19-experts-top-3-whole-rotary": (
        "minimax_m2",
        {"num_local_experts": 19, "num_experts_per_tok": 3, "intermediate_size": 40, "rope_parameters": _DEFAULT},
    ),
    "minimax-top-all-tied-vocab-275": (
        "minimax_m2",
        {"num_experts_per_tok": 6, "tie_word_embeddings": True, "vocab_size": 275},
    ),
    "minimax-partial-yarn": ("minimax_m2", {"rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}}),
    "gpt-oss-plain": ("gpt_oss", {}),
    "gpt-oss-odd-shapes": (
        "gpt_oss",
        {
            **{
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 24,
                "hidden_size": 72,
                "vocab_size": 301,
            },
            **{"intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3},
        },
    ),
    "gpt-oss-tight-clamp-no-attention-bias": (
        "gpt_oss",
        {"swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False, "rope_parameters": _DEFAULT},
    ),
    "gpt-oss-full-attention-top-1": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 2, "num_experts_per_tok": 1},
    ),
    "muse-spark-plain": ("muse_spark", {}),
    "muse-spark-odd-shapes": (
        "muse_spark",
        {
            **{
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 20,
                "hidden_size": 72,
                "vocab_size": 301,
            },
            **{"moe_hidden_size": 40, "moe_intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 3},
            **{"num_hidden_layers": 5, "routed_scaling_factor": 2.5, "sliding_window": 3},
        },
    ),
    "muse-spark-dense-layers-biases": (
        "muse_spark",
        {
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "attention_bias": True,
            "moe_hidden_size": 80,  # wider than the model
            "final_logit_softcapping": 3.0,
            "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0],
        },
    ),
    "qwen3-linear-hidden-80-head-dim-8": ("qwen3_moe", {"rope_parameters": _LINEAR, "hidden_size": 80, "head_dim": 8}),
}


def make_case(folder: Path, case: str, **options: Any) -> Path:
    """`make_checkpoint` of one of CASES; `options` win over the case's own."""
    family, overrides = CASES[case]
    return make_checkpoint(folder, family, **{**overrides, **options})


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a complete random checkpoint in the Hugging Face format into `folder` and returns it.

    family: a key of CLASSES. dtype: float32 or bfloat16. max_shard_size: "20KB" makes several shards and an index.
    overrides: keys of config.json. The same arguments give the same tensors.
    """
    config = make_config(family, **overrides)
    model = CLASSES[family][1](config).eval()
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in saved:
                tensor.copy_(_random(family, name, tensor.shape, generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    _save_text_files(Path(folder), config.get_text_config().vocab_size)
    return Path(folder)


def make_config(family: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model; `overrides` are keys of config.json, or of its text_config."""
    keys = {**PLAIN[family], **overrides}
    if family != "muse_spark":
        return CLASSES[family][0](**keys)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    audio = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": keys["hidden_size"]}
    return transformers.MuseSparkConfig(
        text_config=keys, vision_config=vision, audio_config=audio, out_hidden_size=64, projector_hidden_size=8
    )


def _random(family: str, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep activations near 1, so that no part of the model is too faint to be tested."""
    x = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        centered = family == "muse_spark" and not name.endswith("language_model.norm.weight")
        return 0.2 * x + (0 if centered else 1)
    if name.endswith(("sinks", "residual_gate.gate")):
        return x if name.endswith("sinks") else 0.3 * x
    if name.endswith("bias"):
        return 0.3 * x
    if name.endswith("embed_tokens.weight"):
        return 0.3 * x  # fainter than what layers add, or a tied head would only repeat its input
    # gpt-oss stores its experts [in, out].
    x = x / math.sqrt(shape[-2] if family == "gpt_oss" and len(shape) == 3 else shape[-1])
    if name.endswith("q_proj.weight"):
        return 2 * x  # attention that looks at some positions more than at others
    # A router that decides clearly, and logits whose largest stands out: rounding must not change a choice.
    return x * 4 if name.endswith(("mlp.gate.weight", "mlp.router.weight", "lm_head.weight")) else x


def _save_text_files(folder: Path, vocab_size: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json: a byte-level BPE that nobody trained."""
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"vocab_size must be at least {SMALLEST_VOCAB} for a byte-level tokenizer, found {vocab_size}")
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [tuple(m.split(" ")) for m in _MERGES][: vocab_size - len(pieces)]
    pieces += ["".join(m) for m in merges]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Both this and the chat template begin with BOS, as in many published models.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<|im_end|>",
            "model_max_length": 256,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder by its published name, from all shards."""
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        state.update(load_file(shard))
    return state


def by_role(roles: Sequence[TensorRole], state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors by canonical name, fused ones taken apart."""
    return {
        r.name: np.ascontiguousarray((r.part.of(state[r.source][r.part.index]) if r.part else state[r.source]).numpy())
        for r in roles
    }


def by_source(roles: Sequence[TensorRole], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse: float32 arrays by canonical name under the checkpoint's names, fused tensors put together."""
    state = {r.source: np.zeros(r.source_shape, np.float32) for r in roles}
    for r in roles:
        target = state[r.source]
        (r.part.of(target[r.part.index]) if r.part else target)[...] = arrays[r.name]
    return state


def reference(folder: Path, weights: Mapping[str, np.ndarray] | None = None) -> Any:
    """The transformers model of a checkpoint in float32, eager throughout.

    weights: arrays by checkpoint tensor name that replace the checkpoint's own, such as dequantised ones.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    state = {name: tensor.float() for name, tensor in checkpoint_tensors(folder).items()}
    for name, array in (weights or {}).items():
        if name not in state or tuple(array.shape) != tuple(state[name].shape):
            raise ValueError(f"{name}: no tensor of shape {array.shape} in {folder}")
        state[name] = torch.tensor(np.asarray(array, dtype=np.float32))
    model, loading = CLASSES[config.model_type][1].from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if loading["missing_keys"] or loading["unexpected_keys"] or loading["mismatched_keys"]:
        raise ValueError(f"{folder} does not fill the model: {loading}")
    return model.eval()


def reference_logits(model: Any, tokens: Sequence[int], weights: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """float32 logits [len(tokens), vocab_size] of a checkpoint folder or of a `reference` model."""
    model = reference(model, weights) if isinstance(model, str | Path) else model
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def reference_hidden(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """float32 hidden_states [layers + 1, len(tokens), hidden_size] of a `reference` model: the embeddings, then what
    leaves every layer, of the last one behind the final norm."""
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
        return torch.stack([state[0] for state in out.hidden_states]).numpy()


def greedy(model: Any, prompt: Sequence[int], n: int, weights: Mapping[str, np.ndarray] | None = None) -> list[int]:
    """The n tokens that greedy decoding adds to `prompt`, stop tokens not heeded, ties to the lowest id."""
    model = reference(model, weights) if isinstance(model, str | Path) else model
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(reference_logits(model, tokens)[-1])))
    return tokens[len(prompt) :]
