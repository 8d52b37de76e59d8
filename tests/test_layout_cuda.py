"""What the CUDA kernel refuses, the section table of its blob, and the header that carries both."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise

import kernels
import pytest
from cuda_models import MIX, cuda_layout, cuda_spec, muse_spec, small_spec

from mkpack import abi, codegen, compile, platform
from mkpack.codegen_cuda import cuda_header
from mkpack.layout import SECTION_ALIGN
from mkpack.layout_cuda import GRID, CudaLayout, cuda_refusals, step_only
from mkpack.manifest import Limits
from mkpack.spec import LayerSpec, RopeSpec, SwigluSpec

LIMITS = Limits(context=1000, tokens_per_step=16)
SECTIONS = ["dense", "head", "experts", "expert_scales", "routers", "embedding", "norms"]
MOE = LayerSpec(moe=True)
CLAMPED = SwigluSpec(alpha=1.7, limit=7.0, up_offset=1.0)


def test_the_shape_of_qwen3_30b():
    layout = cuda_layout(cuda_spec(moe={"intermediate_size": 768}, vocab_size=151936, layers=(MOE,) * 48))
    # 48 x 128 experts of 3 x 768 x 2048 NVFP4 weights at 4.5 bits.
    assert {s.name: s.nbytes for s in layout.sections}["experts"] == 48 * 128 * 3 * 768 * 2048 * 9 // 16
    assert layout.nbytes == pytest.approx(19.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("spec", "router_format", "precision"),
    [
        (small_spec(hidden_size=64, num_attention_heads=1, num_key_value_heads=1, vocab_size=7), "f32", {}),
        (small_spec(hidden_size=576, head_dim=128, num_attention_heads=16, num_key_value_heads=1), "bf16", {}),
        (small_spec(hidden_size=2880, moe={"num_experts": 512, "top_k": 16, "intermediate_size": 2880}), "bf16", {}),
        (small_spec(qkv_bias=True, o_bias=True, moe={"norm_topk_prob": False}), "bf16", {"attention": "fp8"}),
        (
            small_spec(attention_sinks=True, moe={"expert_bias": True, "router_bias": True, "swiglu": CLAMPED}),
            "bf16",
            {},
        ),
        (
            small_spec(
                qk_norm=True,
                qk_norm_over="projection",
                moe={
                    **{"scoring": "sigmoid", "choice_bias": True, "router_scale": 0.5},
                    **{"norm_topk_eps": 1e-15, "routed_scaling_factor": 2.5},
                },
            ),
            "f32",
            {},
        ),
        (
            small_spec(tie_word_embeddings=True, layers=[LayerSpec(moe=True, sliding_window=5)]),
            "f32",
            {"lm_head": "fp8"},
        ),
        (muse_spec(), "f32", {"dense": "fp8"}),
        (small_spec(layers=(LayerSpec(moe=False), MOE), dense_intermediate_size=8), "bf16", {"dense": "bf16"}),
    ],
)
def test_other_shapes_are_taken(spec, router_format, precision):
    mix = {**MIX, **precision}
    for tp in (1,) if spec.num_attention_heads == 1 else (1, 2):
        assert cuda_refusals(spec, mix, tp, router_format) == []
        assert CudaLayout(spec, mix, router_format, tp).nbytes > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 200}, "hidden_size is 200, the kernel takes multiples of 64"),
        ({"head_dim": 96}, "head_dim is 96, the kernel takes 64 or 128"),
        (
            {"num_attention_heads": 34, "num_key_value_heads": 2},
            "num_attention_heads / num_key_value_heads is 34 / 2, the kernel takes 1 to 16 query heads a KV head",
        ),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads / num_key_value_heads is 4 / 3, the kernel takes 1 to 16 query heads a KV head",
        ),
        ({"rope": RopeSpec(inv_freq=(1.0,) * 33)}, "rotary dimensions is 66, the kernel takes 2 to head_dim (64)"),
        ({"rope": RopeSpec(inv_freq=())}, "rotary dimensions is 0, the kernel takes 2 to head_dim (64)"),
        ({"moe": {"num_experts": 513}}, "num_experts is 513, the kernel takes at most 512"),
        ({"moe": {"num_experts": 64, "top_k": 33}}, "top_k is 33, the kernel takes at most 32"),
        ({"moe": {"top_k": 4}}, "top_k is 4, the kernel takes at most 3"),
        (
            {"moe": {"num_experts": 512, "top_k": 32}},
            "num_experts * top_k is 16384, the kernel takes at most 8192",
        ),
        ({"moe": {"intermediate_size": 96}}, "moe intermediate_size is 96, the kernel takes multiples of 64"),
        ({"moe": {"choice_bias": True}}, "moe choice_bias is True, the kernel takes False where scoring is softmax"),
        ({"moe": {"norm_topk_eps": 1e-9}}, "moe norm_topk_eps is 1e-09, the kernel takes 0.0 where scoring is softmax"),
        ({"moe": {"hidden_size": 96}}, "moe hidden_size is 96, the kernel takes multiples of 64"),
        (
            {"layers": (MOE, LayerSpec(moe=False)), "dense_intermediate_size": 68},
            "dense intermediate_size is 68, the kernel takes multiples of 8",
        ),
    ],
)
def test_what_it_cannot_do_is_named(changes, text):
    spec = small_spec(**changes)
    assert cuda_refusals(spec, MIX) == [text]
    with pytest.raises(ValueError) as e:
        cuda_layout(spec)
    assert str(e.value) == text


def test_a_feature_that_is_new_to_the_spec_is_refused():
    """Nothing that a ModelSpec, MoeSpec or LayerSpec can say is ignored: what the kernel takes is listed here."""
    spec = small_spec()
    taken = {
        "": {
            *("attention_gate", "attention_out_norm", "attention_sinks", "centered_norms", "embed_norm", "logit_scale"),
            *("logit_softcap", "qk_norm_over", "qk_norm_weight", "qk_scale", "rope", "sandwich", "sliding_window"),
        },
        "moe ": {
            *("choice_bias", "expert_bias", "expert_norm_eps", "hidden_size", "norm_topk_eps", "routed_scaling_factor"),
            *("router_bias", "router_scale", "scoring", "swiglu"),
        },
    }
    assert not step_only(spec)
    for part, prefix in ((spec, ""), (spec.moe, "moe "), (spec.layers[0], "")):
        for name, field in type(part).model_fields.items():
            if field.is_required():
                continue
            changed = part.model_copy(update={name: "something else"})
            if part is spec.moe:
                whole = spec.model_copy(update={"moe": changed})
            elif part is spec:
                whole = changed
            else:
                whole = spec.model_copy(update={"layers": (changed, *spec.layers[1:])})
            assert step_only(whole), name
            if name in taken[prefix]:
                continue
            where = " of layers 0" if part is spec.layers[0] else ""
            assert any(t.startswith(f"{prefix}{name}{where} is something else") for t in cuda_refusals(whole, MIX)), (
                name
            )


def test_a_model_without_experts_is_refused():
    spec = small_spec(layers=(LayerSpec(moe=False),), dense_intermediate_size=64).model_copy(update={"moe": None})
    assert cuda_refusals(spec, MIX) == ["mlp of every layer is dense, the kernel takes models with experts"]


def test_formats_of_the_mlp_matter_only_where_it_has_matrices():
    assert cuda_refusals(small_spec(), {**MIX, "dense": "nvfp4"}) == []
    for spec in (muse_spec(), small_spec(layers=(LayerSpec(moe=False), MOE), dense_intermediate_size=64)):
        assert cuda_refusals(spec, {**MIX, "dense": "nvfp4"}) == [
            "quantise.dense is nvfp4, the kernel takes bf16 or fp8"
        ]
        assert step_only(spec)


def test_everything_is_named_at_once():
    """The demo's kind of model, on three ranks, in other formats."""
    found = cuda_refusals(kernels.tiny_spec(), kernels.precision("nvfp4", experts="fp8"), 3, "fp8")
    for word in (
        "parallel.tp is 3, the kernel takes 1, 2, 4 ranks",
        "hidden_size is 40",
        "head_dim is 8",
        "num_attention_heads * head_dim is 32",
        "moe intermediate_size is 24",
        "quantise.experts is fp8, the kernel takes nvfp4",
        "quantise.attention is nvfp4, the kernel takes bf16 or fp8",
        "quantise.lm_head is nvfp4, the kernel takes bf16 or fp8",
        "quantise.embeddings is nvfp4, the kernel takes bf16",
        "the routers' dtype is fp8, the kernel takes bf16 or f32",
    ):
        assert sum(text.startswith(word) for text in found) == 1, word
    assert len(found) == 10


