"""Faults that builders of artifacts are known for, one test each. Those of one part of mkpack are tested beside it:

- gate and up have tensor scales of their own, one is used for both:
  test_prequantised: gate_and_up_keep_their_own_tensor_scales
- an expert without calibration tokens has an input scale of Inf, or a made-up one:
  test_prequantised: input_scales_have_no_part_in_it
- a block scale is zero while its weights are not:
  test_quantize: huge_and_tiny_blocks_survive; test_prequantised_refusals: refused_by_name
- an exclude pattern disables everything, silently: test_quant_config: an_exclude_list_that_disables_everything
- a router is quantised: here; test_prequantised_refusals: a_quantised_router_is_refused
- weight-only checkpoints without input scales: test_prequantised: compressed_tensors_says[NVFP4A16]
- compressed-tensors' divisor is taken for a factor: test_prequantised: gate_and_up_keep_their_own_tensor_scales
- metadata is believed, not the tensors: test_quant_config
- the index names an absent shard: test_checkpoint, test_audit
- a truncated file in the hub's cache is trusted: hub/test_source: a_truncated_file_in_the_cache_is_fetched_again
- a float32 routing bias is rounded: here
- a build of "main" that no one can repeat: hub/test_build_from_hub: a_build_is_pinned_to_a_commit
- fewer KV heads than ranks; rows that are no whole tiles: test_layout;
  building/test_build: a_number_of_ranks_changes_no_bit
- two builds race: building/test_build: two_builds_at_once_do_the_work_once
- a compiler killed for memory is an unknown error: test_compile: a_killed_compiler; test_cuda: a_killed_nvcc
- the a of sm_90a is lost: test_cuda: the_a_of_the_architecture_stays
- PTX newer than the driver: kernels are machine code, and ask for a generation of CUDA:
  test_cuda: resources_of_the_kernels
- absolute paths inside: test_compile, test_cuda: folders_do_not_change_a_byte
- a full disk or kill -9 leaves a file under the final name:
  building/test_build_stopped: killed_at_any_moment, a_disk_that_fills_up
"""

from __future__ import annotations

from pathlib import Path

import builds
import families
import numpy as np
import pytest
import quantised
import torch

from mkpack.build import build
from mkpack.plan import plan

EVERYTHING = dict.fromkeys(("experts", "dense", "attention", "lm_head", "embeddings"), "nvfp4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routers_are_never_quantised(tmp_path, monkeypatch, dtype):
    """Whatever the recipe says: what a recipe calls by name are kinds of matrices, and a router is none of them."""
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", dtype=dtype)
    path = build(builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=EVERYTHING), output=tmp_path)
    found, state = builds.dequantised(path, checkpoint), families.checkpoint_tensors(checkpoint)
    routers = [name for name in state if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        np.testing.assert_array_equal(found[name], state[name].float().numpy())


def routing_biases(folder: Path) -> dict[str, torch.Tensor]:
    state = families.checkpoint_tensors(folder)
    return {name: tensor for name, tensor in state.items() if name.endswith("e_score_correction_bias")}


def test_a_float32_routing_bias_is_not_rounded(tmp_path, monkeypatch):
    """Also where all else is bfloat16; one that was rounded before is told."""
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    source = families.make_checkpoint(tmp_path / "source", "minimax_m2", dtype="bfloat16")
    state = families.checkpoint_tensors(source)
    biases = {name: torch.randn(tensor.shape) for name, tensor in routing_biases(source).items()}
    assert len(biases) == 2
    checkpoint = quantised.write(source, tmp_path / "checkpoint", {**state, **biases})
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, quantise=EVERYTHING)
    found = builds.dequantised(build(recipe, output=tmp_path), checkpoint)
    for name, bias in biases.items():
        np.testing.assert_array_equal(found[name], bias.numpy())
    assert plan(recipe).notes() == []
    quantised.write(source, checkpoint, {**state, **{name: bias.bfloat16() for name, bias in biases.items()}})
    assert plan(recipe).notes()[0].startswith("2 routing biases are BF16: if they were float32 once, rounding changed")
