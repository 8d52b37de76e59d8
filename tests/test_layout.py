"""The section table: alignment, order, and one home for every row on every split."""

from __future__ import annotations

import kernels
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkpack.errors import UserError
from mkpack.layout import SECTION_ALIGN, TILE_ROWS, Layout, scale_floats, split_heads, tile_bytes
from mkpack.spec import LayerSpec, ModelSpec, MoeSpec, SandwichSpec

FORMATS = st.sampled_from(["f32", "bf16", "fp8", "nvfp4"])


_FLAGS = (
    *("qk_norm", "qk_norm_weight", "qkv_bias", "o_bias", "attention_sinks", "attention_out_norm", "attention_gate"),
    *("embed_norm", "centered_norms"),
)


@st.composite
def specs(draw: st.DrawFn, tp: int) -> ModelSpec:
    """Any small model that `tp` ranks can share."""
    kv = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    heads = kv * draw(st.integers(1, 3))
    if heads % tp:
        heads *= tp
    layers = [
        LayerSpec(moe=moe, sliding_window=draw(st.sampled_from([None, 5])))
        for moe in draw(st.lists(st.booleans(), min_size=1, max_size=3))
    ]
    return kernels.tiny_spec(
        vocab_size=draw(st.integers(1, 150)),
        hidden_size=draw(st.integers(2, 90)),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=2 * draw(st.integers(1, 13)),
        tie_word_embeddings=draw(st.booleans()),
        **{name: draw(st.booleans()) for name in _FLAGS},
        qk_norm_over=draw(st.sampled_from(["head", "projection"])),
        sandwich=draw(st.sampled_from([None, SandwichSpec(eps=1e-8, gate_temperature=0.3, gate_floor=1e-3)])),
        layers=layers,
        moe=MoeSpec(
            num_experts=draw(st.integers(1, 20)),
            top_k=1,
            intermediate_size=draw(st.integers(2, 70)),
            norm_topk_prob=False,
            scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
            router_bias=draw(st.booleans()),
            choice_bias=draw(st.booleans()),
            expert_bias=draw(st.booleans()),
            hidden_size=draw(st.sampled_from([None, 33, 96])),
        ),
        dense_intermediate_size=draw(st.integers(2, 70)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp = draw(st.integers(1, 8))
    precision = {p: draw(FORMATS) for p in kernels.PRECISIONS}
    if carry := draw(st.sampled_from([None, "bf16", "nvfp4"])):
        precision["down_input"] = carry
    return Layout(draw(specs(tp)), precision, tp, draw(st.sampled_from(["f32", "bf16"])))


@given(layouts())
def test_sections_are_aligned_in_order_and_do_not_overlap(layout):
    end = 0
    for s in layout.sections:
        assert s.offset % SECTION_ALIGN == 0
        assert end <= s.offset < end + SECTION_ALIGN
        assert s.nbytes > 0
        end = s.offset + s.nbytes
    # a kernel may load a whole vector that begins in the last bytes
    assert layout.nbytes % SECTION_ALIGN == 0 and end + 64 <= layout.nbytes < end + 64 + SECTION_ALIGN
    assert len({s.name for s in layout.sections}) == len(layout.sections)
    for s in (s for s in layout.sections if s.cols > 1):
        assert s.nbytes == s.rows // TILE_ROWS * tile_bytes(s.format, s.cols)
        if n := scale_floats(s.format):
            assert layout.section(s.name + ".scale").nbytes == s.rows // TILE_ROWS * n * 4
        else:
            assert s.name + ".scale" not in layout


# The last parts of the names of tensors that are split along N; all others are held whole by every rank.
_SPLIT = {
    *("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "attn_gate", "pre_proj", "post_proj", "lm_head"),
    *("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
}


@given(layouts())
def test_every_row_has_one_home_and_no_two_share_a_place(layout):
    used: dict[tuple[str, int], set[int]] = {}
    for role in kernels.roles(layout.spec):
        homes = layout.homes(role.name)
        seen = np.zeros((layout.tp, role.shape[0]), int)  # of the tensor's first section
        for section, rank, piece in homes:
            assert piece.tiles * TILE_ROWS >= piece.rows >= 0
            last = piece.tile + (piece.tiles - 1) * piece.stride
            assert last < layout.tiles(section)
            places = set(range(piece.tile, last + 1, piece.stride))
            assert not places & used.setdefault((section, rank), set())
            used[section, rank] |= places
            if section == homes[0][0]:
                seen[rank, piece.row : piece.row + piece.rows] += 1
        part = role.name.split(".")[-1]
        if part not in _SPLIT:
            assert (seen == 1).all()
        elif part in ("k", "v", "k_bias", "v_bias"):
            assert seen.max() == 1 and (seen.sum(axis=0) == layout.heads.replicas).all()
        else:
            assert (seen.sum(axis=0) == 1).all()
    for (section, _), places in used.items():
        if section.endswith("qkv_bias"):  # the attention gate has none
            assert len(places) == layout.tiles(section) - (layout.qkv_tiles()[0] if layout.spec.attention_gate else 0)
        elif section != "embed":  # the embedding has tiles to spare, so that a tied head splits evenly
            assert len(places) == layout.tiles(section)


@given(layouts())
def test_every_rank_holds_the_kv_heads_of_its_query_heads(layout):
    spec, heads = layout.spec, layout.heads
    group = spec.num_attention_heads // spec.num_key_value_heads
    for rank in range(layout.tp):
        for q in range(heads.q_heads):
            wanted = (rank * heads.q_heads + q) // group
            here = heads.first_kv_head(rank) + q // (heads.q_heads // heads.kv_heads)
            assert wanted == here


@given(layouts())
def test_the_table_names_every_tensor_and_its_format(layout):
    stored: dict[str, set[str]] = {}
    for s in layout.sections:
        for tensor in s.tensors:
            if not s.name.endswith(".scale"):
                stored.setdefault(tensor, set()).add(s.format)
    for i, layer in enumerate(layout.spec.layers):
        if layer.moe and layout.down_input == "nvfp4":
            assert stored.pop(name := f"layers.{i}.down_input_scale") == {"f32"}
            assert layout.spec.moe and all(
                piece.rows == layout.spec.moe.num_experts for _, _, piece in layout.homes(name)
            )
    roles = {r.name: r for r in kernels.roles(layout.spec)}
    assert stored.keys() == roles.keys()
    for name, formats in stored.items():
        expected = {layout.format_of(roles[name])}
        if name == "embed" and layout.spec.tie_word_embeddings:
            expected.add(layout.precision["lm_head"])
        assert formats == expected


def test_a_tied_head_is_stored_once_unless_its_precision_differs():
    spec = kernels.tiny_spec(tie_word_embeddings=True)
    assert "lm_head" not in Layout(spec, kernels.precision("bf16"))
    twice = Layout(spec, kernels.precision("bf16", lm_head="nvfp4"), 2)
    assert twice.section("lm_head").tensors == ("embed",)
    assert "lm_head" in Layout(kernels.tiny_spec(), kernels.precision("bf16"))


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "fits"),
    [
        (9, 3, 2, "1, 3 "),
        (8, 2, 3, "1, 2, 4, 8 "),
        (6, 6, 4, "1, 2, 3, 6 "),
        (12, 4, 3, "1, 2, 4 "),
        (7, 1, 8, "1, 7 "),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused(heads, kv, tp, fits):
    spec = kernels.tiny_spec(num_attention_heads=heads, num_key_value_heads=kv)
    with pytest.raises(UserError) as e:
        Layout(spec, kernels.precision(), tp)
    for text in ("parallel.tp", f"{tp} ranks", f"{heads} attention heads", f"{kv} KV heads", f"runs on {fits}ranks"):
        assert text in str(e.value)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_a_head_split_deals_every_head_once(group, kv, tp):
    spec = kernels.tiny_spec(num_attention_heads=group * kv, num_key_value_heads=kv)
    try:
        split = split_heads(spec, tp)
    except UserError:
        return
    assert split.q_heads * tp == group * kv
    assert split.kv_heads * tp == kv * split.replicas
    assert split.q_heads % split.kv_heads == 0
