"""How the input of the experts' down projection is carried: blocks against the numpy twin and modelopt, bit by bit;
whole models against the slow twin, and the same bits however the work is cut; what a build packs and refuses."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import builds
import families
import kernels
import numpy as np
import plain_model
import pytest
from kernels import Kernels, Weights, precision, running

from mkpack import compile, models, platform
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.calibrate import Calibration
from mkpack.describe import describe
from mkpack.errors import UserError
from mkpack.layout import Layout
from mkpack.layout import layout_of as layout_again
from mkpack.layout_cuda import cuda_refusals
from mkpack.manifest import Limits, Manifest, to_text
from mkpack.plan import plan
from mkpack.schedule.ir import carried_words
from mkpack.spec import Carry

torch = families.torch
PROGRAM = r"""
#include "cpu/carry.h"
using namespace mk;
extern "C" {
void encode(const float* x, long blocks, float scale2, Nvfp4Block* out) {
  for (long i = 0; i < blocks; i++) out[i] = encode_nvfp4(x + 16 * i, scale2);
}
void carry_nvfp4(float* x, long blocks, float scale2) {
  for (long i = 0; i < blocks; i++) carry<Fmt::nvfp4>(x + 16 * i, scale2);
}
long message_words(int nvfp4, long blocks) { return carried_words(nvfp4 ? Fmt::nvfp4 : Fmt::bf16, blocks); }
void send(int nvfp4, float* x, long blocks, float scale2, uint32_t* message, float* there) {
  for (long i = 0; i < blocks; i++)
    if (nvfp4) carry_into<Fmt::nvfp4>(x + 16 * i, scale2, message, i);
    else carry_into<Fmt::bf16>(x + 16 * i, scale2, message, i);
  for (long i = 0; i < blocks; i++)
    if (nvfp4) take_out<Fmt::nvfp4>(message, i, scale2, there + 16 * i);
    else take_out<Fmt::bf16>(message, i, scale2, there + 16 * i);
}
void carry_bf16(float* x, long blocks) {
  for (long i = 0; i < blocks; i++) carry<Fmt::bf16>(x + 16 * i, 1);
}
}
"""
if not kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)


# -- a block -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=kernels.TARGETS)
def lib(request, tmp_path_factory):
    compiler = platform.compiler()
    assert compiler
    folder = tmp_path_factory.mktemp("carry")
    (folder / "carry.cpp").write_text(PROGRAM)
    flags = [f for f in compile.CPU_FLAGS if f != "-fvisibility=hidden"]
    command = [*compiler.command, *flags, f"-march={request.param}", f"-I{compile.sources()}", "carry.cpp"]
    subprocess.run([*command, "-o", "carry.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "carry.so"))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def encoded(lib: ctypes.CDLL, x: np.ndarray, scale2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of blocks [n, 16], unpacked."""
    out = np.zeros((len(x), 9), np.uint8)
    lib.encode(pointer(x), ctypes.c_long(len(x)), ctypes.c_float(scale2), pointer(out))
    return np.stack([out[:, :8] & 15, out[:, :8] >> 4], axis=-1).reshape(-1, 16), out[:, 8]


def carried(lib: ctypes.CDLL, x: np.ndarray, scale2: np.float32) -> np.ndarray:
    y = x.copy()
    lib.carry_nvfp4(pointer(y), ctypes.c_long(len(y)), ctypes.c_float(scale2))
    return y


def blocks(rng: np.random.Generator, scale2: np.float32) -> np.ndarray:
    """Blocks [n, 16] around what a global scale spans: normal ones of every size, midpoints, zeros of both signs, huge
    and subnormal values."""
    n = 2000
    size = np.float64(scale2) * 2.0 ** rng.uniform(-16, 14, (n, 1))
    normal = rng.standard_normal((n, 16)) * np.minimum(size, 1e37)
    halves = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0], (n, 16)) * rng.choice([1, -1], (n, 16))
    halves[:, 0] = 6  # so that the block's scale is the power of two below
    halves = halves * np.float64(scale2) * 2.0 ** rng.integers(-8, 8, (n, 1))
    scales = np.float64(scale2) * 6 * rng.integers(1, 4000, (n, 1)) / 2.0**12 * np.ones((1, 16))  # midpoints of e4m3
    tiny = rng.integers(-5, 6, (50, 16)) * 2.0**-149
    huge = rng.choice([3.4e38, -3.4e38, 1.0, 1e30], (50, 16))
    with np.errstate(over="ignore"):
        found = np.concatenate([normal, halves, scales, tiny, huge, np.zeros((1, 16)), -np.zeros((1, 16))])
        found = found.astype(np.float32)
    return np.ascontiguousarray(found[np.isfinite(found).all(axis=1)])


