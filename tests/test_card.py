"""The model card: what is on it, and that nothing on it is made up."""

from __future__ import annotations

import json

import fake
import pytest
import yaml

from mkpack import card
from mkpack.artifact import open_artifact
from mkpack.card import Bench, Speed, read_bench, render
from mkpack.errors import UserError
from mkpack.manifest import Manifest, Source

BENCH = Bench("x86-64-v3", 8, 40.0, (Speed(128, 4.0, 3.0), Speed(1024, 5.0, 3.5)))


@pytest.fixture
def manifest(tmp_path) -> Manifest:
    with open_artifact(fake.artifact(tmp_path, fake.HELLO)) as artifact:
        return artifact.manifest


def metadata(text: str) -> dict:
    begin, front, _ = text.split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(front)


def test_the_metadata_names_licence_and_base_model(manifest):
    source = Source(kind="hub", repo="org/base", commit="1" * 40, files={})
    made = manifest.model_copy(
        update={"source": source, "license": "Apache-2.0", "precision": {"experts": "nvfp4", "attention": "bf16"}}
    )
    text = render(made, "me/model", {})
    found = metadata(text)
    assert (found["license"], found["base_model"], found["base_model_relation"]) == (
        "apache-2.0",
        "org/base",
        "quantized",
    )
    assert {"mkpack", "nvfp4"} <= set(found["tags"]) and "bf16" not in found["tags"]
    assert f"https://huggingface.co/org/base/tree/{'1' * 40}" in text
    assert "mkpack run me/model --prompt" in text and 'mkpack.load("hf://me/model")' in text
    assert made.entries["kernels/x86-64-v3.so"].sha256 in text


def test_a_licence_of_its_own(manifest):
    found = metadata(render(manifest.model_copy(update={"license": "my: licence"}), "me/model", {}))
    assert (found["license"], found["license_name"]) == ("other", "my: licence")
    assert "base_model" not in found


def test_random_weights_are_called_that(manifest):
    source = Source(kind="dummy", repo=None, commit=None, files={}, seed=3)
    text = render(manifest.model_copy(update={"source": source}), "me/model", {})
    assert "Random weights in the shape of a model" in text


def test_quality_is_what_the_report_measured(manifest):
    quality = {"relative_error": 0.0123, "end_to_end": {"tokens": 512, "perplexity": 10.5, "kl_divergence": 0.004}}
    text = render(manifest.model_copy(update={"quality": quality}), "me/model", {})
    assert "| perplexity | 10.5 |" in text and "| KL divergence from it, nats a token | 0.004 |" in text
    assert "| relative error of the weights | 0.0123 |" in text and "| measured on tokens | 512 |" in text
    assert "Not measured when it was built." in render(manifest, "me/model", {})


def test_a_speed_stands_beside_its_bound_or_not_at_all(manifest):
    text = render(manifest, "me/model", {"x86-64-v3": BENCH})
    assert "| `x86-64-v3` | 128 | 4.00 | 250.0 | 3.00 | 75% |" in text
    assert "| `x86-64-v3` | 1024 | 5.00 | 200.0 | 3.50 | 70% |" in text
    assert "8 threads; 40.0 GB/s, measured in the same run" in text
    without = render(manifest, "me/model", {})
    assert "Not measured by the publisher" in without and "tokens/s" not in without


def test_a_cell_cannot_end_its_table(manifest):
    made = manifest.model_copy(update={"license": "a | b\nc"})
    assert "| licence of the weights | a \\| b c |" in render(made, "me/model", {})


def test_only_what_lies_between_the_markers_is_replaced(manifest):
    text = render(manifest, "me/model", {})
    mine = text.replace("# fake", "# Mine\n\nWords before.") + "\nWords after.\n"
    again = render(manifest, "me/model", {"x86-64-v3": BENCH}, mine)
    assert again.startswith(mine.split(card.BEGIN)[0]) and again.endswith(f"{card.END}\n\nWords after.\n")
    assert "| `x86-64-v3` | 128 |" in again
    assert render(manifest, "me/model", {}, again) == mine, "and back again"
    for kept in ("# no marker\n", f"# half\n{card.BEGIN}\n"):
        assert render(manifest, "me/model", {}, kept) == kept


def test_a_bench_result_is_kept_without_the_paths_of_its_machine():
    raw = {"artifact": "/home/me/x.mkpack", "target": "x86-64-v3", "threads": 8, "bandwidth_gb_s": 40.0, "points": [
        {"context": 128, "decode_ms": 4.0, "decode_bound_ms": 3.0, "prefill_ms": 1.0},
        {"context": 1024, "decode_ms": 5.0, "decode_bound_ms": 3.5, "prefill_ms": 1.0},
    ]}  # fmt: skip
    found = read_bench(json.dumps(raw).encode(), "bench.json")
    assert found == BENCH and b"home" not in found.to_bytes()
    assert read_bench(found.to_bytes(), "bench.json") == BENCH


@pytest.mark.parametrize(
    "change",
    [
        {"points": [{"context": 1, "decode_ms": 0, "decode_bound_ms": 1}]},
        {"points": [{"context": 1, "decode_ms": float("nan"), "decode_bound_ms": 1}]},
        {"points": [{"context": 1, "decode_ms": True, "decode_bound_ms": 1}]},
        {"bandwidth_gb_s": "40"},
        {"points": 3},
        {"threads": None},
    ],
)
def test_what_is_no_result(change):
    raw = {"target": "x86-64-v3", "threads": 8, "bandwidth_gb_s": 40.0, "points": [], **change}
    with pytest.raises(UserError, match="bench.json: expected what mkpack bench --json prints"):
        read_bench(json.dumps(raw).encode(), "bench.json")


def test_two_results_of_a_kernel(manifest):
    with pytest.raises(UserError, match="x86-64-v3: given twice"):
        card.check_benches(manifest, [BENCH, BENCH])


def test_a_real_artifact_says_what_a_token_reads(tmp_path):
    import builds
    import families

    from mkpack import build

    families.make_case(tmp_path / "checkpoint", "qwen3-plain")
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", tmp_path / "checkpoint", targets=["x86-64-v3"])
    with pytest.MonkeyPatch.context() as patch:
        builds.stub_compiler(tmp_path / "stub-cxx", patch)
        path = build.build(recipe, output=str(tmp_path) + "/")
    with open_artifact(path) as artifact:
        text = render(artifact.manifest, "me/model", {})
    assert "A token reads at least " in text
    assert str(tmp_path) not in text
