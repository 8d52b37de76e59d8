"""Rotary embeddings reduced to their tables: rope_theta and its scalings -> inv_freq and attention_factor.

Every step is rounded to float32 where transformers rounds, so that the tables agree with it; only the power is
computed in float64 first, which makes it the nearest float32 on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mkpack.errors import nearest
from mkpack.spec import RopeSpec

if TYPE_CHECKING:
    import numpy as np

    from mkpack.models.common import Config

# Keys of each rope_type beside rope_type and rope_theta: required, optional.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


def rope(
    c: Config, head_dim: int, max_position_embeddings: int, default_theta: float, partial: bool = False
) -> RopeSpec:
    """The table of rotary dimensions / 2 frequencies; problems are recorded in `c`.

    Reads rope_parameters (with rope_theta inside) and the older rope_theta + rope_scaling alike. partial: the family
    may rotate the first dimensions of a head only: partial_rotary_factor or rotary_dim says how many.
    """
    p = _parameters(c, default_theta)
    kind = p.pop("rope_type")
    if partial:
        head_dim = _rotary_dim(c, head_dim, p.pop("partial_rotary_factor", None))
    if not _checked(c, kind, p):
        return RopeSpec(inv_freq=(1.0,) * (head_dim // 2))
    p.setdefault("original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        return _spec(_llama3(p, head_dim))
    if kind == "yarn":
        return _spec(_yarn(p, head_dim), _yarn_attention_factor(p))
    return _spec(_inv_freq(p["rope_theta"], head_dim, p["factor"] if kind == "linear" else 1.0))


def rope_theta(c: Config, default_theta: float) -> Any:
    """The base of the rotary frequencies, however config.json spells it; problems are for `rope` to record."""
    return _parameters(type(c)(c.values), default_theta)["rope_theta"]


def _rotary_dim(c: Config, head_dim: int, inside: Any) -> int:
    """Dimensions of a head that are rotated. inside: partial_rotary_factor of rope_parameters; 2 when bad."""
    said = {"partial_rotary_factor in rope_parameters": inside, "partial_rotary_factor": c.get("partial_rotary_factor")}
    found: dict[str, int] = {}
    for name, factor in said.items():
        if factor is None:
            continue
        if not c.is_number(factor) or not 0 < factor <= 1:
            c.refuse(f"{name}: expected a number above 0 and at most 1, found {factor!r}", "partial_rotary_factor")
            return 2
        found[f"{name} = {factor}"] = int(head_dim * factor)
    if c.get("rotary_dim") is not None:
        found[f"rotary_dim = {c.get('rotary_dim')}"] = c.size("rotary_dim")
    if not found or not c.valid("rotary_dim", "head_dim"):
        return head_dim
    dims = set(found.values())
    if len(dims) > 1 or (dim := dims.pop()) % 2 or not 2 <= dim <= head_dim:
        c.refuse(f"{' and '.join(found)} of head_dim = {head_dim}: expected one even number of rotary dimensions")
        return 2
    return dim


def _parameters(c: Config, default_theta: float) -> dict[str, Any]:
    """rope_type, rope_theta and the scaling's own keys, whichever way config.json spells them."""
    theta = c.get("rope_theta")
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        value = c.get(name)
        if isinstance(value, dict):
            p = {k: v for k, v in value.items() if v is not None}
            old = p.pop("type", "default")
            p.setdefault("rope_type", old)
            if theta is not None and p.setdefault("rope_theta", theta) != theta:
                c.refuse(f"rope_theta = {theta} and {name}.rope_theta = {p['rope_theta']} disagree")
            p.setdefault("rope_theta", default_theta)
            if value:
                found.append(p)
        elif value is not None:
            c.refuse(f"{name}: expected a section, found {value!r}")
    if len(found) == 2 and found[0] != found[1]:
        c.refuse("rope_scaling and rope_parameters are two spellings of one key and disagree")
    p = found[0] if found else {"rope_type": "default", "rope_theta": default_theta if theta is None else theta}
    # Beside the section, it wins over the value inside, as in transformers.
    if c.get("original_max_position_embeddings") is not None and p["rope_type"] in ("llama3", "yarn"):
        p["original_max_position_embeddings"] = c.size("original_max_position_embeddings")
    return p


