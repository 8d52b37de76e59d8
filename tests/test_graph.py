"""`mkpack graph`: numbers that add up, tables that fit, and a picture that is well-formed and has every phase in it."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import artifacts
import builds
import families
import kernels
import pytest
from cuda_models import MIX, cuda_layout, cuda_spec
from hypothesis import given, settings
from test_layout import layouts

from mkpack import cli, graph, plan, schedule
from mkpack.errors import InternalError, UserError
from mkpack.layout import Layout
from mkpack.layout_cuda import CudaLayout
from mkpack.schedule import bytes_per_step, cuda_step
from mkpack.spec import LayerSpec

SVG = "{http://www.w3.org/2000/svg}"


def graph_of(layout: Layout, context: int = 300, tokens: int = 16) -> graph.Graph:
    found = schedule.cpu_schedule(layout, context, tokens)
    return graph.Graph("tiny & <small>", found)


def mixed(**changes) -> graph.Graph:
    layers = [LayerSpec(moe=True), LayerSpec(moe=False), LayerSpec(moe=True), LayerSpec(moe=True, sliding_window=9)]
    spec = kernels.tiny_spec(layers=layers, dense_intermediate_size=40, qk_norm=True, **changes)
    return graph_of(Layout(spec, kernels.precision("nvfp4"), 2))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    checkpoint = families.make_case(folder / "checkpoint", "qwen3-dense-layers")
    return builds.write_recipe(folder / "recipe.yaml", checkpoint)


def call(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mkpack", "graph", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return (done.value.code or 0, *capsys.readouterr())


def test_layers_that_do_the_same_are_shown_once():
    found = mixed()
    assert found.groups() == [[0, 2], [1], [3]]  # the window of the last one reads less of the cache
    text = found.render()
    for title in ("layers 0, 2", "layer 1", "layer 3"):
        assert f"\n{title}\n" in text
    assert "\nlayers 0, 2\n" not in found.render(2) and "\nlayer 2\n" in found.render(2)
    assert found.alike(2) == [0, 2] and found.alike(1) == [1]


def test_ranges():
    assert graph.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def rows(text: str, title: str) -> list[list[str]]:
    """Words of the table under a line that begins with `title`, line by line."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((i for i in range(at, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[at:end]]


def test_the_tables_say_what_the_schedule_says():
    found = mixed()
    text = found.render(0)
    lines = {line.split()[0]: line for line in text.split("\n") if line.startswith("  ")}
    phases = rows(text, "layer 0")
    assert [row[0] for row in phases] == ["phase", *(p.name for p in found.schedule.layer(0))]
    attention = next(line for line in text.split("\n") if line.startswith("  attention  2 x KV head per 256 positions"))
    assert attention.endswith("keys* values*  qkv") and "qkv cosine sine" in attention
    assert "attention (last arriver)" in next(line for line in text.split("\n") if "query heads of a KV head" in line)
    # 16 tokens, 4 heads, 2 chunks, 16 values and 16 for maximum and sum
    assert "4,096 float32" in lines["partial"] and "16.4 kB" in lines["partial"]
    assert "down of the layer before" in found.render(3) and "of the step before" in found.render()


@settings(max_examples=25)
@given(layouts())
def test_bytes_and_shares_add_up(layout):
    found = graph_of(layout)
    document = json.loads(found.to_json())
    for tokens in (1, 16):
        total = bytes_per_step(layout.spec, layout.sections, layout.tp, tokens)
        assert document["bytes_per_step"][f"{tokens}"] == round(total)
        assert sum(p["bytes_per_step"][f"{tokens}"] for p in document["phases"]) == pytest.approx(total, abs=99)
    shares = [row[-2:] for row in rows(found.render(), "bytes read per step")[1:]]
    assert sum(float(cell.rstrip("%")) for cell, _ in shares) == pytest.approx(100, abs=0.06 * len(shares))