SCALES = [np.float32(s) for s in (1 / 448, 1.0, 0.0123456, 5.4e-8, 2.0**-116, 731.7, 1.2e35)]


@pytest.mark.parametrize("scale2", SCALES)
def test_blocks_are_those_of_the_twin_and_of_modelopt(lib, scale2):
    """But for the sign of zero, which modelopt keeps in a code of its own."""
    from mkpack.quantize import load_modelopt

    x = blocks(np.random.default_rng(), scale2)
    codes, scales = encoded(lib, x, scale2)
    twin_codes, twin_scales = plain_model.encode_nvfp4(x, scale2)
    assert np.array_equal(codes, twin_codes) and np.array_equal(scales, twin_scales[:, 0])
    assert not (codes == 8).any() and scales.min() >= 1 and scales.max() <= 0x7E
    tensor = load_modelopt().NVFP4QTensor
    q, block_scale, s2 = tensor.quantize(torch.from_numpy(x.copy()), 16, None, torch.tensor(float(scale2)))
    theirs = np.stack([q._quantized_data.numpy() & 15, q._quantized_data.numpy() >> 4], axis=-1).reshape(-1, 16)
    assert (theirs == 8).any()
    assert np.array_equal(codes, np.where(theirs == 8, 0, theirs))
    assert np.array_equal(scales, block_scale.view(torch.uint8).numpy().reshape(-1))
    values = q.dequantize(torch.float32, scale=block_scale, double_scale=s2, block_sizes={-1: 16}).numpy()
    ours = carried(lib, x, scale2)
    assert ours.tobytes() == (values + np.float32(0)).tobytes()  # which makes every zero a positive one
    assert ours.tobytes() == plain_model.carried(x, "nvfp4", scale2).tobytes()


def test_infinities_saturate_and_a_nan_takes_its_block(lib):
    scale2 = np.float32(0.25)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    x[0, 3], x[1, 5], x[2, 0], x[2, 9] = np.inf, -np.inf, np.nan, np.inf
    codes, scales = encoded(lib, x, scale2)
    twin_codes, twin_scales = plain_model.encode_nvfp4(x, scale2)
    assert np.array_equal(codes, twin_codes) and np.array_equal(scales, twin_scales[:, 0])
    assert scales.tolist()[:3] == [0x7E, 0x7E, 0x7F] and (codes[0, 3], codes[1, 5]) == (7, 15) and (codes[2] == 7).all()
    y = carried(lib, x, scale2)
    assert (y[0, 3], y[1, 5]) == (2688 * scale2, -2688 * scale2) and np.isnan(y[2]).all() and np.isfinite(y[3]).all()


def test_bf16_is_rounded_to_nearest_even(lib):
    x = np.random.default_rng().integers(0, 2**32, (4000, 16), dtype=np.uint32)
    x[:200] &= 0xFFFF8000  # ties
    x = np.concatenate([x.view(np.float32), np.float32([[np.inf, -np.inf, np.nan, -0.0, 3.4e38, 1e-45, 0, 1] * 2])])
    y = x.copy()
    lib.carry_bf16(pointer(y), ctypes.c_long(len(y)))
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x))
    assert np.where(np.isnan(x), 0, y).tobytes() == np.where(np.isnan(x), 0, expected).tobytes()
    assert y.tobytes() == plain_model.carried(x, "bf16", np.float32(1)).tobytes()


@pytest.mark.parametrize("carry", ["nvfp4", "bf16"])
def test_a_message_between_ranks_brings_every_bit(carry, lib):
    """And has no word that says that none has come: -6 in all channels would be one, were its bits sent as they are."""
    scale2 = np.float32(0.0123456)
    x = blocks(np.random.default_rng(), scale2)[:1999]  # the last group is not full
    x[:2], x[2] = -6 * scale2, np.nan
    nvfp4, n = int(carry == "nvfp4"), len(x)
    assert (encoded(lib, x[:2].copy(), scale2)[0] == 15).all()
    words = lib.message_words(nvfp4, ctypes.c_long(n))
    assert words == carried_words(16 * n, carry) == (4500 if nvfp4 else 8 * n)
    message, here, there = np.zeros(words, np.uint32), x.copy(), np.zeros_like(x)
    lib.send(nvfp4, pointer(here), ctypes.c_long(n), ctypes.c_float(scale2), pointer(message), pointer(there))
    assert here.tobytes() == there.tobytes() == plain_model.carried(x, carry, scale2).tobytes()
    assert not (message == 0xFFFFFFFF).any()


# -- whole models ------------------------------------------------------------------------------------------------------

