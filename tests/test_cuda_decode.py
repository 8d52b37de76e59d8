"""decode_kernel, the tuned way for one token a step, on the emulated machine, at shapes just large enough for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import emulator
import kernels
import numpy as np
import plain_model
import pytest
from cuda_models import cuda_layout, cuda_spec

from mkpack import abi
from mkpack.codegen_cuda import cuda_header
from mkpack.layout_cuda import CudaLayout
from mkpack.manifest import Limits
from mkpack.pack_cuda import CudaBlobWriter
from mkpack.spec import LayerSpec

LIMITS = Limits(context=64, tokens_per_step=16)
MOE = {"num_experts": 32, "intermediate_size": 256}
SMALL = cuda_spec(
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=67,
    layers=(LayerSpec(moe=True),) * 2,
    moe=MOE,
)
# Layout and blocks: hidden / 16 owners at least.
MODELS = {"bf16": (cuda_layout(SMALL), 64)}
PROMPT = [5, 9, 11, 2, 7, 0, 3, 12, 1]


@dataclass
class Built:
    layout: CudaLayout
    grid: int
    weights: kernels.Weights
    folder: Path

    def calls(self, *wanted: emulator.Call, fast: bool = True, **settings: object) -> list:
        """fast: with decode_kernel, or with the step kernel alone."""
        folder = self.folder / str(fast)
        if not folder.exists():
            folder.mkdir()
            header = cuda_header(self.layout, LIMITS, "sm_90a")
            header, count = re.subn(r"kGrid = \d+", f"kGrid = {self.grid}", header)
            assert count == 1
            emulator.build_library(header, folder)
        kernel = folder / "kernel.so"
        return emulator.calls(kernel, self.layout, LIMITS, self.folder / "blob", wanted, **settings)


@pytest.fixture(scope="module", params=MODELS)
def built(request, tmp_path_factory):
    layout, grid = MODELS[request.param]
    weights, folder = kernels.Weights.random(layout), tmp_path_factory.mktemp("decode")
    with CudaBlobWriter(layout, folder / "blob") as writer:
        for name, q in weights.tensors.items():
            writer.put(name, q, q.format)
    return Built(layout, grid, weights, folder)


def test_tokens_of_the_plain_model(built):
    ((tokens, code, error),) = built.calls(("generate", [PROMPT], {"max_new_tokens": 8}))
    assert (code, error, len(tokens)) == (abi.OK, "", 8)
    wanted = plain_model.logits(built.layout.spec, built.weights.plain(), [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    # every chosen token is as good as the best, but for bf16's error
    assert (wanted.max(axis=1) - wanted[range(8), tokens] < 2e-2 * np.abs(wanted).max()).all()