def test_exchanges_are_shown_where_there_are_several_ranks():
    found = mixed()
    table = rows(text := found.render(), "exchanges of ranks")
    # 3 tiles of 16 channels on 2 ranks, of 2 chosen experts 2 tiles of 16; 4 bytes each, of 16 tokens and 2 layers
    assert "0, 2 output x every rank 32 128 4.1 kB".split() in table
    assert "0, 2 gate_up inner every rank 32 128 4.1 kB".split() in table
    assert "head logits best_value best_token the first rank 48 192 3.1 kB".split() in table
    sent = sum(p.exchange.words for p in found.schedule.phases if p.exchange)
    assert f"in all {sent:,} words of 4 bytes" in text and len(table) == 2 + 3 * 4 + 2
    titles = [t.text for t in ElementTree.fromstring(found.svg(2)).iter(f"{SVG}title")]
    assert "after output a rank sends its part of x to every rank: 128 bytes a token" in titles
    assert sum("a rank sends" in t for t in titles) == 4 and "each sending another 448 B a token" in found.svg(2)
    alone = graph_of(Layout(found.schedule.spec, kernels.precision("nvfp4")))
    assert "exchanges" not in alone.render() and "sends" not in alone.svg()


def test_json_names_phases_buffers_and_barriers():
    document = json.loads(mixed().to_json(1))
    assert [p["key"] for p in document["phases"]] == [
        f"layers.1.{n}" for n in ("qkv", "attention", "combine", "output", "gate_up", "down")
    ]
    assert [p["barrier_after"] for p in document["phases"]] == [True, False, True, True, True, True]
    assert {"name": "x", "scope": "shared"}.items() <= next(b for b in document["buffers"] if b["name"] == "x").items()


# -- the picture -------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(layouts())
def test_the_picture_is_well_formed_and_nothing_leaves_it(layout):
    found = graph_of(layout)
    for layer in range(len(layout.spec.layers)):
        root = ElementTree.fromstring(found.svg(layer))
        width, height = float(root.get("width")), float(root.get("height"))
        for rect in root.iter(f"{SVG}rect"):
            if rect.get("x"):
                x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
                assert 0 <= x and 0 <= y and x + w <= width and y + h <= height and w >= 0
        for text in root.iter(f"{SVG}text"):
            x, y = float(text.get("x")), float(text.get("y"))
            room = (min(x, width - x) * 2 if text.get("text-anchor") == "middle" else width - x) + 1
            assert 0 < y < height and len(text.text) * float(text.get("font-size")) * 0.6 <= room, text.text


def test_the_picture_shows_every_phase_and_buffer():
    found = mixed()
    root = ElementTree.fromstring(found.svg(2))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts[0] == "tiny & <small>: layer 2 of 4" and "layers 0, 2 do the same" in texts[1]
    phases = found.schedule.layer(2)
    assert {p.name for p in phases} <= set(texts)
    crossing = {u.buffer for p in phases for u in p.reads if found.schedule.buffer(u.buffer).lifetime != "phase"}
    assert crossing <= set(texts)
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert "combine waits for attention (last arriver)" in titles and "qkv waits for down of the layer before" in titles


def test_bars_are_as_wide_as_their_bytes():
    found = mixed()
    bars = [r for r in ElementTree.fromstring(found.svg(0)).iter(f"{SVG}rect") if r.get("height") == "42.0"]
    phases = found.schedule.layer(0)
    counts = [schedule.phase_bytes(found.schedule.spec, p, t) for t in (1, 16) for p in phases]
    widths = [float(r.get("width")) for r in bars]
    scale = sum(widths[len(phases) :]) / sum(counts[len(phases) :])
    assert widths == pytest.approx([n * scale for n in counts], abs=0.2)


# -- recipes, artifacts, the command -----------------------------------------------------------------------------------


def test_a_recipe_and_its_artifact_have_one_schedule(recipe, tmp_path, monkeypatch):
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)
    from mkpack.build import build

    path = build(recipe, output=tmp_path)
    assert graph.read(path) == graph.read(recipe)