LIMITS = Limits(context=64, tokens_per_step=16)
# 8 heads, for 8 ranks; widths that neither 16 nor the ranks divide.
_ODD = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 72, "num_hidden_layers": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {**_ODD, "intermediate_size": 56},
    "qwen3_moe": {**_ODD, "moe_intermediate_size": 40, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "minimax_m2": {**_ODD, "intermediate_size": 24},
    "gpt_oss": {**_ODD, "intermediate_size": 200},
    "muse_spark": {**_ODD, "moe_intermediate_size": 40},
}
CUTS: list[tuple[str, Carry, tuple[int, ...]]] = [
    *(("mixtral", "nvfp4", (1, 2)), ("qwen3_moe", "nvfp4", (1, 4)), ("minimax_m2", "nvfp4", (1, 8))),
    *(("gpt_oss", "nvfp4", (1, 2, 4, 8)), ("muse_spark", "nvfp4", (1, 8)), ("muse_spark", "bf16", (1, 8))),
]


def layout_of(family: str, carry: Carry, tp: int) -> Layout:
    spec, _ = models.model_spec(families.make_config(family, **SHAPES[family]).to_dict())
    return Layout(spec, precision("bf16", experts="nvfp4") | {"down_input": carry}, tp)


@pytest.fixture(scope="module")
def cut_kernels(tmp_path_factory) -> dict[tuple[str, Carry, int], tuple[Layout, Path]]:
    keys = [(family, carry, tp) for family, carry, ranks in CUTS for tp in ranks]
    layouts = [layout_of(*key) for key in keys]
    # Of several ranks the narrow registers.
    wanted = [(layout, LIMITS, kernels.TARGETS[0 if layout.tp == 1 else -1]) for layout in layouts]
    paths = Kernels.of_session(tmp_path_factory).paths(wanted, fast=True)
    return dict(zip(keys, zip(layouts, paths, strict=True), strict=True))


@pytest.mark.parametrize(("family", "carry", "ranks"), CUTS)
def test_ranks_do_not_change_a_bit(family, carry, ranks, cut_kernels, tmp_path):
    """Nor threads, steps and instruction sets; and it is the twin's rounding, without which logits are others."""
    tokens, runs = [int(t) for t in np.random.default_rng(7).integers(0, 200, 33)], []
    for tp in ranks:
        layout, path = cut_kernels[family, carry, tp]
        (folder := tmp_path / str(tp)).mkdir()
        weights = Weights.random(layout, seed=3)
        with running(path, layout, LIMITS, weights.blobs(folder), threads=1 + tp % 3) as model:
            runs.append(model.run(tokens, [1, 5, 2] if tp > 1 else []))
    assert all(run.tobytes() == runs[0].tobytes() for run in runs)
    twin, unrounded = (plain_model.logits(layout.spec, weights.plain(), tokens, how) for how in (carry, None))
    size = np.linalg.norm(twin, axis=1)
    assert (np.linalg.norm(runs[0] - twin, axis=1) / size).max() < 1e-5
    assert np.median(np.linalg.norm(unrounded - twin, axis=1) / size) > (1e-4 if carry == "bf16" else 1e-2)


# -- builds ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(tmp_path, monkeypatch):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)


def packed_scales(path: Path, layer: int) -> list[np.ndarray]:
    """Of every rank."""
    with open_artifact(path) as artifact:
        found = []
        section = next(s for s in artifact.manifest.sections["cpu"] if s.name == f"layers.{layer}.down_input_scale")
        assert artifact.manifest.spec.moe
        for weights in artifact.manifest.weights_in("cpu"):
            at = artifact.read(weights.path)[section.offset : section.offset + section.nbytes]
            found.append(np.frombuffer(at, np.float32)[: artifact.manifest.spec.moe.num_experts])
        return found


def test_a_build_packs_what_calibration_saw(stub, tmp_path):
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    keys: dict[str, Any] = {"quantise": {"experts": "bf16", "down_input": "nvfp4"}, "parallel": {"tp": 2}}
    recipe = builds.write_recipe(
        tmp_path / "recipe.yaml", checkpoint, calibrate={"tokens": 60, "min_tokens": 30}, **keys
    )
    path = build(recipe, output=tmp_path)
    with open_artifact(path) as artifact:
        manifest, report = artifact.manifest, json.loads(artifact.read("report.json"))
    calibration = report["calibration"]
    few = set(calibration["experts_with_few_tokens"])
    assert 0 < len(few) < 8, "experts of both kinds"
    for i in range(2):
        scales = packed_scales(path, i)
        assert len(scales) == 2 and scales[0].tobytes() == scales[1].tobytes()
        assert scales[0] == pytest.approx(np.array(calibration["experts"][f"layers.{i}"]["down"]) / 2688, rel=1e-5)
        assert len(set(scales[0])) > 1
    assert report["down_input"] == {"format": "nvfp4", "global_scales": "of every expert, from the calibration"}
    assert manifest.precision["down_input"] == "nvfp4"
    assert json.loads(manifest.kernels[plan(recipe).targets[0]].description)["down_input"] == "nvfp4"
    assert "down_input nvfp4 (global scales calibrated)" in describe(manifest)
    assert "down_input nvfp4" in plan(recipe).render()
    again = layout_again(manifest)  # as `--rebuild-kernel` makes it
    assert again and again.sections == manifest.sections["cpu"] and again.down_input == "nvfp4"