@pytest.mark.parametrize(
    ("precision", "sections"),
    [
        ({}, SECTIONS),
        ({"attention": "fp8"}, [*SECTIONS[:4], "dense_scales", *SECTIONS[4:]]),
        ({"lm_head": "fp8"}, [*SECTIONS[:4], "head_scales", *SECTIONS[4:]]),
        ({}, [*SECTIONS, "mlp"]),
        ({"dense": "fp8"}, [*SECTIONS, "mlp", "mlp_scales"]),
    ],
)
def test_sections_are_aligned_in_order_and_hold_every_tensor(precision, sections):
    spec = small_spec(layers=2, qk_norm=True, qkv_bias=True, o_bias=True)
    if "mlp" in sections:
        spec = muse_spec(qkv_bias=True, o_bias=True)
    layout = cuda_layout(spec, "f32", **precision)
    assert [s.name for s in layout.sections] == sections
    assert all(s.offset % SECTION_ALIGN == 0 for s in layout.sections) and layout.nbytes % SECTION_ALIGN == 0
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(layout.sections))
    assert layout.sections[-1].offset + layout.sections[-1].nbytes <= layout.nbytes
    held = {name for s in layout.sections for name in s.tensors}
    assert held == {role.name for role in kernels.roles(spec)}
    assert all(s.nbytes == s.rows * 4 for s in layout.sections if s.format == "f32" and s.cols == 1)
    assert ("head" in layout) and ("nothing" not in layout)


