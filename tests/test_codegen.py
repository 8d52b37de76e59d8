"""The generated header: exact numbers, asserted sizes, and a description that changes with all it vouches for."""

from __future__ import annotations

import json
import re
import subprocess

import kernels
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_layout import layouts

from mkpack import abi, codegen, compile, platform
from mkpack.layout import Layout
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec, RopeSpec

LIMITS = Limits(context=128, tokens_per_step=16)
SPEC = kernels.tiny_spec(qk_norm=True, layers=[LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=7)])


def header(spec=SPEC, limits=LIMITS, target="x86-64-v3", tp=1, **precision) -> str:
    return codegen.model_header(Layout(spec, kernels.precision(**precision), tp), limits, target)


def check(text: str, folder) -> subprocess.CompletedProcess[str]:
    """Compiles the header alone, for its asserts."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "model.h").write_text(text)
    (folder / "all.cpp").write_text('#include "model.h"\n')
    command = [*compiler.command, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    return subprocess.run(
        [*command, f"-I{compile.sources()}", f"-I{folder}", str(folder / "all.cpp")], capture_output=True, text=True
    )


def test_the_header_compiles_for_every_kind_of_model(tmp_path):
    dense = kernels.tiny_spec(
        layers=[LayerSpec(moe=False)], moe=None, dense_intermediate_size=24, tie_word_embeddings=True
    )
    for text in (header(), header(dense, default="nvfp4"), header(tp=2, default="fp8"), header(lm_head="f32")):
        done = check(text, tmp_path)
        assert done.returncode == 0, done.stderr
        assert abi.c_asserts() in text


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "nvfp4"])
def test_a_wrong_tile_size_does_not_compile(fmt, tmp_path):
    text = header(experts=fmt)
    found = re.search(rf"Fmt::{fmt}, 3\) == (\d+)\);", text)
    assert found
    wrong = text.replace(found[0], found[0].replace(found[1], str(int(found[1]) + 64)))
    done = check(wrong, tmp_path)
    assert done.returncode and "static assertion failed" in done.stderr and f"Fmt::{fmt}, 3" in done.stderr


def test_a_changed_struct_does_not_compile(tmp_path):
    text = header()
    wrong = text.replace("sizeof(mk_options) == ", "sizeof(mk_options) == 1")
    assert wrong != text
    done = check(wrong, tmp_path)
    assert done.returncode and "size of mk_options differs" in done.stderr


def floats(text: str, name: str) -> np.ndarray:
    found = re.search(rf"inline constexpr float {name}(?:\[\])? = (.*);", text)
    assert found
    return np.array([float.fromhex(x) for x in re.findall(r"static_cast<float>\(([^)]+)\)", found[1])], np.float32)


@given(
    st.floats(2.0**-126, 2.0**100, width=32),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=9),
    st.floats(0.125, 8, width=32),
)
def test_floats_are_exact(eps, inv_freq, factor):
    rope = RopeSpec(inv_freq=tuple(inv_freq), attention_factor=factor)
    spec = SPEC.model_copy(update={"rms_norm_eps": eps, "rope": rope})
    text = header(spec)
    assert floats(text, "rms_norm_eps").tolist() == [eps]
    assert floats(text, "inv_freq").tolist() == inv_freq
    assert floats(text, "rope_attention_factor").tolist() == [factor]
    assert floats(text, "attention_scale").tolist() == [np.float32(SPEC.head_dim**-0.5)]


@given(layouts())
def test_offsets_are_those_of_the_layout(layout):
    text = codegen.model_header(layout, LIMITS, "x86-64-v4")
    fields = re.search(r"struct Layer \{\s+uint64_t ([^;]+);", text)
    rows = re.findall(r"^    \{(\d[^}]*)\},$", text, flags=re.M)
    assert fields and len(rows) == len(layout.spec.layers)
    for i, row in enumerate(rows):
        values = row.split(", ")
        layer = layout.spec.layers[i]
        flags = [str(layer.moe).lower(), str(layer.rope).lower()]
        assert values[-3:] == [str(layer.sliding_window or 0), *flags]
        for field, value in zip(fields[1].split(", "), values[:-3], strict=True):
            of_matrix = field.endswith("_scale") and field != "down_input_scale"
            name = f"layers.{i}." + (field[: -len("_scale")] + ".scale" if of_matrix else field)
            assert int(value) == (layout.section(name).offset if name in layout else 0)
    used = {int(v) for row in rows for v in row.split(", ")[:-3]}
    used |= {int(re.search(rf"uint64_t {n} = (\d+);", text)[1]) for n in ("embed", "embed_scale", "final_norm")}
    used |= {int(re.search(rf"uint64_t {n} = (\d+);", text)[1]) for n in ("lm_head", "lm_head_scale")}
    assert {s.offset for s in layout.sections} <= used  # no section that the kernel does not know


def describe(**changes) -> str:
    arguments = {"spec": SPEC, "tp": 1, "limits": LIMITS, "target": "x86-64-v3", "precision": {}, **changes}
    layout = Layout(arguments["spec"], kernels.precision(**arguments["precision"]), arguments["tp"])
    return codegen.description(layout, arguments["limits"], arguments["target"])


def test_a_description_differs_when_anything_does():
    changes = [
        {},
        {"target": "x86-64-v4"},
        {"tp": 2},
        {"limits": Limits(context=129, tokens_per_step=16)},
        {"limits": Limits(context=128, tokens_per_step=15)},
        {"precision": {"experts": "nvfp4"}},
        {"spec": SPEC.model_copy(update={"rms_norm_eps": 2e-5})},
        {"spec": SPEC.model_copy(update={"qk_norm": False})},
        {"spec": SPEC.model_copy(update={"layers": SPEC.layers[:1]})},
        {"spec": SPEC.model_copy(update={"moe": SPEC.moe.model_copy(update={"top_k": 3})})},
    ]
    texts = [describe(**c) for c in changes]
    assert len(set(texts)) == len(texts)
    assert describe() == describe()


def test_the_description_is_in_the_header_as_it_is():
    text = header()
    found = re.search(r'description\[\] = R"mk\((.*)\)mk";', text)
    assert found and found[1] == describe()
    facts = json.loads(found[1])
    assert (facts["abi"], facts["target"], facts["context"], facts["tp"]) == (abi.ABI_VERSION, "x86-64-v3", 128, 1)


def test_the_same_model_gives_the_same_header():
    assert header() == header()
    assert "/" not in re.sub(r"//.*|#include.*|common/format\.h", "", header()).replace("mkpack/abi.py", "")
