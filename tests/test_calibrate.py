"""Calibration: its forward beside transformers and beside the float64 twin in every family, what it records of every
projection, where its tokens come from, and what a build tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builds
import families
import numpy as np
import plain_model
import pytest

from mkpack import calibrate, calibration_step
from mkpack.artifact import open_artifact
from mkpack.build import build
from mkpack.calibrate import Calibration, sequences_of
from mkpack.errors import UserError
from mkpack.forward import Forward
from mkpack.models import model_spec
from mkpack.spec import ModelSpec, tensors
from mkpack.text import Text

torch = families.torch
RNG = np.random.default_rng(5)


class Model:
    """A tiny checkpoint of a case, its tensors by canonical name, and a load() that counts."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = families.make_case(folder, case)
        self.spec, names = model_spec(json.loads((self.folder / "config.json").read_bytes()))
        self.weights = families.by_role(list(tensors(self.spec, names)), families.checkpoint_tensors(self.folder))
        self.loaded: list[str] = []

    def load(self, name: str, rows: Any) -> Any:
        self.loaded.append(name)
        tensor = torch.from_numpy(np.array(self.weights[name], dtype=np.float32))
        return tensor if rows is None else tensor[rows]


class Spy(np.ndarray):
    """A float64 weight of the twin that notes the largest value it is multiplied with, and by how many rows."""

    def __array_finalize__(self, other: Any) -> None:
        self.name, self.seen = getattr(other, "name", ""), getattr(other, "seen", None)

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if self.seen is not None:
            most, rows = self.seen.get(self.name, (0.0, 0))
            self.seen[self.name] = (max(most, float(np.abs(x).max())), rows + len(x))
        return x @ np.asarray(self)


def inputs_of(model: Model, tokens: list[int]) -> dict[str, tuple[float, int]]:
    """(largest input, rows) of every matrix by canonical name, by the twin."""
    seen: dict[str, tuple[float, int]] = {}
    weights = {}
    for name, array in model.weights.items():
        weights[name] = np.asarray(array, np.float64)
        if array.ndim == 2 and name != "embed":
            weights[name] = weights[name].view(Spy)
            weights[name].name, weights[name].seen = name, seen
    plain_model.logits(model.spec, weights, tokens)
    return seen


MATRIX = {"qkv": "q", "gate_up": "gate"}  # whose input a projection's is, where the name is another


@pytest.mark.parametrize("case", list(families.CASES))
def test_what_goes_into_every_projection_is_what_the_twin_says(tmp_path, case):
    model = Model(tmp_path / "checkpoint", case)
    tokens = RNG.integers(5, 250, 40).tolist()
    found = calibrate.calibrate(model.spec, model.load, [tokens])
    expected = inputs_of(model, tokens)
    compared = set()
    for name, amax in found.amax.items():
        prefix, _, part = name.rpartition(".")
        matrix = f"{prefix}.{MATRIX.get(part, part)}"
        most, rows = expected[matrix]
        assert amax == pytest.approx(most, rel=2e-4), name
        if ".experts." in name and part == "gate_up":
            assert found.seen[prefix] == rows
        compared.add(matrix)
    used = {name for name in expected if not name.endswith((".k", ".v", ".up", ".router", ".attn_gate"))}
    assert compared == used - {"embed", "lm_head"}
    assert found.tokens == 40


@pytest.mark.parametrize(
    "case", ["mixtral-plain", "qwen3-dense-layers", "minimax-plain", "gpt-oss-plain", "muse-spark-plain"]
)
def test_the_stream_after_every_layer_is_that_of_transformers(tmp_path, case):
    model = Model(tmp_path / "checkpoint", case)
    tokens = RNG.integers(5, 250, 30).tolist()
    reference = families.reference(model.folder)
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    with torch.inference_mode(), Forward(model.spec, model.load, lambda *_: None) as forward:
        x = forward.embed(tokens)
        layers = len(model.spec.layers)
        for i in range(layers):
            assert builds.relative_error(x.numpy(), states[i][0].numpy()) < 1e-4, i
            x = forward.layer(i, x, [len(tokens)])
        # What transformers calls the last state is normed.
        assert len(states) == layers + 1