def test_scales_of_a_calibration():
    """Of few tokens the layer's; of zeros alone the layer's, and where that is zero as of a maximum of 6."""
    spec, _ = models.model_spec(families.make_config("mixtral", num_local_experts=3).to_dict())
    amax = {f"layers.{i}.experts.{e}.down": (e + 1.7) * (1 - i) for i in range(2) for e in range(3)}
    amax["layers.0.experts.1.down"] = 0.0
    found = Calibration(
        9, amax, {"layers.0.experts.0": 2} | {f"layers.{i}.experts.{e}": 5 for i in (0, 1) for e in (1, 2)}
    )
    scales = found.down_input_scales(spec, 3)
    assert scales["layers.0.down_input_scale"].tobytes() == (np.float32([3.7, 3.7, 3.7]) / np.float32(2688)).tobytes()
    assert scales["layers.1.down_input_scale"].tobytes() == (np.float32([6, 6, 6]) / np.float32(2688)).tobytes()
    amax["layers.0.experts.1.down"] = 1e-40
    assert found.down_input_scales(spec, 3)["layers.0.down_input_scale"][1] == 2.0**-116


@pytest.mark.parametrize("how", [None, "bf16", "nvfp4"])
def test_random_weights_have_a_constant(how, stub, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(families.make_config("qwen3_moe", **SHAPES["qwen3_moe"]).to_dict()))
    keys: dict[str, Any] = {"source": {"dummy": str(config)}, "quantise": {"down_input": how} if how else {}}
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", tmp_path, **keys), output=tmp_path)
    with open_artifact(path) as artifact:
        manifest, report = artifact.manifest, json.loads(artifact.read("report.json"))
    assert manifest.precision.get("down_input") == report.get("down_input", {}).get("format") == how
    sections = {s.name for s in manifest.sections["cpu"] if "down_input" in s.name}
    assert sections == ({"layers.1.down_input_scale"} if how == "nvfp4" else set())  # layer 0 is dense
    if how == "nvfp4":
        assert report["down_input"]["global_scales"] == "random weights, nothing calibrated: 6 / 2688 for every expert"
        assert "down_input nvfp4 (global scales a constant, for weights are random)" in describe(manifest)
        assert (packed_scales(path, 1)[0] == np.float32(6) / np.float32(2688)).all()
    raw = manifest.model_dump(mode="json") | {"precision": {**manifest.model_dump()["precision"], "down_input": "fp8"}}
    with pytest.raises(UserError, match=r"precision.down_input: expected bf16 or nvfp4, found fp8"):
        Manifest.parse(to_text(raw), "x")


@pytest.mark.parametrize(
    ("quantise", "more", "parts"),
    [
        (
            {"down_input": "nvfp4"},
            {},
            ["quantise.down_input: nvfp4 needs global scales", '"calibrate: {data: default}"'],
        ),
        (
            {"down_input": "nvfp4", "attention": "nvfp4"},
            {"targets": ["sm_90a"], "calibrate": {}},
            ["quantise.down_input: is nvfp4, the kernel takes bf16 (target sm_90a)", "quantise.attention: is nvfp4"],
        ),
        ({"down_input": "bf16"}, {"dense": True}, ["quantise.down_input: bf16, but no layer", "remove the key"]),
    ],
)
def test_what_cannot_be_carried_is_refused(quantise, more, parts, tmp_path):
    case = "qwen3-all-dense" if more.pop("dense", False) else "mixtral-plain"
    checkpoint = families.make_case(tmp_path / "checkpoint", case)
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=quantise, **more)
    with pytest.raises(UserError) as caught:
        plan(recipe)
    assert all(part in str(caught.value) for part in ["recipe.yaml:", *parts]), caught.value


def test_what_gpus_do_anyway_is_accepted():
    spec, _ = models.model_spec(families.make_config("qwen3_moe").to_dict())
    mix: dict[Any, Any] = precision("bf16", experts="nvfp4")
    refused = {how: cuda_refusals(spec, mix | {"down_input": how}) for how in ("bf16", "nvfp4")}
    assert refused["bf16"] == cuda_refusals(spec, mix)
    assert set(refused["nvfp4"]) - set(refused["bf16"]) == {"quantise.down_input is nvfp4, the kernel takes bf16"}
