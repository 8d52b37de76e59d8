"""One artifact, two kernels: the CUDA sources run on the emulated GPU (tests/cuda/emulator) and must say what the CPU's
kernel says. The way is the user's: recipe, build, load, generate."""

from __future__ import annotations

from pathlib import Path

import builds
import emulator
import families
import pytest

from mkpack import bench, bench_gpu, card, layout_cuda, platform, session
from mkpack import build as builder
from mkpack import compile as compiling
from mkpack.artifact import extract
from mkpack.compile import CUDA_TARGETS, Kernel, Unit
from mkpack.errors import UserError
from mkpack.loader import load
from mkpack.platform import CudaDevice, CudaDriver

BLOCKS = 4  # an emulated GPU is slow, and any number of blocks computes the same
SHAPE = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [7, 3, 250, 11, 90]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """An artifact for this machine's CPU and the emulated GPU, which the loader finds."""
    folder = tmp_path_factory.mktemp("emulated")
    compile_cpu = compiling.compile_kernels

    def compile_kernels(units: list[Unit], work: Path) -> dict[str, Kernel]:
        made = compile_cpu([unit for unit in units if unit.target not in CUDA_TARGETS], work)
        for unit in units:
            if unit.target in CUDA_TARGETS:
                (work / unit.name).mkdir()
                path = emulator.build_library(unit.header, work / unit.name)
                made[unit.name] = Kernel(path, "g++", {"gpu": unit.target, "sms": BLOCKS, "system": "linux"})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_cuda.GRID, "sm_90a", BLOCKS)
        patch.setattr(builder, "compile_kernels", compile_kernels)
        patch.setattr(platform, "nvcc", lambda: platform.Compiler(("nvcc",), "13.0"))
        gpu = CudaDriver("13.0", (CudaDevice("emulated", "9.0", 160),))
        patch.setattr(platform, "cuda_driver", lambda: gpu)
        checkpoint = families.make_checkpoint(folder / "checkpoint", "qwen3_moe", **SHAPE)
        keys = {"targets": ["native", "sm_90a"], "quantise": {"attention": "fp8"}, "limits": {"context": 48}}
        yield builder.build(builds.write_recipe(folder / "recipe.yaml", checkpoint, **keys), output=folder)


def test_both_kernels_give_the_same_tokens(artifact):
    found = {}
    for target in ("cpu", "gpu"):
        with load(artifact, target=target) as model:
            assert (model.target == "sm_90a") == (target == "gpu")
            tokens = builds.generated(model, PROMPT, 8)
            model.reset()
            found[target] = tokens, model.step([*PROMPT, *tokens], 8)
    assert found["gpu"][0] == found["cpu"][0]
    assert builds.relative_error(found["gpu"][1], found["cpu"][1]) < 2e-2  # bf16 against float32 activations


def test_text_stops_and_speed_from_an_unpacked_folder(artifact, tmp_path):
    extract(artifact, tmp_path / "folder")
    with load(tmp_path / "folder") as model:
        assert model.target == "sm_90a"
        generation = model.generate("a b", raw=True, max_new_tokens=3, temperature=0.0)
        text = "".join(generation)
        assert text == model.text.tokenizer.decode(list(generation.result.tokens), skip_special_tokens=True)
        first = generation.result.tokens[0]
        stopped = list(model.generate_tokens("a b", raw=True, max_new_tokens=3, temperature=0.0, stop_tokens=[first]))
        assert stopped == [first]
        lines = session.stats(model, generation.result).splitlines()
        kv = 2 * 2 * 2 * 64 * 2  # keys and values of 2 layers and 2 heads of 64, in bfloat16
        assert model.bytes_per_step(position=9) - model.bytes_per_step() == 9 * kv
        assert "tokens/s" in lines[0] and lines[2].startswith("bound:  ") and "MB a token" in lines[2]


def test_bench_measures_steps_of_all_sizes(artifact, monkeypatch):
    """Times are the emulator's own; the checks beside them are real."""
    for name, value in {"RUNS": 2, "STEP_RUNS": 2, "DECODE_TOKENS": 4, "ROOM": 16, "STEP_TOKENS": (1, 4, 16)}.items():
        monkeypatch.setattr(bench_gpu, name, value)
    result = bench.run(artifact, contexts=[20, 5], prompt_tokens=3, new_tokens=4)
    assert [p.context for p in result.points] == [5, 20] and result.gpu == "emulated"
    with load(artifact) as model:
        spec = model.spec
        for point in result.points:
            assert point.repeats and all(s.repeats for s in point.steps) and point.decode_bound_ms > 0
            assert point.gap < 2e-2 and max(s.error for s in point.steps) < 2e-2
            assert point.decode_mb * 1e6 == model.bytes_per_step(1, point.context + 2)
            for step in point.steps:
                assert spec.moe.top_k <= step.experts <= min(spec.moe.num_experts, step.tokens * spec.moe.top_k)
                assert step.mb * 1e6 == model.bytes_per_step(step.tokens, point.context, step.experts)
            assert point.steps[0].experts == spec.moe.top_k and point.steps[0].error == 0
    text = result.render()
    assert "runs repeated: equal bits; steps of all sizes and generations agree to " in text and "within 0.02" in text
    assert "random weights" not in text and "3 tokens in, 4 out" in text
    assert card.read_bench(result.to_json().encode(), "-").speeds[1].context == 20


def test_bench_refuses_what_does_not_fit(artifact):
    with pytest.raises(UserError, match="context 40: expected at most "):
        bench.run(artifact, contexts=[40])
    with pytest.raises(UserError, match=r"a generation of 40 \+ 10 tokens: the context holds 48"):
        bench.run(artifact, contexts=[1], prompt_tokens=40, new_tokens=10)
    with pytest.raises(UserError, match="--new-tokens are for GPUs"):
        bench.run(artifact, target="cpu", new_tokens=10)
    with load(artifact, target="cpu") as model, pytest.raises(UserError, match="this kernel times no single step"):
        model.time_step([1])
