"""What the CUDA kernel refuses, the section table of its blob, and the header that carries both."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise

import kernels
import pytest
from cuda_models import cuda_spec

from mkpack import abi, codegen, compile, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.layout import SECTION_ALIGN
from mkpack.layout_cuda import GRID, CudaLayout, cuda_refusals
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec, RopeSpec

MIX = kernels.precision("bf16", experts="nvfp4")
LIMITS = Limits(context=1000, tokens_per_step=16)


def test_the_shape_it_was_written_for_is_taken():
    spec = cuda_spec(moe={"intermediate_size": 768}, vocab_size=151936, layers=(LayerSpec(moe=True),) * 48)
    assert cuda_refusals(spec, MIX) == []
    layout = CudaLayout(spec)
    # 48 x 128 experts of 3 x 768 x 2048 NVFP4 weights at 4.5 bits.
    assert {s.name: s.nbytes for s in layout.sections}["experts"] == 48 * 128 * 3 * 768 * 2048 * 9 // 16
    assert layout.nbytes == pytest.approx(19.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 4096}, "hidden_size is 4096, the kernel takes 2048"),
        ({"num_attention_heads": 64}, "num_attention_heads is 64, the kernel takes 32"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, the kernel takes 4"),
        ({"head_dim": 64}, "head_dim is 64, the kernel takes 128"),
        ({"rope": RopeSpec(inv_freq=(1.0,) * 32)}, "rotary dimensions is 64, the kernel takes 128"),
        ({"vocab_size": 1001}, "vocab_size is 1001, the kernel takes multiples of 8"),
        ({"moe": {"num_experts": 64}}, "num_experts is 64, the kernel takes 128"),
        ({"moe": {"top_k": 4}}, "top_k is 4, the kernel takes 8"),
        ({"moe": {"intermediate_size": 1024}}, "moe intermediate_size is 1024, the kernel takes 512 or 768"),
        ({"moe": {"norm_topk_prob": False}}, "norm_topk_prob is False, the kernel takes True"),
        ({"qk_norm": False}, "no norm of q and k, the kernel takes models with one"),
        ({"qkv_bias": True}, "a bias of the qkv, the kernel takes none"),
        ({"o_bias": True}, "a bias of the output projection, the kernel takes none"),
        (
            {"layers": (LayerSpec(moe=True, sliding_window=5),) * 6},
            "layers with a sliding window (0, 1, 2, 3, ... 6 in all), the kernel takes full attention",
        ),
        (
            {"layers": (LayerSpec(moe=True), LayerSpec(moe=False)), "dense_intermediate_size": 64},
            "layers without experts (1), the kernel takes experts in every layer",
        ),
    ],
)
def test_what_it_cannot_do_is_named(changes, text):
    spec = cuda_spec(**changes)
    assert cuda_refusals(spec, MIX) == [text]
    with pytest.raises(ValueError) as e:
        CudaLayout(spec)
    assert str(e.value) == text


def test_everything_is_named_at_once():
    """The demo's kind of model, on two ranks, in other formats: nothing fits."""
    found = cuda_refusals(kernels.tiny_spec(), kernels.precision("fp8"), 2, "f32")
    for word in (
        "parallel.tp is 2",
        "hidden_size is 40",
        "num_attention_heads is 4",
        "num_key_value_heads is 2",
        "head_dim is 8",
        "rotary dimensions is 8",
        "vocab_size is 67",
        "num_experts is 5",
        "top_k is 2",
        "moe intermediate_size is 24",
        "no norm of q and k",
        "quantise.experts is fp8, the kernel takes nvfp4",
        "quantise.attention is fp8, the kernel takes bf16",
        "quantise.lm_head is fp8",
        "quantise.embeddings is fp8",
        "the routers' dtype is f32, the kernel takes bf16",
    ):
        assert sum(text.startswith(word) for text in found) == 1, word
    assert len(found) == 16


def test_sections_are_aligned_in_order_and_hold_every_tensor():
    spec = cuda_spec(layers=(LayerSpec(moe=True),) * 2)
    layout = CudaLayout(spec)
    assert [s.name for s in layout.sections] == [
        *("dense", "head", "experts", "expert_scales", "routers", "embedding", "norms")
    ]
    assert all(s.offset % SECTION_ALIGN == 0 for s in layout.sections) and layout.nbytes % SECTION_ALIGN == 0
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(layout.sections))
    assert layout.sections[-1].offset + layout.sections[-1].nbytes <= layout.nbytes
    held = {name for s in layout.sections for name in s.tensors}
    assert held == {role.name for role in kernels.roles(spec)}
    width = {"bf16": 16, "nvfp4": 4.5, "f32": 32}  # bits
    assert all(s.nbytes == s.rows * s.cols * width[s.format] / 8 for s in layout.sections)


def test_a_tied_head_is_stored_as_pages_too():
    layout = CudaLayout(cuda_spec(tie_word_embeddings=True))
    assert [s.name for s in layout.sections if "embed" in s.tensors] == ["head", "embedding"]


# -- the header --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", GRID)
def test_the_header_describes_the_model(target):
    layout = CudaLayout(cuda_spec())
    header = cuda_header(layout, LIMITS, target)
    assert "constexpr int kMaxContext = 1008;" in header and "constexpr int context = 1000;" in header
    assert f"constexpr int kGrid = {GRID[target]};" in header
    text = codegen.description(layout.spec, layout.sections, layout.nbytes, 1, LIMITS, target)
    assert json.loads(text)["target"] == target and f'R"mk({text})mk"' in header


def test_targets_are_those_that_compile():
    assert GRID.keys() == compile.CUDA_TARGETS.keys()


def test_the_header_is_plain_cpp(tmp_path):
    """Without warnings, and with the numbers that went in."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    rope = RopeSpec(inv_freq=tuple(1 / (i + 1) for i in range(64)), attention_factor=1.25)
    (tmp_path / "model.h").write_text(cuda_header(CudaLayout(cuda_spec(rope=rope)), LIMITS, "sm_90a"))
    (tmp_path / "main.cpp").write_text(
        '#include "model.h"\n#include <cstdio>\nint main() {\n'
        '  printf("%s|%.9g|%.9g|%zu|%.9g|%d\\n", mk::model::description, mk::model::inv_freq[2],\n'
        "         mk::model::rope_attention_factor, sizeof mk::model::inv_freq, mk::kRmsEps, MK_ABI_VERSION);\n}\n"
    )
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{compile.sources()}", f"-I{tmp_path}"]
    subprocess.run([*compiler.command, *flags, tmp_path / "main.cpp", "-o", tmp_path / "main"], check=True)
    text = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.strip()
    description, third, factor, size, eps, version = text.split("|")
    assert json.loads(description)["context"] == 1000
    assert (float(third), float(factor), int(size)) == (pytest.approx(1 / 3, rel=1e-7), 1.25, 64 * 4)
    assert float(eps) == pytest.approx(1e-5, rel=1e-7) and int(version) == abi.ABI_VERSION