def test_the_command(recipe, tmp_path, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, recipe)
    assert (code, err) == (0, "") and out.rstrip("\n") == graph.read(recipe).render()
    picture = tmp_path / "layer.svg"
    code, out, err = call(monkeypatch, capsys, recipe, "--json", "--layer", 3, "--svg", picture)
    assert code == 0 and {p["layer"] for p in json.loads(out)["phases"]} == {3}
    assert picture.read_text() == graph.read(recipe).svg(3)


def test_a_picture_replaces_pictures_only(recipe, tmp_path, monkeypatch, capsys):
    other, link, picture = tmp_path / "notes.txt", tmp_path / "link.svg", tmp_path / "layer.svg"
    other.write_text("keep me")
    link.symlink_to(recipe)
    before = recipe.read_bytes()
    for path, said in ((recipe, "drawn from"), (link, "drawn from"), (other, "not an SVG picture")):
        code, out, err = call(monkeypatch, capsys, recipe, "--svg", path)
        assert (code, out) == (2, "") and f"cannot write {path}" in err and said in err
    assert recipe.read_bytes() == before and other.read_text() == "keep me"
    for old in ("", "<svg/>", "\ufeff <?xml version='1.0'?><svg/>"):
        picture.write_text(old)
        assert call(monkeypatch, capsys, recipe, "--svg", picture)[0] == 0
        assert picture.read_text() == graph.read(recipe).svg(0)


def test_mistakes_are_explained(recipe, tmp_path, monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, recipe, "--layer", 4)
    assert code == 2 and "--layer 4: this model has the layers 0 to 3" in err
    code, _, err = call(monkeypatch, capsys, recipe, "--svg", tmp_path / "none" / "layer.svg")
    assert code == 2 and "cannot write" in err
    code, _, err = call(monkeypatch, capsys, tmp_path / "none.mkpack")
    assert code == 2 and "none.mkpack" in err


def test_an_artifact_of_another_order_is_refused(tmp_path):
    with pytest.raises(UserError, match="a.mkpack: its sections are not those of this version of mkpack; rebuild it"):
        graph.read(artifacts.write(tmp_path / "a.mkpack"))


@pytest.mark.parametrize("command", [graph.read, plan.plan])
def test_a_schedule_that_does_not_hold_stops_everything(recipe, monkeypatch, command):
    class Broken(schedule.cpu._Step):
        def phases(self):
            return [p for p in super().phases() if p.name != "combine"]

    monkeypatch.setattr(schedule.cpu, "_Step", Broken)
    with pytest.raises(InternalError, match="layers.0.output waits for layers.0.combine, which is no phase"):
        command(recipe)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpu(kernel: int = 0) -> graph.Graph:
    layout = cuda_layout(cuda_spec(layers=[LayerSpec(moe=True)] * 2, moe={"intermediate_size": 768}))
    found = schedule.cuda_schedules(layout, 1000, "sm_90a")
    return graph.Graph("tiny & <small>", found[kernel], tuple(s.kernel for s in found))


def test_tables_of_a_gpu():
    text = gpu().render()
    assert "target sm_90a, 132 SMs" in text and "decode_kernel, drawn" in text
    assert [r[0] for r in rows(text, "layers 0-1")] == ["phase", *(p.name for p in gpu().schedule.layer(0))]
    assert [r[0] for r in rows(text, "before")] == ["phase", "embed"]
    assert [r[0] for r in rows(text, "after")] == ["phase", "head", "sample", "token"]
    streams = [r[:3] for r in rows(text, "streams")]
    assert ["dense", "qkv", "dense"] in streams and ["expert", "gate_up", "experts"] in streams
    machine = gpu().schedule.machine
    memory = rows(text, "shared memory of an SM")
    assert len(memory) == len(machine.regions) + 1 and memory[1][:4] == ["0", "65,536", "dense", "ring"]
    assert rows(text, "registers")[1:] == [
        ["4", "streams", "and", "watches", "64", "8,192"],
        ["16", "computes", "104", "53,248"],
    ]
    assert "\nwords" not in text
    words = rows(gpu(2).render(), "words")
    assert ["x_mid", "output", "128", "router", "132", "2,048", "4"] in words
    assert ["x_token", "sample", "1", "token", "132", "1", "1"] in words
    # 132 SMs share 96 tiles of 8 experts
    assert next(r for r in rows(gpu(2).render(), "streams") if r[1] == "gate_up")[-8:-6] == ["5", "-"]


