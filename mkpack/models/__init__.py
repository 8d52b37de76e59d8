"""Model families: config.json -> `ModelSpec`. One file a family, one line of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mkpack.errors import UserError, nearest
from mkpack.models import gpt_oss, minimax_m2, mixtral, muse_spark, qwen3_moe
from mkpack.spec import ModelSpec, SourceNames

# model_type -> the family's reader.
FAMILIES: dict[str, Callable[[dict[str, Any]], tuple[ModelSpec, SourceNames]]] = {
    "gpt_oss": gpt_oss.spec,
    "minimax_m2": minimax_m2.spec,
    "mixtral": mixtral.spec,
    "muse_spark": muse_spark.spec,
    "qwen3_moe": qwen3_moe.spec,
}


def model_spec(config: dict[str, Any]) -> tuple[ModelSpec, SourceNames]:
    """What the model of a parsed config.json is, and how its checkpoint names the tensors.

    Raises UserError for a model_type that is not supported, and for every key of a supported one that is missing,
    malformed or says something that `ModelSpec` cannot: all in one message.
    """
    supported = f"supported: {', '.join(FAMILIES)}"
    if not isinstance(config, dict):
        raise UserError(f"config.json: expected a section with model_type and sizes, found {type(config).__name__}")
    model_type = config.get("model_type")
    if model_type is None:
        raise UserError(f"config.json: model_type is missing; {supported}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported{nearest(str(model_type), FAMILIES)}; {supported}"
        )
    return FAMILIES[model_type](config)
