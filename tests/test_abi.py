"""mkpack/abi.py against csrc/abi.h: the compiler checks the structs, a regex reads the rest."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkpack import abi, platform

HEADER = Path(__file__).parent.parent / "csrc" / "abi.h"
CODE = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)

# C spelling -> ctypes, for parameters and results.
TYPES = {
    "void": None,
    "const char*": ctypes.c_char_p,
    "int32_t": ctypes.c_int32,
    "double*": ctypes.POINTER(ctypes.c_double),
    "float*": ctypes.POINTER(ctypes.c_float),
    "void*": ctypes.c_void_p,
    "mk_model*": ctypes.c_void_p,
    "const mk_model*": ctypes.c_void_p,
    "mk_model**": ctypes.POINTER(ctypes.c_void_p),
    "const int32_t*": ctypes.POINTER(ctypes.c_int32),
    "const mk_options*": ctypes.POINTER(abi.Options),
    "const mk_request*": ctypes.POINTER(abi.Request),
    "mk_result*": ctypes.POINTER(abi.Result),
    "mk_timing*": ctypes.POINTER(abi.Timing),
    "mk_rank_timing*": ctypes.POINTER(abi.RankTiming),
    "mk_trace_shape*": ctypes.POINTER(abi.TraceShape),
    "int64_t*": ctypes.POINTER(ctypes.c_int64),
    "uint8_t*": ctypes.POINTER(ctypes.c_uint8),
    "const uint8_t*": ctypes.POINTER(ctypes.c_uint8),
    "const mk_placement*": ctypes.POINTER(abi.Placement),
    "mk_token_callback": abi.TokenCallback,
}


def declared_functions() -> dict[str, tuple[str, list[str]]]:
    found = {}
    body = CODE.split('extern "C" {', 1)[1]
    for result, name, arguments in re.findall(r"^([\w ]+?[\w*])\s+\**(mk_\w+)\(([^)]*)\);", body, flags=re.M | re.S):
        parameters = [re.sub(r"\s*\w+$", "", " ".join(p.split())) for p in arguments.split(",") if p.strip() != "void"]
        found[name] = (result.strip(), parameters)
    return found


def compile_header(tmp_path: Path, header: str) -> subprocess.CompletedProcess[str]:
    found = platform.compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "abi.h").write_text(header)
    (tmp_path / "asserts.cpp").write_text('#include "abi.h"\n' + abi.c_asserts())
    command = [*found.command, "-std=c++17", "-fsyntax-only", str(tmp_path / "asserts.cpp")]
    return subprocess.run(command, capture_output=True, text=True)


def test_asserts_hold_for_the_header(tmp_path):
    done = compile_header(tmp_path, HEADER.read_text())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int32_t context; ", "int64_t context; ", "offset of mk_options.flags differs"),
        ("float temperature; ", "int32_t temperature; ", "type of mk_request.temperature differs"),
        ("double wait_limit_s; ", "double wait_limit_s; double more; ", "size of mk_options differs"),
        ("uint64_t seed; ", "int64_t seed; ", "type of mk_request.seed differs"),
        ("#define MK_ABI_VERSION 2", "#define MK_ABI_VERSION 3", "MK_ABI_VERSION differs"),
    ],
)
def test_a_changed_header_does_not_compile(tmp_path, old, new, message):
    text = HEADER.read_text()
    assert old in text
    done = compile_header(tmp_path, text.replace(old, new))
    assert done.returncode != 0
    assert message in done.stderr


def test_every_declared_function_is_bound_with_its_types():
    declared = declared_functions()
    assert len(declared) == len(re.findall(r"^[^\n]*\bmk_\w+\([^*]", CODE.split('extern "C" {', 1)[1], flags=re.M))
    assert declared.keys() == abi.FUNCTIONS.keys()
    for name, (result, parameters) in declared.items():
        expected = (TYPES[result], tuple(TYPES[p] for p in parameters))
        assert abi.FUNCTIONS[name] == expected, name


def test_every_constant_equals_the_header():
    values = {k: int(v) for k, v in re.findall(r"\b(MK_\w+) = (-?\d+)", CODE)}
    values |= {k: int(v) for k, v in re.findall(r"#define (MK_\w+) (\d+)", CODE)}
    assert len(values) >= 12
    assert {k: getattr(abi, k.removeprefix("MK_")) for k in values} == values


def test_callback_type_equals_the_header():
    assert "typedef int32_t (*mk_token_callback)(void* user, int32_t token);" in " ".join(CODE.split())
    assert abi.TokenCallback._restype_ is ctypes.c_int32
    assert abi.TokenCallback._argtypes_ == (ctypes.c_void_p, ctypes.c_int32)


def test_a_kernel_may_lack_what_is_optional_and_nothing_else():
    def library(names: set[str]) -> SimpleNamespace:
        return SimpleNamespace(**{name: SimpleNamespace() for name in names})

    required = set(abi.FUNCTIONS) - abi.OPTIONAL
    assert abi.OPTIONAL and abi.OPTIONAL < set(abi.FUNCTIONS)
    bound = abi.bind(library(required))  # type: ignore[arg-type]
    assert bound.mk_step.restype is ctypes.c_int32 and not hasattr(bound, "mk_trace")
    with pytest.raises(AttributeError, match="mk_step"):
        abi.bind(library(required - {"mk_step"}))  # type: ignore[arg-type]


def test_bind_names_a_missing_function():
    with pytest.raises(AttributeError, match="mk_describe"):
        abi.bind(ctypes.CDLL(None))