def test_what_ranks_of_gpus_exchange():
    layout = CudaLayout(gpu().schedule.spec, MIX, tp=2)
    (s,) = schedule.cuda_schedules(layout, 1000, "sm_90a")
    text = graph.Graph("two", s).render()
    assert "2 ranks" in text and "\nbound of each rank: " in text
    assert "       and 2.0 kB of keys and values for every position" in text  # 2 layers x 2 x 256 x 2 bytes
    assert "exchanges" not in gpu().render()
    # two layers, a token's 16 heads of 128, in bf16; the best of any number of tokens
    exchanges = rows(text, "exchanges")
    assert ["0-1", "combine", "attention", "every", "rank", "1,024", "4,096", "131.1", "kB"] in exchanges
    assert ["head", "best", "shared_token", "every", "rank", "-", "-", "1.1", "kB"] in exchanges


def test_json_of_a_gpu():
    document = json.loads(gpu(1).to_json(1))
    assert document["kernel"] == "decode_kernel" and document["machine"]["sms"] == 132
    qkv = document["phases"][0]
    assert qkv["feeds"][0]["bounds"][-1] == 640 and qkv["puts"][0]["bounds"][-1] == 5120
    assert sum(r["bytes"] for r in document["machine"]["regions"]) > document["machine"]["shared_bytes"] - 128


@pytest.mark.parametrize("kernel", [0, 2])
def test_the_picture_of_a_gpu(kernel):
    root = ElementTree.fromstring(gpu(kernel).svg(1))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {p.name for p in gpu().schedule.layer(1)} <= set(texts)
    assert ("barrier of all SMs" in texts) == (kernel == 0)
    assert ("polls for the words that it reads" in texts) == (kernel == 2)
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert f"down waits for gate_up{' (words)' if kernel else ''}" in titles


def test_targets_and_kernels_are_chosen(tmp_path, monkeypatch, capsys):
    shape = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **shape)
    path = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, targets=["native", "sm_90a"])
    assert graph.read(path).schedule.machine is None
    found = graph.read(path, "gpu")
    assert (found.schedule.target, found.kernels) == ("sm_90a", ("step_kernel",)) and found == graph.read(
        path, "sm_90a"
    )
    code, out, _ = call(monkeypatch, capsys, path, "--target", "gpu", "--kernel", "step_kernel")
    assert code == 0 and out.rstrip("\n") == found.render()
    code, _, err = call(monkeypatch, capsys, path, "--target", "sm_100a")
    assert code == 2 and "--target sm_100a" in err and "cpu, gpu, sm_90a, x86-64" in err
    code, _, err = call(monkeypatch, capsys, path, "--target", "gpu", "--kernel", "decode_kernel")
    assert code == 2 and 'target sm_90a has no such kernel; it has "step_kernel"' in err
    only = builds.write_recipe(tmp_path / "only.yaml", checkpoint, targets=["sm_90a"])
    assert graph.read(only).schedule.target == "sm_90a"


def test_a_schedule_of_a_gpu_that_does_not_hold_stops_everything(tmp_path, monkeypatch):
    shape = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = families.make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **shape)
    path = builds.write_recipe(tmp_path / "recipe.yaml", checkpoint, targets=["sm_90a"])
    phases = cuda_step.Step.phases
    monkeypatch.setattr(cuda_step.Step, "phases", lambda self: [p for p in phases(self) if p.name != "combine"])
    for command in (graph.read, plan.plan):
        with pytest.raises(InternalError, match="schedule for sm_90a, step_kernel is wrong"):
            command(path)