def test_bytes_of_sections():
    """hidden 192, q 256, k and v 128 rows, 67 tokens: 192 columns of fp8 are padded to 256, the head's rows to 72."""
    spec = small_spec(layers=2, qk_norm=True, o_bias=True)
    bf16, fp8 = (
        {s.name: s.nbytes for s in layout.sections}
        for layout in (cuda_layout(spec), cuda_layout(spec, "f32", attention="fp8", lm_head="fp8"))
    )
    experts = 2 * 3 * 3 * 64 * 192 * 9 // 16
    assert bf16 == {
        "dense": 2 * (512 * 192 + 192 * 256) * 2,
        "head": 72 * 192 * 2,
        "experts": experts,
        "expert_scales": 2 * 3 * 16,
        "routers": 2 * 3 * 192 * 2,
        "embedding": 67 * 192 * 2,
        "norms": (2 * (192 + 192 + 64 + 64 + 192) + 192) * 4,
    }
    changed = {
        "dense": 2 * (512 * 256 + 192 * 256),
        "head": 72 * 256,
        "dense_scales": 2 * (512 + 192) * 4,
        "head_scales": 72 * 4,
        "routers": 2 * 3 * 192 * 4,
    }
    assert fp8 == {**bf16, **changed}


def test_bytes_of_dense_layers_and_narrow_experts():
    """hidden 192, q and its gate 256, k and v 128 rows, experts 128 wide, one dense layer of 72 of three: fp8 pads 192
    columns to 256, and 72 to 128."""
    bf16, fp8 = ({s.name: s.nbytes for s in cuda_layout(muse_spec(), dense=fmt).sections} for fmt in ("bf16", "fp8"))
    assert bf16["dense"] == 3 * (768 * 192 + 192 * 256) * 2
    assert bf16["experts"] == 2 * 3 * 3 * 64 * 128 * 9 // 16 and bf16["routers"] == 2 * 3 * 192 * 2
    assert bf16["norms"] == (3 * 5 * 192 + 2 * (2 * 128 + 4) + 192) * 4  # 3 choice biases take the place of 4
    assert bf16["mlp"] == (2 * (128 * 192 + 192 * 128) + 2 * 72 * 192 + 192 * 128) * 2
    assert fp8["mlp"] == 2 * (128 * 256 + 192 * 128) + 2 * 72 * 256 + 192 * 128
    assert fp8["mlp_scales"] == (2 * (128 + 192) + 2 * 72 + 192) * 4


def test_a_tied_head_is_stored_as_pages_too():
    layout = cuda_layout(small_spec(tie_word_embeddings=True))
    assert [s.name for s in layout.sections if "embed" in s.tensors] == ["head", "embedding"] and layout.tied
    fp8 = cuda_layout(small_spec(tie_word_embeddings=True), lm_head="fp8")
    assert [s.name for s in fp8.sections if "embed" in s.tensors] == ["head", "head_scales", "embedding"]
    assert not fp8.tied


