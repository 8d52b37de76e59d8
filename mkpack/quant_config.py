"""What a checkpoint's metadata says of its formats, to be held against what its tensors are. Nothing is built on it,
but for the size of fp8 blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mkpack import prequantised
from mkpack.errors import some
from mkpack.prequantised import FP8_BLOCK
from mkpack.shard import TensorInfo
from mkpack.spec import TensorRole

HF_QUANT_CONFIG = "hf_quant_config.json"
# modelopt's names of what it exports; W4A16 and AWQ differ in activations and in tensors beside the weight.
_ALGORITHMS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8", "awq": "int4", "int4": "int4"}
# Methods that say what wrote a checkpoint and leave to other keys what it wrote.
_CONTAINERS = ("modelopt", "compressed-tensors")


@dataclass(frozen=True)
class Claim:
    """One place's word on formats. default: of every linear layer; layers: of layers by name or pattern; excluded:
    patterns of what stays as it was."""

    where: str
    default: str = "plain"
    layers: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()

    def scheme(self, module: str) -> str:
        """What the weight of a module is said to be: a `prequantised.Scheme` or the name of another format."""
        if any(_matches(pattern, module) for pattern in self.excluded):
            return "plain"
        return next((s for pattern, s in self.layers.items() if _matches(pattern, module)), self.default)


def claims(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> list[Claim]:
    """Every claim there is, of config.json and of hf_quant_config.json. What cannot be understood claims nothing."""
    found = []
    if section := _section(config):
        found.append(_claim("config.json", section))
    inner = (hf_quant_config or {}).get("quantization")
    if isinstance(inner, dict):
        found.append(_claim(HF_QUANT_CONFIG, inner))
    return found


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in fp8-block checkpoints: weight_block_size, by default 128 by 128."""
    sizes = _section(config).get("weight_block_size")
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes):
        return sizes[0], sizes[1]
    return FP8_BLOCK


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section on quantisation, which some checkpoints keep with the text model's keys; {} when there is none."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(section := place.get(key), dict):
                return section
    return {}


def _claim(where: str, section: Mapping[str, Any]) -> Claim:
    excluded: list[str] = []
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
        excluded += _strings(section.get(key))
    layers: dict[str, str] = {}
    listed = section.get("quantized_layers")
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        layers[name] = _algorithm(entry.get("quant_algo")) if isinstance(entry, dict) else "unknown"
    default = "plain"
    algorithm = section.get("quant_algo")
    groups = section.get("config_groups")
    if layers:
        pass  # MIXED_PRECISION: what is not listed is not quantised
    elif isinstance(algorithm, str):
        default = _algorithm(algorithm)
    elif isinstance(groups, dict):
        for group in groups.values():
            scheme = _weights(group.get("weights") if isinstance(group, dict) else None)
            for target in _strings(group.get("targets")) if isinstance(group, dict) else ():
                if target == "Linear":
                    default = scheme
                else:
                    layers[target] = scheme
    elif isinstance(method := section.get("quant_method"), str) and method not in _CONTAINERS:
        default = _algorithm(method)
        excluded.append("lm_head")  # as transformers does, said or not
    return Claim(where, default, layers, tuple(excluded))


def _algorithm(name: object) -> str:
    text = str(name).lower()
    return next((scheme for part, scheme in _ALGORITHMS.items() if part in text), text)


def _weights(args: object) -> str:
    """Scheme of the weights of a group in compressed-tensors' words."""
    if not isinstance(args, dict):
        return "plain"
    kind, bits, group = args.get("type"), args.get("num_bits"), args.get("group_size")
    if kind == "float" and bits == 4:
        return "mxfp4" if group == 32 else "nvfp4"
    return "fp8" if kind == "float" and bits == 8 else f"{kind}{bits}"


def _strings(value: object) -> list[str]:
    return [x for x in value if isinstance(x, str)] if isinstance(value, list) else []


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)


def disagreements(found: Iterable[Claim], roles: Iterable[TensorRole], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """A line for every way in which a claim and the tensors of `roles` differ. The tensors are what is built.

    Embeddings are left out: no format calls them linear layers. So are tensors that are missing.
    """
    stored: dict[str, str] = {}
    for role in roles:
        if role.precision not in (None, "embeddings") and (where := prequantised.find(role.source, tensors)):
            stored[role.source.removesuffix(".weight")] = where.scheme
    lines = []
    sources = list(found)
    for claim in sources:
        different: dict[tuple[str, str], list[str]] = {}
        for module, scheme in stored.items():
            if (said := claim.scheme(module)) != scheme:
                different.setdefault((said, scheme), []).append(module)
        names = {claim.default, *claim.layers.values()} - {"plain"}
        if names and not different and not any(scheme != "plain" for scheme in stored.values()):
            lines.append(
                f"{claim.where} says {', '.join(sorted(names))} and excludes every matrix of the model: nothing in "
                "this checkpoint is quantised"
            )
        for (said, scheme), modules in different.items():
            lines.append(
                f"{claim.where} says {_words(said)}, the tensors are {_words(scheme)} and are believed: "
                f"{len(modules)} matrices, {some(modules)}"
            )
    quantised = [module for module, scheme in stored.items() if scheme != "plain"]
    if quantised and not sources:
        kinds = ", ".join(sorted({stored[module] for module in quantised}))
        lines.append(
            f"no quantization_config and no {HF_QUANT_CONFIG}, yet {len(quantised)} matrices are {kinds} by their "
            f"tensors, which are believed: {some(quantised)}"
        )
    return lines


def _words(scheme: str) -> str:
    return "not quantised" if scheme == "plain" else scheme
