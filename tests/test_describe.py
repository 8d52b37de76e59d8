import json
from pathlib import Path
from typing import Any

import artifacts
import pytest

from mkpack import cli
from mkpack.artifact import extract, open_artifact
from mkpack.describe import bytes_by_kind, check, describe, to_json


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return artifacts.write(tmp_path / "tiny.mkpack")


def _section(name: str, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "format": "bf16",
        "rows": 16,
        "cols": 16,
        "offset": offset,
        "nbytes": nbytes,
        "tensors": ["t"],
    }


def test_describe_names_what_is_inside(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        text = describe(opened.manifest)
        for name, entry in opened.manifest.entries.items():
            assert name in text and entry.sha256 in text
    lines = text.splitlines()
    for expected in (
        "name:       tiny",
        "source:     a local folder, 1 files",
        "licence:    apache-2.0",
        "precision:  attention bf16, experts nvfp4",
        "limits:     context 128 positions, 16 tokens a step",
        "quality:    kl 0.01",
    ):
        assert expected in lines
    assert "mixtral, 1 layers (1 with experts)" in text and "5 experts of 48, top_k 2" in text
    assert "torch 2.13.0" in text and "commit 0123456789ab" in text
    assert (
        "cpu, rank 1 of 2" in text
        and "bytes of a rank's cpu weights by kind:" in text
        and "x86-64-v3  kernels/x86-64-v3.so  g++ 12.2.0" in text
    )
    assert "sections" not in text


def test_quality_shows_the_comparison_with_bf16(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        quality = {"relative_error": 0.09, "end_to_end": {"perplexity": 29.93, "kl_divergence": 0.118}}
        found = artifacts.manifest(opened.manifest.entries, quality=quality)
    expected = "quality:    relative_error 0.09, perplexity 29.93, kl_divergence 0.118"
    assert expected in describe(found).splitlines()


def test_random_weights_are_said_to_be(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        source = {"kind": "dummy", "repo": None, "commit": None, "files": {"config.json": "0" * 64}, "seed": 7}
        found = artifacts.manifest(opened.manifest.entries, source=source)
    line = "source:     random weights of seed 7, drawn in the formats they are stored in, in the shape of a"
    assert f"{line} config.json" in describe(found).splitlines()
    assert json.loads(to_json(found))["source"]["seed"] == 7


def test_tensors_adds_the_section_table(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        assert "norm   0x2000  192   f32   48x1   norm" in describe(opened.manifest, tensors=True)
        assert "sections" not in json.loads(to_json(opened.manifest))
        assert json.loads(to_json(opened.manifest, tensors=True))["sections"]["cpu"][1]["offset"] == 8192


def test_bytes_by_kind_adds_layers_and_scales(artifact: Path) -> None:
    names = ["embed", "layers.0.qkv", "layers.0.qkv.scale", "layers.11.qkv", "layers.11.down"]
    sections = [_section(name, 0, 10**i) for i, name in enumerate(names)]
    with open_artifact(artifact) as opened:
        fields = opened.manifest.model_copy(update={"sections": {"cuda": [type("S", (), s) for s in sections]}})
    assert bytes_by_kind(fields) == {"cuda": {"embed": 1, "qkv": 1110, "down": 10000}}


def test_check_says_ok_for_every_entry(artifact: Path) -> None:
    found = list(check(artifact))
    assert len(found) == len(artifacts.FILES)
    assert not any(damaged for damaged, _ in found)
    assert "OK       weights/rank-0.bin  12.3 kB" in [line for _, line in found]


def test_check_names_damaged_missing_and_foreign_entries(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    extract(artifact, folder)
    blob = folder / "weights" / "rank-1.bin"
    data = bytearray(blob.read_bytes())
    data[5000] ^= 1
    blob.write_bytes(data)
    (folder / "LICENSE.txt").unlink()
    (folder / "stray.txt").write_text("?")
    lines = [line for damaged, line in check(folder) if damaged]
    assert len(lines) == 3
    assert any(line.startswith("damaged  weights/rank-1.bin: ") for line in lines)
    assert "damaged  LICENSE.txt: missing" in lines
    assert any("stray.txt" in line and "not in the manifest" in line for line in lines)
    assert sum(not damaged for damaged, _ in check(folder)) == len(artifacts.FILES) - 2


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["mkpack", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return int(done.value.code or 0)


def test_commands(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(monkeypatch, "inspect", str(artifact), "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"
    assert _call(monkeypatch, "verify", str(artifact)) == 0
    assert capsys.readouterr().out.count("OK  ") == len(artifacts.FILES)
    folder = artifact.with_name("unpacked")
    assert _call(monkeypatch, "unpack", str(artifact), str(folder)) == 0
    assert _call(monkeypatch, "unpack", str(artifact), str(folder)) == 2
    assert "it exists; name a new folder" in capsys.readouterr().err
    (folder / "recipe.yaml").write_text("name: tony\n")
    assert _call(monkeypatch, "verify", str(folder)) == 2
    out, err = capsys.readouterr()
    assert "damaged  recipe.yaml: " in out
    assert err == f"mkpack: error: {folder} is damaged; copy or download it again, or rebuild it\n"