def test_a_rank_holds_its_share():
    """hidden 192 is 12 units of 16 rows, experts 64 wide are 8 of 8, 67 tokens are 9 of 8: over eight ranks 2, 1 and 2,
    so that some hold zeros, and heads are 8 query heads over 2 KV heads: each KV head on four ranks."""
    spec = small_spec(num_attention_heads=8, o_bias=True, qkv_bias=True)
    layout = CudaLayout(spec, MIX, tp=8)
    assert (layout.q_rows, layout.kv_rows, layout.hidden_rows, layout.inner_rows, layout.head_rows) == (
        *(64, 64, 32, 8, 16),
    )
    assert {s.name: s.nbytes for s in layout.sections} == {
        "dense": 2 * (192 * 192 + 32 * 512) * 2,
        "head": 16 * 192 * 2,
        "experts": 2 * 3 * (2 * 8 * 192 + 32 * 64) * 9 // 16,
        "expert_scales": 2 * 3 * 16,
        "routers": 2 * 3 * 192 * 2,
        "embedding": 67 * 192 * 2,
        "norms": (2 * (192 + 192 + 192 + 192) + 192) * 4,
    }
    ranks = [[layout.rows(f"layers.0.{part}", r) for r in range(8)] for part in ("k_bias", "o", "mlp_norm")]
    assert [s.start for s in ranks[0]] == [0, 0, 0, 0, 64, 64, 64, 64]
    assert [(s.start, s.stop) for s in ranks[1]] == [(32 * r, 32 * r + 32) for r in range(8)]
    assert set(map(str, ranks[2])) == {"slice(None, None, None)"}


# -- the header --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", GRID)
def test_the_header_describes_the_model(target):
    layers = (MOE, LayerSpec(moe=True, sliding_window=128), MOE)
    layout = cuda_layout(small_spec(layers=layers, o_bias=True), "f32", attention="fp8")
    header = cuda_header(layout, LIMITS, target)
    assert "constexpr int kMaxContext = 1008;" in header and "constexpr int context = 1000;" in header
    assert f"constexpr int kGrid = {GRID[target]};" in header
    assert "constexpr int kWindows[kLayers] = {0, 128, 0};" in header and "constexpr int kRotary = 32;" in header
    flags = {
        "QkNorm": 0,
        "QkvBias": 0,
        "OutBias": 1,
        "AttentionFp8": 1,
        "HeadFp8": 0,
        "RouterF32": 1,
        "NormTopkProb": 1,
    }
    for name, value in flags.items():
        assert f"constexpr bool k{name} = {['false', 'true'][value]};" in header
    assert "constexpr bool kStepOnly = true;" in header  # the window
    for name in ("dense", "dense_scales", "norms"):
        assert f"constexpr uint64_t {name}_at = {layout.offset(name)};" in header
    assert "constexpr uint64_t head_scales_at = 0;" in header
    text = codegen.description(layout, LIMITS, target)
    assert json.loads(text)["target"] == target and f'R"mk({text})mk"' in header


def test_a_rank_holds_its_share_of_dense_layers_and_narrow_experts():
    """hidden 192 is 12 units of 16 rows, experts' width 128 is 16 of 8, a dense layer of 72 has 9 pairs: over eight
    ranks 2, 2 and 2."""
    layout = CudaLayout(muse_spec(num_attention_heads=8), {**MIX, "dense": "fp8"}, tp=8)
    sizes = {s.name: s.nbytes for s in layout.sections}
    assert sizes["mlp"] == 2 * (16 * 256 + 32 * 128) + 2 * 16 * 256 + 32 * 128
    assert sizes["mlp_scales"] == (2 * (16 + 32) + 2 * 16 + 32) * 4
    assert sizes["experts"] == 2 * 3 * (2 * 8 * 128 + 16 * 64) * 9 // 16
    rows = {
        part: layout.rows(f"layers.0.{part}", 7) for part in ("pre_proj", "experts.1.down", "attn_gate", "pre_norm")
    }
    assert [(s.start, s.stop) for s in rows.values()] == [(112, 128), (112, 128), (448, 512), (None, None)]
    dense = [layout.rows(f"layers.1.dense.{part}", 4) for part in ("gate", "down")]
    assert [(s.start, s.stop) for s in dense] == [(64, 80), (128, 160)]  # 8 rows of 72 are left for the fifth rank


def test_targets_are_those_that_compile():
    assert GRID.keys() == compile.CUDA_TARGETS.keys()


def test_the_header_is_plain_cpp(tmp_path):
    """Without warnings, and with the numbers that went in."""
    compiler = platform.compiler()
    if compiler is None:
        pytest.skip(platform.no_compiler())
    rope = RopeSpec(inv_freq=tuple(1 / (i + 1) for i in range(64)), attention_factor=1.25)
    (tmp_path / "model.h").write_text(cuda_header(cuda_layout(cuda_spec(rope=rope)), LIMITS, "sm_90a"))
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
