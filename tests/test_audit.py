"""What an audit counts is what is there, and what it refuses is what a build refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import families
import numpy as np
import pytest
import quantised
import torch
from patience import PATIENCE_S
from safetensors.torch import load_file

from mkpack.audit import Amount, Audit, audit, show
from mkpack.checkpoint import Checkpoint
from mkpack.errors import UserError
from mkpack.layout import Layout
from mkpack.models import model_spec
from mkpack.quantize import quantise
from mkpack.scales import Range
from mkpack.schedule import bytes_per_step
from mkpack.spec import Precision, tensors

ROOT = Path(__file__).parents[1]
NAME = "model.layers.1.mlp.experts.2.up_proj"


def printed(found: Audit, capsys: pytest.CaptureFixture[str]) -> str:
    show(found)
    return capsys.readouterr().out


def refused_by_a_build(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint = Checkpoint.open(folder)
        roles = list(tensors(*model_spec(checkpoint.config)))
        checkpoint.check(roles)
        for role in roles:
            quantise(checkpoint.read(role.source, role.part), "nvfp4" if role.precision == "experts" else "f32")
    return str(caught.value)


def test_a_checkpoint_that_is_not_quantised(plain, capsys):
    found = audit(plain)
    state = families.checkpoint_tensors(plain)
    size = sum(t.nbytes for t in state.values())
    assert (found.family, found.refused, found.exit_code, found.scales, found.notes) == ("qwen3_moe", [], 0, {}, [])
    assert found.dtypes == {"BF16": Amount(len(state), size)}
    assert sum(p.tensors for p in found.parts) == len(state) and sum(p.nbytes for p in found.parts) == size
    gate = next(p for p in found.parts if p.part == "experts.gate")
    assert (gate.stored, gate.dtype, gate.shape, gate.tensors) == ("plain", "BF16", (64, 64), 8)
    assert found.routers == {"router": ["BF16"]} and found.unused == {} and found.duplicates == []
    spec, _ = model_spec(json.loads((plain / "config.json").read_bytes()))
    layout = Layout(spec, found.precision, 1, "bf16")
    assert set(found.precision) == set(get_args(Precision))
    assert found.precision["experts"] == "nvfp4" and found.precision["attention"] == "bf16"
    assert found.artifact_bytes == layout.nbytes
    assert found.bytes_per_token == round(bytes_per_step(spec, layout.sections))
    text = printed(found, capsys)
    for said in ("qwen3_moe", "experts.gate", "64 x 64", "router: BF16", "read per token", "nothing would be refused"):
        assert said in text
    assert "algorithm" not in found.precision


@pytest.mark.parametrize("family", families.PLAIN)
def test_every_family(tmp_path, family):
    folder = families.make_checkpoint(tmp_path / "checkpoint", family)
    found, state = audit(folder), families.checkpoint_tensors(folder)
    assert (found.family, found.refused, found.scales, found.duplicates) == (family, [], {}, [])
    counted = sum(p.nbytes for p in found.parts) + sum(a.nbytes for a in found.unused.values())
    assert counted == sum(t.nbytes for t in state.values())
    assert found.artifact_bytes and found.bytes_per_token and 0 < found.bytes_per_token <= found.artifact_bytes


def test_scales_are_counted(compressed, capsys):
    state = load_file(compressed / "model.safetensors")
    scale = state[f"{NAME}.weight_scale"].view(torch.uint8).clone()
    codes = state[f"{NAME}.weight_packed"].clone()
    scale[0] = torch.tensor([0, 1, 7, 8], dtype=torch.uint8)  # zero, the smallest and largest subnormal, 2^-6
    codes[0, :8] = 0x80  # zeros of both signs, so nothing is lost
    scales = {f"{NAME}.weight_scale": scale.view(torch.float8_e4m3fn), f"{NAME}.weight_packed": codes}
    quantised.change(compressed, **scales, **{f"{NAME}.input_global_scale": torch.tensor(float("inf"))})
    found = audit(compressed)
    assert found.refused == []
    up = found.scales["experts.up nvfp4"]
    everything = [
        t for n, t in load_file(compressed / "model.safetensors").items() if n.endswith("up_proj.weight_scale")
    ]
    assert up.matrices == 8 and up.blocks.count == sum(t.numel() for t in everything) == 8 * 256
    assert (up.blocks.zero, up.blocks.subnormal, up.lost, up.blocks.negative, up.blocks.nan) == (1, 2, 0, 0, 0)
    assert (up.blocks.least, up.blocks.most) == (2.0**-9, max(t.float().max().item() for t in everything))
    divisors = [t for n, t in state.items() if n.endswith("up_proj.weight_global_scale")]
    assert up.whole.count == 8 and up.whole.most == (1 / torch.cat(divisors)).max().item()
    assert up.activations.inf == 1
    assert "experts.up nvfp4: 1 of 8 matrices have an input scale" in found.notes
    factors = {n: 1 / t.item() for n, t in state.items() if n.endswith("weight_global_scale")}
    ratios = [
        max(pair) / min(pair)
        for pair in ((f, factors[n.replace("gate_proj", "up_proj")]) for n, f in factors.items() if "gate_proj" in n)
    ]
    assert found.gate_up["pairs"] == 8 and found.gate_up["different"] == sum(r != 1 for r in ratios) >= 4
    assert found.gate_up["largest_ratio"] == pytest.approx(max(ratios), rel=1e-6)
    text = printed(found, capsys)
    assert "gate and up: " in text and "2,048     1          2" in text


@pytest.mark.parametrize(
    ("suffix", "code", "counted"),
    [("weight_scale", 0x7F, "nan"), ("weight_scale", 0xA0, "negative"), ("weight_scale", 0, "zero")],
)
def test_scales_that_a_build_refuses_are_refused(compressed, capsys, suffix, code, counted):
    scale = load_file(compressed / "model.safetensors")[f"{NAME}.{suffix}"].view(torch.uint8).clone()
    scale[1, 1] = scale[5, 0] = code
    quantised.change(compressed, **{f"{NAME}.{suffix}": scale.view(torch.float8_e4m3fn)})
    found = audit(compressed)
    assert found.refused == [refused_by_a_build(compressed)] and found.exit_code == 1
    up = found.scales["experts.up nvfp4"]
    assert getattr(up.blocks, counted) == 2 and up.lost == (2 if code == 0 else 0)
    assert f"refused: {NAME}.weight_packed: 2 of 256 block scales are" in printed(found, capsys)


def test_the_scale_of_a_whole_matrix(compressed):
    quantised.change(compressed, **{f"{NAME}.weight_global_scale": torch.tensor([0.0])})
    assert audit(compressed).refused == [refused_by_a_build(compressed)]


@pytest.mark.parametrize("scale", [torch.full((64, 1), float("nan")), torch.zeros(64, 1)])
def test_fp8(plain, tmp_path, scale):
    folder = tmp_path / "q"
    quantised.compressed_tensors(plain, folder, "FP8_DYNAMIC")
    found = audit(folder)
    assert found.refused == [] and found.scales["experts.up fp8"].blocks.count == 8 * 64
    quantised.change(folder, **{f"{NAME}.weight_scale": scale})
    assert audit(folder).refused == [refused_by_a_build(folder)]


@pytest.mark.parametrize(("spread", "inexact"), [(17, 0), (60, 8)])
def test_mxfp4_that_nvfp4_cannot_hold(tmp_path, capsys, spread, inexact):
    source = families.make_checkpoint(tmp_path / "plain", "gpt_oss", dtype="bfloat16", intermediate_size=64)
    quantised.mxfp4(source, tmp_path / "q", spread=spread)
    found = audit(tmp_path / "q")
    assert found.refused == found.notes == []
    gate = found.scales["experts.gate mxfp4"]
    assert (gate.matrices, gate.inexact) == (8, inexact) and gate.blocks.most == 2.0**-4
    assert f"experts.gate mxfp4: NVFP4 holds {8 - inexact} of 8 matrices exactly" in printed(found, capsys)
    # Of a fused tensor, gate and up have half each.
    stored = load_file(tmp_path / "q" / "model.safetensors")
    size = sum(t.nbytes for n, t in stored.items() if "gate_up_proj_blocks" in n or "gate_up_proj_scales" in n)
    assert sum(p.nbytes for p in found.parts if p.part in ("experts.gate", "experts.up")) == size


def test_what_is_not_part_of_the_model_and_what_is_there_twice(plain, tmp_path, capsys):
    state = families.checkpoint_tensors(plain)
    for i in range(2):
        state[f"vision.blocks.{i}.weight"] = torch.arange(8192.0).reshape(2, 4096) + i
    state["vision.twin"] = state["vision.blocks.1.weight"].clone()
    late = state["vision.blocks.1.weight"].clone()
    late[1, -1] = 0
    state["vision.almost"] = late
    found = audit(quantised.write(plain, tmp_path / "q", state))
    assert found.refused == [] and found.unused == {
        "vision.almost": Amount(1, 32768),
        "vision.blocks.{i}.weight": Amount(2, 65536),
        "vision.twin": Amount(1, 32768),
    }
    assert [sorted(names) for names in found.duplicates] == [["vision.blocks.1.weight", "vision.twin"]]
    text = printed(found, capsys)
    assert "not part of the model: vision.blocks.{i}.weight (2, 65.5 kB)" in text and "equal bytes: " in text


def test_a_head_beside_a_tied_embedding(tmp_path):
    plain = families.make_checkpoint(tmp_path / "plain", "qwen3_moe", tie_word_embeddings=True)
    state = families.checkpoint_tensors(plain)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    folder = quantised.write(plain, tmp_path / "q", state)
    assert [sorted(names) for names in audit(folder).duplicates] == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert audit(folder).notes == []
    quantised.change(folder, lm_head__weight=state["lm_head.weight"] + 1)
    assert audit(folder).notes[0].startswith("tie_word_embeddings is true, so")


def test_contradictions(plain, tmp_path):
    folder = quantised.write(plain, tmp_path / "q", families.checkpoint_tensors(plain), dtype="float32")
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"metadata": {"total_size": 12}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "stray.safetensors").write_bytes(b"")
    size = sum(t.nbytes for t in families.checkpoint_tensors(plain).values())
    assert audit(folder).notes == [
        f"model.safetensors.index.json says total_size 12, the tensors are {size} bytes",
        "config.json says dtype float32, most weights that are not quantised are BF16",
        "files the index does not name are ignored: stray.safetensors",
    ]


def test_metadata_that_contradicts_the_tensors_is_told(compressed):
    config = json.loads((compressed / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*experts.*")
    (compressed / "config.json").write_text(json.dumps(config))
    assert (
        audit(compressed)
        .notes[0]
        .startswith("config.json says not quantised, the tensors are nvfp4 and are believed: 24")
    )


def test_every_fault_is_listed(compressed):
    name = "model.layers.0.mlp.gate.weight"
    router = load_file(compressed / "model.safetensors")[name]
    quantised.change(
        compressed, **{name: router.to(torch.float8_e4m3fn), "lm_head.weight": None, f"{NAME}.weight_scale": None}
    )
    found = audit(compressed)
    assert len(found.refused) == 3 and found.exit_code == 1 and found.scales == {}
    assert all(line in refused_by_a_build(compressed) for line in found.refused)
    assert found.routers == {"router": ["F8_E4M3", "BF16"]}


def test_many_faults_are_cut(compressed):
    state = load_file(compressed / "model.safetensors")
    quantised.change(compressed, **{n: t * 0 for n, t in state.items() if n.endswith("weight_global_scale")})
    found = audit(compressed)
    assert len(found.refused) == 21 and found.refused[-1] == "and 4 more like these"


def test_a_tokenizer(plain, tmp_path):
    folder = quantised.write(plain, tmp_path / "q", families.checkpoint_tensors(plain))
    (folder / "tokenizer.json").write_text("{}")
    found = audit(folder)
    assert len(found.refused) == 1 and "tokenizer.json" in found.refused[0] and found.family == "qwen3_moe"
    (folder / "tokenizer.json").unlink()
    assert audit(folder).notes == ["no tokenizer.json: an artifact would take token ids only"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"model_type": "mixtrel"}', "did you mean"),
        ("config.json", "{", "not readable as JSON"),
        ("model.safetensors", "no", "truncated"),
    ],
)
def test_what_cannot_be_read_is_refused(plain, tmp_path, capsys, name, text, said):
    folder = quantised.write(plain, tmp_path / "q", families.checkpoint_tensors(plain))
    (folder / name).write_text(text)
    found = audit(folder)
    assert "\n\n\n" not in printed(found, capsys)
    assert found.exit_code == 1 and len(found.refused) == 1 and said in found.refused[0] and found.family is None
    assert json.loads(found.to_json())["refused"] == found.refused


def mkpack(*words: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("mkpack"), "audit", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_the_command(compressed, tmp_path):
    done = mkpack(str(compressed))
    assert (done.returncode, done.stderr) == (0, "") and "nothing would be refused" in done.stdout
    done = mkpack(str(compressed), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(audit(compressed).to_json())
    quantised.change(compressed, lm_head__weight=None)
    done = mkpack(str(compressed))
    assert done.returncode == 1 and 'refused: "lm_head.weight" is missing' in done.stdout
    done = mkpack(str(tmp_path / "absent"))
    assert done.returncode == 2 and "no such folder; expected a folder here" in done.stderr
    done = mkpack(str(compressed / "config.json"))
    assert done.returncode == 2 and "config.json: is a file; expected a folder" in done.stderr


def test_memory_is_that_of_a_tensors_scales(tmp_path, plain):
    """48 MiB of weights and 6 MiB of scales, of which 3 MiB at most are read at a time."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 4096, "num_hidden_layers": 1}
    source = families.make_checkpoint(tmp_path / "small", "qwen3_moe", dtype="bfloat16", num_experts=2)
    config = json.loads((source / "config.json").read_text()) | sizes
    spec, names = model_spec(config)
    state = {}
    for role in tensors(spec, names):
        if role.precision == "experts":
            n, k = role.shape
            base = role.source.removesuffix(".weight")
            state[role.source] = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
            state[f"{base}.weight_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
            state[f"{base}.weight_scale_2"] = torch.tensor(1.0)
        else:
            state[role.source] = torch.ones(role.shape, dtype=torch.bfloat16)
    folder = quantised.write(source, tmp_path / "q", state, **sizes)
    script = (
        "import resource, sys; from pathlib import Path; from mkpack.audit import audit\\n"
        f"audit(Path({str(source)!r})); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\\n"
        f"found = audit(Path({str(folder)!r})); assert found.scales['experts.up nvfp4'].blocks.count\\n"
        "assert 'torch' not in sys.modules; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    ).replace("\\n", chr(10))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 10


def test_a_range_counts_kinds_and_keeps_ends():
    r = Range()
    r.add(np.array([0, -0.0, 1e-40, -2, 5, np.inf, -np.inf, np.nan], np.float32))
    assert (r.count, r.zero, r.subnormal, r.negative, r.inf, r.nan) == (8, 2, 1, 3, 2, 1)
    assert (r.least, r.most) == (pytest.approx(1e-40, rel=1e-5), 5)
    r.add(np.array([9.0, 7.0], np.float32), np.array([0, 3]))
    assert (r.count, r.most) == (11, 7)
    assert json.loads(Audit("x").to_json())["refused"] == []