def test_sequences_do_not_see_each_other_and_the_number_of_cpus_changes_nothing(tmp_path, monkeypatch):
    model = Model(tmp_path / "checkpoint", "qwen3-plain")
    sequences = [RNG.integers(5, 250, n).tolist() for n in (7, 1, 300, 40)]
    together = calibrate.calibrate(model.spec, model.load, sequences)
    alone = [calibrate.calibrate(model.spec, model.load, [s]) for s in sequences]
    for name, amax in together.amax.items():
        assert amax == pytest.approx(max(one.amax.get(name, 0.0) for one in alone), rel=1e-5), name
    assert (
        together.seen == {name: sum(one.seen.get(name, 0) for one in alone) for name in together.seen}
        and together.tokens == 348
    )
    for cores in (1, 7):
        monkeypatch.setattr(calibrate.Forward.__init__.__globals__["platform"], "cores", lambda cores=cores: cores)
        again = calibrate.calibrate(model.spec, model.load, sequences)
        assert (again.amax, again.seen) == (together.amax, together.seen)


def test_each_matrix_is_read_once_and_experts_without_tokens_not_at_all(tmp_path):
    model = Model(tmp_path / "checkpoint", "mixtral-plain")
    found = calibrate.calibrate(model.spec, model.load, [[7]])
    assert len(model.loaded) == len(set(model.loaded))
    assert model.spec.moe and len(found.seen) == model.spec.moe.top_k * len(model.spec.layers)
    experts = {name.rsplit(".", 1)[0] for name in model.loaded if ".experts." in name}
    assert experts == set(found.seen)


def test_activations_that_overflow_are_told_where(tmp_path):
    model = Model(tmp_path / "checkpoint", "mixtral-plain")
    model.weights["layers.1.v"] = model.weights["layers.1.v"] + np.float32(3e38)
    with pytest.raises(UserError, match=r"what goes into layers\.1\.o is NaN or infinite.*overflow float32"):
        calibrate.calibrate(model.spec, model.load, [[5, 6, 7]])


# -- the report ---------------------------------------------------------------------------------------------------


def moe_spec(tmp_path: Path) -> ModelSpec:
    return Model(tmp_path / "checkpoint", "mixtral-plain").spec


def test_experts_with_few_tokens_take_the_maxima_of_their_layer(tmp_path):
    spec = moe_spec(tmp_path)
    assert spec.moe
    count = spec.moe.num_experts
    amax = {
        f"layers.{i}.experts.{e}.{p}": 10.0 * i + e + 1
        for i in range(2)
        for e in range(count)
        for p in ("gate_up", "down")
    }
    seen = {f"layers.{i}.experts.{e}": 3 + e for i in range(2) for e in range(count)}
    del seen["layers.1.experts.2"], amax["layers.1.experts.2.gate_up"], amax["layers.1.experts.2.down"]
    found = Calibration(50, {**amax, "layers.0.qkv": 5.0, "layers.1.o": 0.0}, seen)
    assert found.few(spec, 5) == [
        "layers.0.experts.0",
        "layers.0.experts.1",
        *(f"layers.1.experts.{e}" for e in (0, 1, 2)),
    ]
    report = json.loads(json.dumps(found.report(spec, 5)))
    assert report["experts_with_few_tokens"] == found.few(spec, 5)
    most = [float(count), 10.0 + count]
    for i in range(2):
        layer = report["experts"][f"layers.{i}"]
        few = {int(name.rsplit(".", 1)[1]) for name in found.few(spec, 5) if name.startswith(f"layers.{i}.")}
        assert layer["gate_up"] == layer["down"] == [most[i] if e in few else 10.0 * i + e + 1 for e in range(count)]
        assert report["input_scales"][f"layers.{i}.experts.down"] == pytest.approx(most[i] / 2688, rel=1e-5)
    assert report["experts"]["layers.1"]["tokens"] == [3, 4, 0, *range(6, 3 + count)]
    assert report["input_scales"]["layers.0.qkv"] == pytest.approx(5 / 2688, rel=1e-5)
    assert report["input_scales"]["layers.1.o"] > 0  # a scale by which one can divide
    assert Calibration.from_json(found.to_json()) == found


