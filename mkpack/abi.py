"""ctypes mirror of csrc/abi.h.

Every compiled model includes the text of `c_asserts()`, so a struct that differs from the header does not compile.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from typing import Any

ABI_VERSION = 2
MAX_STEP_TOKENS = 16
ADDRESS_BYTES = 128

OK = 0
ERR_ARGUMENT = -1
ERR_CONTEXT = -2
ERR_TIMEOUT = -3
ERR_MEMORY = -4
ERR_DEVICE = -5

OPTION_RANKS = 1
OPTION_LOOPED = 2
SINCE_RANKS = 2  # the first ABI version whose kernels know it

STOP_TOKEN = 0
STOP_LENGTH = 1
STOP_CONTEXT = 2
STOP_CANCELLED = 3

# mk_token_callback: int32_t (*)(void* user, int32_t token); non-zero ends the generation.
TokenCallback = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32)


class Options(ctypes.Structure):
    """mk_options: what mk_create needs."""

    _fields_ = [
        ("weights", POINTER(c_void_p)),
        ("weights_bytes", c_uint64),
        ("num_ranks", c_int32),
        ("threads", c_int32),
        ("context", c_int32),
        ("flags", c_int32),
        ("wait_limit_s", c_double),
    ]


class Placement(ctypes.Structure):
    """mk_placement: which of the ranks this process has."""

    _fields_ = [("first_rank", c_int32), ("num_ranks", c_int32), ("device", c_int32), ("pad", c_int32)]


class Request(ctypes.Structure):
    """mk_request: how mk_generate chooses tokens and when it ends."""

    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("top_k", c_int32),
        ("max_new_tokens", c_int32),
        ("seed", c_uint64),
        ("stop_tokens", POINTER(c_int32)),
        ("num_stop_tokens", c_int32),
        ("pad", c_int32),
    ]


# Its fields that say what they say by themselves.
REQUEST_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_new_tokens", "seed")


class Result(ctypes.Structure):
    """mk_result: what mk_generate did."""

    _fields_ = [
        ("stop_reason", c_int32),
        ("num_new_tokens", c_int32),
        ("num_prompt_tokens", c_int32),
        ("pad", c_int32),
        ("prefill_s", c_double),
        ("decode_s", c_double),
    ]


class Timing(ctypes.Structure):
    """mk_timing: what mk_time_step found."""

    _fields_ = [("step_s", c_double), ("experts", c_double)]


class RankTiming(ctypes.Structure):
    """mk_rank_timing: what mk_time_rank found."""

    _fields_ = [("step", Timing), ("without", Timing), ("exchanges", c_int64), ("bytes", c_int64)]


class TraceShape(ctypes.Structure):
    """mk_trace_shape: what mk_trace traces."""

    _fields_ = [("layers", c_int32), ("rows", c_int32), ("sms", c_int32), ("pad", c_int32), ("names", c_char_p)]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "mk_options": Options,
    "mk_placement": Placement,
    "mk_request": Request,
    "mk_result": Result,
    "mk_timing": Timing,
    "mk_rank_timing": RankTiming,
    "mk_trace_shape": TraceShape,
}

# name -> (result, arguments). mk_model* is an opaque c_void_p.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mk_describe": (c_char_p, ()),
    "mk_last_error": (c_char_p, ()),
    "mk_create": (c_int32, (POINTER(Options), POINTER(c_void_p))),
    "mk_destroy": (None, (c_void_p,)),
    "mk_length": (c_int32, (c_void_p,)),
    "mk_truncate": (c_int32, (c_void_p, c_int32)),
    "mk_step": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(c_float), c_int32)),
    "mk_generate": (
        c_int32,
        (c_void_p, POINTER(c_int32), c_int32, POINTER(Request), TokenCallback, c_void_p, POINTER(Result)),
    ),
    "mk_cancel": (None, (c_void_p,)),
    "mk_read_bandwidth": (c_int32, (c_void_p, POINTER(c_double))),
    "mk_time_step": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(Timing))),
    "mk_trace": (
        c_int32,
        (c_void_p, POINTER(c_int32), c_int32, c_int32, POINTER(c_int64), POINTER(TraceShape)),
    ),
    "mk_step_taps": (
        c_int32,
        (
            *(c_void_p, POINTER(c_int32), c_int32, POINTER(c_float), c_int32),
            *(POINTER(c_int32), c_int32, POINTER(c_float)),
        ),
    ),
    "mk_time_rank": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(RankTiming))),
    "mk_create_placed": (c_int32, (POINTER(Options), POINTER(Placement), POINTER(c_void_p))),
    "mk_addresses": (c_int32, (c_void_p, POINTER(c_uint8))),
    "mk_connect": (c_int32, (c_void_p, POINTER(c_uint8))),
}
OPTIONAL = frozenset(  # those that a kernel may lack
    {"mk_time_step", "mk_trace", "mk_step_taps", "mk_time_rank", "mk_create_placed", "mk_addresses", "mk_connect"}
)

# How the header spells the types of struct fields.
_C_TYPES: dict[Any, str] = {
    c_int32: "int32_t",
    c_int64: "int64_t",
    c_uint64: "uint64_t",
    c_float: "float",
    c_double: "double",
    POINTER(c_int32): "const int32_t*",
    POINTER(c_void_p): "const void* const*",
    c_char_p: "const char*",
    Timing: "mk_timing",
}


def bind(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument and result types of every function of the ABI on `lib` and returns it.

    Raises AttributeError, naming the function, when `lib` lacks one that is not optional.
    """
    for name, (result, arguments) in FUNCTIONS.items():
        if name in OPTIONAL and not hasattr(lib, name):
            continue
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


def c_asserts() -> str:
    """C++ text that compiles, after csrc/abi.h, only when the header's structs and constants equal this file's."""
    lines = ["#include <cstddef>", "#include <type_traits>"]
    for macro, value in (
        ("MK_ABI_VERSION", ABI_VERSION),
        ("MK_MAX_STEP_TOKENS", MAX_STEP_TOKENS),
        ("MK_ADDRESS_BYTES", ADDRESS_BYTES),
    ):
        lines.append(f'static_assert({macro} == {value}, "{macro} differs from mkpack/abi.py");')
    for name, struct in STRUCTS.items():
        differs = "differs from mkpack/abi.py"
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name} {differs}");')
        for field, ctype in struct._fields_:  # type: ignore[misc]
            offset = getattr(struct, field).offset
            lines.append(
                f'static_assert(offsetof({name}, {field}) == {offset}, "offset of {name}.{field} {differs}");\n'
                f"static_assert(std::is_same<decltype({name}::{field}), {_C_TYPES[ctype]}>::value,\n"
                f'              "type of {name}.{field} {differs}");'
            )
    return "\n".join(lines) + "\n"
