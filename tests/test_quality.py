"""Perplexity and KL divergence, beside a slow twin and between artifacts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import builds
import families
import numpy as np
import pytest

from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.errors import UserError
from mkpack.quality import compare, measure, read_text, tokens_of
from mkpack.text import Text

RNG = np.random.default_rng(3)
TABLES = RNG.normal(0, 3, (2, 40, 40)).astype(np.float32)  # logits after each token, of two models
TOKENS = RNG.integers(0, 40, 75).tolist()


class Table:
    """A model whose logits depend on the last token alone; it notes how it was called."""

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.ran = table, []

    def __call__(self, tokens) -> np.ndarray:
        self.ran.append(list(tokens))
        return self.table[list(tokens)]


def twin(model: np.ndarray, reference: np.ndarray) -> tuple[float, float, float, float]:
    """The definitions, a position and a token at a time."""
    nll = reference_nll = kl = agree = 0.0
    for now, following in zip(TOKENS[:-1], TOKENS[1:], strict=True):
        z = [math.fsum(math.exp(x) for x in row) for row in (model[now], reference[now])]
        q, p = ([math.exp(x) / z[i] for x in row] for i, row in enumerate((model[now], reference[now])))
        nll -= math.log(q[following])
        reference_nll -= math.log(p[following])
        kl += math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        agree += q.index(max(q)) == p.index(max(p))
    n = len(TOKENS) - 1
    return math.exp(nll / n), math.exp(reference_nll / n), kl / n, agree / n


@pytest.mark.parametrize("chunk", [1, 7, 16, 74, 100])
def test_the_numbers_are_those_of_the_slow_twin(chunk):
    model, reference = Table(TABLES[0]), Table(TABLES[1])
    found = measure(model, reference, TOKENS, chunk)
    assert found.tokens == 74
    numbers = (found.perplexity, found.reference_perplexity, found.kl_divergence, found.top1_agreement)
    assert numbers == pytest.approx(twin(*TABLES), rel=1e-9)
    assert model.ran == reference.ran and sum(model.ran, []) == TOKENS[:-1]
    assert max(map(len, model.ran)) <= chunk


def test_a_model_is_no_distance_from_itself():
    found = measure(Table(TABLES[0]), Table(TABLES[0]), TOKENS)
    assert found.kl_divergence == 0 and found.top1_agreement == 1
    assert found.perplexity == found.reference_perplexity


def test_logits_of_any_size_give_numbers_that_json_can_say():
    wild = np.full((40, 40), -3e38, np.float32)
    wild[:, 0] = 3e38
    found = measure(Table(wild), Table(TABLES[0]), [1, 2, 3])
    assert json.loads(found.to_json())["perplexity"] > 1e300 and math.isfinite(found.kl_divergence)
    assert "perplexity" in found.render()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(value):
    broken = TABLES[0].copy()
    broken[TOKENS[20], 3] = value
    with pytest.raises(UserError, match="NaN or infinite logits"):
        measure(Table(broken), Table(TABLES[0]), TOKENS)


def test_the_text_is_read_and_cut(tmp_path):
    families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    tokenizer = Text({"tokenizer.json": (tmp_path / "checkpoint" / "tokenizer.json").read_bytes()})
    (tmp_path / "text.txt").write_text("the cat", encoding="utf-8")
    text = read_text(tmp_path / "text.txt")
    whole = tokens_of(text, tokenizer, 1000, 1000)
    assert whole == tokenizer.encode_raw("the cat")
    assert tokens_of(text, tokenizer, 3, 1000) == tokens_of(text, tokenizer, 1000, 3) == whole[:3]
    assert len(tokens_of(read_text(None), tokenizer, 600, 10**6)) == 600, "mkpack's own text is long enough"
    with pytest.raises(UserError, match="has 1 tokens; at least 2"):
        tokens_of("", tokenizer, 1000, 1000)
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"text.txt: cannot be read: not UTF-8 text \(byte 0xff at offset 0\)"):
        read_text(tmp_path / "text.txt")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
    """One model in NVFP4 and in bf16, and another one with a larger vocabulary."""
    folder = tmp_path_factory.mktemp("quality")
    plain = families.make_case(folder / "plain", "mixtral-plain")
    other = families.make_case(folder / "other", "mixtral-untied-vocab-301")
    bf16 = dict.fromkeys(("experts", "attention", "lm_head", "embeddings"), "bf16")
    nvfp4 = {"quantise": dict.fromkeys(bf16, "nvfp4"), "quality": {"tokens": 90}, "parallel": {"tp": 2}}
    recipes = {"nvfp4": (plain, nvfp4), "bf16": (plain, {"quantise": bf16}), "other": (other, {})}
    return {
        name: build(builds.write_recipe(folder / f"{name}.yaml", checkpoint, name=name, **keys), output=folder)
        for name, (checkpoint, keys) in recipes.items()
    }


def test_the_report_of_a_build_is_the_comparison_with_a_bf16_artifact(artifacts):
    with open_artifact(artifacts["nvfp4"]) as artifact:
        report = artifact.manifest.quality["end_to_end"]
    found = compare(artifacts["nvfp4"], artifacts["bf16"], tokens=90)
    assert json.loads(found.to_json()) == report
    assert found.tokens == 89 and 0.001 < found.kl_divergence < 5 and found.top1_agreement < 1


def test_artifacts_are_compared_as_transformers_would(artifacts):
    checkpoint = artifacts["bf16"].parent / "plain"
    with open_artifact(artifacts["bf16"]) as artifact:
        tokens = Text({"tokenizer.json": artifact.read("tokenizer/tokenizer.json")}).encode_raw(read_text(None))[:60]
    models = [builds.oracle(artifacts[name], checkpoint, checkpoint) for name in ("nvfp4", "bf16")]
    logits = [families.reference_logits(model, tokens) for model in models]
    expected = measure(*(iterator(x) for x in logits), tokens)
    found = compare(artifacts["nvfp4"], artifacts["bf16"], tokens=60, threads=1)
    assert found.kl_divergence == pytest.approx(expected.kl_divergence, rel=1e-3)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-3)


def iterator(logits: np.ndarray):
    """A step that gives the rows of `logits` in turn."""
    rows = iter(logits)
    return lambda tokens: np.stack([next(rows) for _ in tokens])


def test_the_context_limits_the_text(artifacts):
    assert compare(artifacts["bf16"], artifacts["bf16"]).tokens == 127
    assert compare(artifacts["bf16"], artifacts["bf16"], tokens=10**6).kl_divergence == 0


def test_models_with_other_vocabularies_are_not_compared(artifacts):
    with pytest.raises(UserError, match="cannot be compared: vocab_size 288 and 301"):
        compare(artifacts["bf16"], artifacts["other"])


def test_the_command(artifacts):
    command = [Path(sys.executable).with_name("mkpack"), "eval", artifacts["nvfp4"], "--against", artifacts["bf16"]]
    done = subprocess.run([*command, "--tokens", "50", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 49