# -- data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    folder = families.make_case(tmp_path_factory.mktemp("text") / "checkpoint", "mixtral-plain")
    return Text({name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")})


def test_tokens_come_from_a_text_jsonl_or_a_folder(text, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat " * 100)
    whole = text.encode_raw("the cat sat " * 100)
    found = sequences_of(tmp_path / "a.txt", text, 10_000, 100)
    assert sum(found, []) == whole and max(map(len, found)) == 100
    assert sum(sequences_of(tmp_path / "a.txt", text, 130, 100), []) == whole[:130]
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    chat = [{"role": "user", "content": "hello"}]
    lines = [{"text": "one"}, {"messages": chat, "id": 3}]
    (folder / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (folder / "deep" / "c.txt").write_text("two")
    (folder / "picture.png").write_bytes(b"\xff\xd8")
    expected = [text.encode_raw("one"), text.encode_chat(chat, False), text.encode_raw("two")]
    assert sequences_of(folder, text, 10_000, 512) == expected
    assert sequences_of(folder / "b.jsonl", text, 10_000, 512) == expected[:2]
    assert sum(map(len, sequences_of(None, text, 10**6, 10**6))) > 1500, "mkpack's own text is long enough"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txet": "y"}', ["a.jsonl:2", '"text" or "messages"', 'did you mean "text"']),
        ("a.jsonl", "nonsense", ["a.jsonl:1", "not JSON"]),
        ("a.jsonl", "[1]", ["a.jsonl:1", "expected an object"]),
        ("a.txt", b"\xff\xfe", ["a.txt", "UTF-8"]),
        ("folder/data.parquet", b"PAR1", ["folder", "found only .parquet", "JSONL"]),
        ("a.jsonl", "", ["holds no text"]),
        ("a.jsonl", '{"text": " "}\n{"messages": []}', ["holds no text"]),
        ("a.txt", "\n", ["a.txt: holds no text"]),
        (None, "", ["absent.txt: cannot be read: No such file"]),
    ],
)
def test_data_that_is_none_is_refused(text, tmp_path, name, content, parts):
    path = tmp_path / (name or "absent.txt")
    path.parent.mkdir(exist_ok=True)
    if name:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        sequences_of(path.parent if path.suffix == ".parquet" else path, text, 100, 100)
    assert all(part in str(caught.value) for part in parts), caught.value


# -- builds -------------------------------------------------------------------------------------------------------


def test_a_build_records_scales_and_lists_experts_with_few_tokens(tmp_path, monkeypatch, capsys):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    (tmp_path / "a.txt").write_text("the")
    keys: dict[str, Any] = {"quantise": {"experts": "bf16"}, "calibrate": {"data": "a.txt", "min_tokens": 5}}
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, **keys)
    with pytest.raises(
        UserError,
        match=r"8 experts saw fewer than 5 of the 3 tokens.*--strict refuses that.*calibrate in the",
    ):
        build(recipe, output=tmp_path, strict=True)
    from rich.console import Console

    path = build(recipe, output=tmp_path, console=Console(stderr=True, width=300))
    told = capsys.readouterr().err
    assert "8 experts saw fewer than 5" in told and "change no result" in told
    assert "\n\n" not in told, "a bar that nobody sees leaves no empty line"
    with open_artifact(path) as artifact:
        report, quality = json.loads(artifact.read("report.json")), artifact.manifest.quality
    assert report["calibration"]["tokens"] == 3 and len(report["calibration"]["experts_with_few_tokens"]) == 8
    short = {key: value for key, value in report["calibration"].items() if key != "experts"}
    assert quality["calibration"] == short
    stamp = path.stat().st_mtime_ns
    assert build(recipe, output=tmp_path) == path and path.stat().st_mtime_ns == stamp
    (tmp_path / "a.txt").write_text("the cat")  # other tokens are another build
    build(recipe, output=tmp_path)
    assert path.stat().st_mtime_ns != stamp
    monkeypatch.setattr(calibration_step, "calibrate", lambda *_: pytest.fail("calibrated without being asked"))
    builds.write_recipe(recipe, checkpoint, quantise={"experts": "bf16"})
    build(recipe, output=tmp_path)


def test_a_recipe_that_cannot_be_calibrated_is_refused(tmp_path, monkeypatch):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    checkpoint = families.make_case(tmp_path / "checkpoint", "mixtral-plain")
    recipe = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, calibrate={"data": "absent.txt"})
    with pytest.raises(UserError, match=r"recipe.yaml:\d+: calibrate.data: .*absent.txt: cannot be read"):
        build(recipe, output=tmp_path)
    (checkpoint / "tokenizer.json").unlink()
    builds.write_recipe(recipe, checkpoint, calibrate={})
    with pytest.raises(UserError, match=r"recipe.yaml:\d+: calibrate: calibrating needs a tokenizer"):
        build(recipe, output=tmp_path)
