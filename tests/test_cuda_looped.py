"""One GPU rank by itself, with its peers looped back, on the emulated machine: it goes through its steps, and its
exchanges are as many words as with peers."""

from __future__ import annotations

import emulator
import kernels
import numpy as np
import pytest
from cuda_models import cuda_layout, small_spec
from test_cuda_emulated import LIMITS, MUSE, TWO_LAYERS

from mkpack import abi
from mkpack.layout_cuda import CudaLayout
from mkpack.native import Library
from mkpack.spec import ModelSpec

# Units: 12 of hidden rows, 8 of experts, 9 of the vocabulary; of eight ranks the last has only one of experts.
SPEC = small_spec(num_attention_heads=8, layers=TWO_LAYERS)
NORMED = small_spec(qk_norm=True, qk_norm_over="projection", layers=1)  # an exchange more
BLOCKS = 2  # of a rank


def model(spec: ModelSpec, tp: int) -> emulator.Emulated:
    layout = CudaLayout(spec, cuda_layout(spec).precision, "bf16", tp, tp)
    return emulator.Emulated.random(layout, LIMITS, BLOCKS * tp)


@pytest.fixture(scope="module")
def eight():
    return model(SPEC, 8)


def received(tp: int, tokens: int) -> int:
    """Bytes that a step brings to rank 0, by docs/TENSOR_PARALLEL.md: of all ranks' less its own."""
    spec = SPEC
    assert spec.moe
    units, hidden = spec.hidden_size // 16, -(-spec.hidden_size // 16 // tp)
    inner = spec.moe.intermediate_size - -(-spec.moe.intermediate_size // 8 // tp) * 8
    others = units - hidden
    layer = 2 * tokens * spec.q_size * (tp - 1) // tp  # attention
    layer += 4 * tokens * (16 * others + others)  # output projection
    layer += 2 * tokens * spec.moe.top_k * inner
    layer += tokens * (2 * 16 * others + 4 * others)  # down
    return len(spec.layers) * layer + 8 * (tp - 1) * BLOCKS


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_goes_through_its_steps_alone(eight, rank):
    one, several, step, made, again = eight.calls(
        ("time_rank", [[5]], {}),
        ("time_rank", [[5, 6, 7]], {}),
        ("try_step", [[1, 2]], {}),
        ("generate", [[3, 4]], {"max_new_tokens": 3}),
        ("time_rank", [[9]], {}),
        looped=rank,
        seed=rank,
    )
    top_k = SPEC.moe.top_k
    assert one == again == (abi.OK, "", 4 * len(SPEC.layers) + 1, received(8, 1), top_k, top_k)
    assert several[:4] == (abi.OK, "", 4 * len(SPEC.layers) + 1, received(8, 3))
    code, logits = step
    held = eight.layout.head_rows
    assert code == abi.OK and np.isfinite(logits).all() and not logits[:, held:].any()
    assert logits[:, :held].any() == (rank == 0)  # the last has nothing of the vocabulary
    assert made[1] == abi.OK and len(made[0]) == 3


@pytest.mark.parametrize(("spec", "exchanges"), [(NORMED, 5 + 1), (MUSE, 6 + 9 + 1)], ids=["normed", "Muse Spark"])
def test_no_races_of_a_rank_alone(spec, exchanges):
    (found,) = model(spec, 2).calls(("time_rank", [[5, 6]], {}), races=True, looped=1)
    assert found[:3] == (abi.OK, "", exchanges)


def test_what_cannot_be_looped_back_is_refused():
    two = model(NORMED, 2)
    path = two.library()
    library = Library(path.read_bytes(), str(path))
    blobs = [np.memmap(blob, np.uint8, "r") for blob in two.blobs]

    def refused(text: str, blobs: list[np.ndarray], **options: int) -> None:
        assert kernels.try_create(library.lib, two.layout, blobs, **options)[0] == abi.ERR_ARGUMENT
        assert text in library.lib.mk_last_error().decode()

    refused("compiled for 2 ranks, given 1", blobs[:1], flags=abi.OPTION_LOOPED)
    refused("flags has bits that this kernel does not know", blobs, flags=abi.OPTION_RANKS)
    with two.running() as whole:
        assert whole.time_rank([1])[:2] == (
            abi.ERR_ARGUMENT,
            "its ranks are not looped back: MK_OPTION_LOOPED loads one so",
        )
    library.close()