def _checked(c: Config, kind: Any, p: dict[str, Any]) -> bool:
    """Whether the parameters of this rope_type are all there, known and of the right kind."""
    before = len(c.problems)
    if p.pop("partial_rotary_factor", 1) != 1:
        c.refuse("partial_rotary_factor (in rope_parameters) is not supported; expected 1")
    if any(isinstance(value, dict) for value in p.values()):
        c.refuse("rope_parameters per layer type are not supported; expected one flat section")
        return False
    if kind not in _KEYS:
        known = ", ".join(_KEYS)
        c.refuse(f"rope_type {kind!r} is not supported{nearest(str(kind), _KEYS)}; expected one of {known}")
        return False
    required, optional = _KEYS[kind]
    for key in required:
        if key not in p:
            c.refuse(f"{key} is missing in rope_parameters (rope_scaling); rope_type {kind} needs it")
    for key, value in p.items():
        if key not in (*required, *optional, "rope_theta"):
            c.refuse(f"{key} in rope_parameters (rope_scaling) is not supported for rope_type {kind}")
        elif key == "truncate":
            if not isinstance(value, bool):
                c.refuse(f"truncate: expected true or false, found {value!r}")
        else:
            # These three mean "not given" when they are 0.
            least = "at least 0" if key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") else "above 0"
            if not c.is_number(value) or value < 0 or (value == 0 and least == "above 0"):
                c.refuse(f"{key}: expected a number {least}, found {value!r}")
    if len(c.problems) > before:
        return False
    if kind == "llama3" and p["high_freq_factor"] <= p["low_freq_factor"]:
        c.refuse(f"high_freq_factor = {p['high_freq_factor']} must be above low_freq_factor = {p['low_freq_factor']}")
        return False
    if p["rope_theta"] <= 1:
        c.refuse(f"rope_theta: expected a number above 1, found {p['rope_theta']!r}")
        return False
    return True


def _spec(inv_freq: np.ndarray, attention_factor: float = 1.0) -> RopeSpec:
    import numpy as np

    return RopeSpec(inv_freq=tuple(inv_freq.tolist()), attention_factor=float(np.float32(attention_factor)))


def _pos_freqs(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim), float32 [head_dim / 2]."""
    import numpy as np

    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)


def _inv_freq(theta: float, head_dim: int, factor: float) -> np.ndarray:
    import numpy as np

    return np.float32(1) / _pos_freqs(theta, head_dim) / np.float32(factor)


def _llama3(p: dict[str, Any], head_dim: int) -> np.ndarray:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    import numpy as np

    f32 = np.float32
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    old_context = p["original_max_position_embeddings"]
    inv_freq = _inv_freq(p["rope_theta"], head_dim, 1.0)
    # scalar / tensor is reciprocal * scalar in the reference; one rounding more than a division.
    wavelen = f32(1) / inv_freq * f32(2 * math.pi)
    long, short = wavelen > f32(old_context / low), wavelen < f32(old_context / high)
    scaled = np.where(long, inv_freq / f32(factor), inv_freq)
    smooth = (f32(1) / wavelen * f32(old_context) - f32(low)) / f32(high - low)
    blended = (f32(1) - smooth) * scaled / f32(factor) + smooth * scaled
    return np.where(long | short, scaled, blended)


def _yarn(p: dict[str, Any], head_dim: int) -> np.ndarray:
    """Between the frequencies that turn beta_fast and beta_slow times in the old context, a linear ramp."""
    import numpy as np

    f32 = np.float32
    pos_freqs = _pos_freqs(p["rope_theta"], head_dim)
    kept, scaled = f32(1) / pos_freqs, f32(1) / (f32(p["factor"]) * pos_freqs)

    def dimension(rotations: float) -> float:
        turns = p["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - f32(low)) / f32(high - low), f32(0), f32(1))
    keep = f32(1) - ramp
    return scaled * (f32(1) - keep) + kept * keep


def _yarn_attention_factor(p: dict[str, Any]) -> float:
    given = p.get("attention_factor")
    if given is not None:
        return float(given)
    if p.get("mscale") and p.get("mscale_all_dim"):
        return _mscale(p["factor"], p["mscale"]) / _mscale(p["factor"], p["mscale_all_dim"])
    return _mscale(p["factor"], 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
