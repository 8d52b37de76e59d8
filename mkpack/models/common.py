"""Reading config.json strictly: what every family shares.

A `Config` hands out checked values and collects problems, so that one message names all of them. Keys that change
what a model computes are read or refused by name; keys that do not (dropout, initialisers, token ids) are left alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mkpack.errors import combine
from mkpack.models.rope import rope
from mkpack.spec import LayerSpec

# Keys that other models use to change the arithmetic, with the values that change nothing. A checkpoint of a
# supported family that carries one with another value is not what its model_type says.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (1,),
    "attn_logit_softcapping": (),
    "auto_map": ({},),
    "attention_sinks": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (0,),
    "is_encoder_decoder": (False,),
    "layer_rope_theta": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "n_group": (0, 1),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "qk_scale_factor": (1,),
    "residual_multiplier": (1,),
    "rotary_dim": (),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "swiglu_limit": (),
    "text_config": ({},),
    "topk_group": (0, 1),
    "use_parallel_residual": (False,),
}
_DTYPES = ("float32", "bfloat16", "float16")


class Config:
    """The values of one config.json. Readers return a harmless value for a bad key and record the problem."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self._bad: set[str] = set()

    def refuse(self, problem: str, *keys: str) -> None:
        """Records a problem; `keys` are then not `valid`."""
        self.problems.append(problem)
        self._bad.update(keys)

    def valid(self, *keys: str) -> bool:
        """Whether none of the keys read so far was bad: guards checks that compare several keys."""
        return self._bad.isdisjoint(keys)

    def check(self) -> None:
        """Raises UserError with every problem recorded."""
        if self.problems:
            raise combine("config.json: this model cannot be built", self.problems)

    def get(self, *names: str) -> Any:
        """The value under the first of several spellings of one key, None when absent or null."""
        given = {name: self.values[name] for name in names if self.values.get(name) is not None}
        values = list(given.values())
        if any(value != values[0] for value in values[1:]):
            found = ", ".join(f"{name} = {value!r}" for name, value in given.items())
            self.refuse(f"{' and '.join(given)} are two spellings of one key: expected equal values, found {found}")
        return values[0] if values else None

    @staticmethod
    def is_number(value: Any) -> bool:
        """Whether this is a number that float32 arithmetic can use: not a truth value, NaN, infinite or absurd."""
        return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30

    def size(self, *names: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most`; 1 when bad."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if type(value) is int and 1 <= value <= most:
            return value
        self._bad_value(names[0], f"a whole number from 1 to {most}", value)
        return 1

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; 1.0 when bad."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if self.is_number(value) and value > 0:
            return float(value)
        self._bad_value(name, "a number above 0", value)
        return 1.0

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self._bad_value(name, "true or false", value)
        return default

    def expect(self, name: str, *accepted: Any) -> None:
        """Refuses a key that is present with any value but null and these."""
        value = self.get(name)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted
        ):
            expected = f"expected {' or '.join(_json(a) for a in accepted)}" if accepted else "expected none"
            self.refuse(f"{name} = {_json(value)} is not supported; {expected}", name)

    def _bad_value(self, name: str, expected: str, value: Any) -> None:
        if value is None:
            self.refuse(f"{name} is missing; expected {expected}", name)
        else:
            self.refuse(f"{name}: expected {expected}, found {_json(value)}", name)


def text_config(config: dict[str, Any]) -> Config:
    """The text model of a multimodal config.json: text_config, and what is said beside it for all parts."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise combine("config.json: this model cannot be built", [f"text_config: expected a section, found {text!r}"])
    shared = ("architectures", "auto_map", "dtype", "torch_dtype")
    return Config({k: v for k, v in config.items() if k in shared} | text)


def _json(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decoder_fields(
    c: Config,
    default_theta: float,
    own: Collection[str] = (),
    partial_rotary: bool = False,
    architecture: str = "ForCausalLM",
) -> dict[str, Any]:
    """The `ModelSpec` fields that read alike in every family, after refusing what the family does not support.

    default_theta: the family's rope_theta where config.json has none. own: keys that change the arithmetic and that the
    family reads itself. partial_rotary: whether it may rotate a part of each head.
    """
    for name, accepted in _NEUTRAL.items():
        if name not in own:
            c.expect(name, *accepted)
    c.expect("hidden_act", "silu")
    dtype = c.get("dtype", "torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        c.refuse(f"dtype (torch_dtype) = {_json(dtype)} is not supported; expected {', '.join(_DTYPES)}")
    architectures = c.get("architectures")
    if architectures and not (isinstance(architectures, list) and str(architectures[0]).endswith(architecture)):
        c.refuse(f"architectures = {_json(architectures)} is not supported; expected a ...{architecture}")

    hidden_size, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads")
    if c.valid("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        c.refuse(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    head_dim = _head_dim(c, hidden_size, heads)
    max_position_embeddings = c.size("max_position_embeddings")
    return {
        "vocab_size": c.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": c.number("rms_norm_eps"),
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": c.flag("tie_word_embeddings", False),
        "rope": rope(c, head_dim, max_position_embeddings, default_theta, partial_rotary),
    }


def _head_dim(c: Config, hidden_size: int, heads: int) -> int:
    """head_dim, or hidden_size / num_attention_heads; even, since rope pairs its halves. 2 when bad."""
    if c.get("head_dim") is not None:
        head_dim = c.size("head_dim")
        said = f"head_dim = {head_dim}"
    else:
        if not c.valid("hidden_size", "num_attention_heads"):
            return 2
        if hidden_size % heads:
            sizes = f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}"
            c.refuse(f"head_dim is missing and {sizes}", "head_dim")
        head_dim = max(hidden_size // heads, 1)
        said = f"hidden_size / num_attention_heads = {head_dim}"
    if c.valid("head_dim") and head_dim % 2:
        c.refuse(f"head_dim must be even for rope, found {said}", "head_dim")
    return head_dim if c.valid("head_dim") else 2


def num_hidden_layers(c: Config) -> int:
    """The number of layers, bounded so that a slip does not fill the memory with layer descriptions."""
    return c.size("num_hidden_layers", most=10_000)


def top_k(c: Config, num_experts: int) -> int:
    """num_experts_per_tok, at most num_experts."""
    k = c.size("num_experts_per_tok")
    if c.valid("num_experts_per_tok", "num_experts", "num_local_experts") and k > num_experts:
        c.refuse(f"num_experts_per_tok = {k} is more than the number of experts, {num_experts}")
    return k


def layers(c: Config, moe: list[bool], sliding_window: int | None) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per entry of `moe`; every layer has the same window, as in transformers.

    transformers masks all layers of these families alike, whatever layer_types and max_window_layers say (earlier
    versions let the first max_window_layers layers see everything), so any value that says otherwise is refused.
    """
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    types = c.get("layer_types")
    if types is not None and types != [kind] * len(moe):
        c.refuse(f"layer_types = {_json(types)} is not supported; expected {kind} for each of the {len(moe)} layers")
    if sliding_window is not None:
        c.expect("max_window_layers", 0)
    return tuple(LayerSpec(moe=m, sliding_window=sliding_window) for m in moe)


def per_layer(c: Config, name: str, default: list[Any], accepted: tuple[Any, ...]) -> list[Any]:
    """A list with one of the `accepted` values for every layer; `default` where config.json has none, or a bad one."""
    values = c.get(name)
    if values is None or not c.valid("num_hidden_layers"):
        return default
    if isinstance(values, list) and len(values) == len(default) and all(v in accepted for v in values):
        return values
    expected = " or ".join(_json(a) for a in accepted)
    c.refuse(
        f"{name} = {_json(values)} is not supported; expected {expected} for each of the {len(default)} layers", name
    )
    return default


def layer_windows(c: Config, default: list[str]) -> list[int | None]:
    """The sliding window of each layer by layer_types, None for full attention. default: where config.json has none."""
    types = per_layer(c, "layer_types", default, ("full_attention", "sliding_attention"))
    window = c.size("sliding_window") if "sliding_attention" in types else None
    return [window if t == "sliding_attention" else None for t in types]
