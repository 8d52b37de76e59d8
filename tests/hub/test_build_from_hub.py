"""A build whose source is a repo of the hub, through the command line against a local hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import builds
import families
import pytest
from patience import PATIENCE_S
from server import FakeHub

from mkpack.artifact import open_artifact

REPO = "someone/tiny-moe"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A checkpoint of several shards, as the files of a repo."""
    folder = tmp_path_factory.mktemp("hub") / "checkpoint"
    families.make_case(folder, "qwen3-plain", max_shard_size="150KB")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in found) > 1
    return found | {"README.md": b"---\nlicense: apache-2.0\n---\n", "pytorch_model.bin": b"pickle"}


@pytest.fixture
def mkpack(hub, tmp_path, monkeypatch):
    """mkpack(*words, **environment) -> the finished `mkpack build` of a recipe with this hub's repo."""
    builds.stub_compiler(tmp_path / "stub-cxx", monkeypatch)

    def run(*words: str, revision: str = "main", limits: dict | None = None, **env: str):
        recipe = tmp_path / "recipe.yaml"
        source = {"repo": REPO, "revision": revision}
        builds.write_recipe(
            recipe, tmp_path, source=source, quantise={"experts": "bf16"}, limits=limits or {"context": 64}
        )
        recipe.write_text(recipe.read_text().replace("license: mit\n", ""))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1",
                    "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
        command = [Path(sys.executable).with_name("mkpack"), "build", recipe, "--output", tmp_path, *words]
        return subprocess.run(
            command, env=inherited | settings | env, capture_output=True, text=True, timeout=PATIENCE_S
        )

    return run


def weights(hub: FakeHub) -> list[str]:
    return [name for name in hub.downloads() if name.endswith(".safetensors")]


def test_a_build_is_pinned_to_a_commit_and_works_offline_afterwards(hub, files, mkpack, tmp_path):
    commit = hub.commit(REPO, files)
    done = mkpack("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    promised = json.loads(done.stdout)
    assert promised["source"] == f"{REPO}@{commit}"
    assert weights(hub) == [], "a dry run downloaded weights"

    done = mkpack()
    assert done.returncode == 0, done.stderr
    assert sorted(weights(hub)) == sorted(name for name in files if name.endswith(".safetensors"))
    assert "pytorch_model.bin" not in hub.downloads()
    with open_artifact(tmp_path / "tiny.mkpack") as artifact:
        manifest = artifact.manifest
    assert (manifest.source.kind, manifest.source.repo, manifest.source.commit) == ("hub", REPO, commit)
    assert manifest.license == "apache-2.0"
    assert manifest.weights[0].nbytes == promised["artifact_bytes"]

    asked = len(hub.log)
    for words, said in (((), "is up to date"), (("--force",), "built")):
        done = mkpack(*words, HF_HUB_OFFLINE="1")
        assert done.returncode == 0 and said in done.stderr, done.stderr
    assert len(hub.log) == asked, "offline, and the hub was asked"


def test_a_branch_that_moved_is_built_again(hub, files, mkpack, tmp_path):
    hub.commit(REPO, files)
    assert mkpack().returncode == 0
    moved = hub.commit(REPO, files | {"generation_config.json": b'{"eos_token_id": 1}'})
    done = mkpack()
    assert done.returncode == 0 and "built" in done.stderr, done.stderr
    with open_artifact(tmp_path / "tiny.mkpack") as artifact:
        assert artifact.manifest.source.commit == moved


def test_what_config_json_rules_out_is_refused_before_weights_are_fetched(hub, files, mkpack):
    hub.commit(REPO, files)
    done = mkpack(limits={"context": 9999})
    assert done.returncode == 2 and "max_position_embeddings 256" in done.stderr
    for config, said in ((b"{", "not readable as JSON"), (b"[]", "not a JSON object"), (b"{}", "model_type")):
        hub.commit(REPO, files | {"config.json": config})
        done = mkpack()
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert weights(hub) == []


def test_a_shard_damaged_in_the_cache_is_refused_by_name(hub, files, mkpack, tmp_path):
    hub.commit(REPO, files)
    assert mkpack().returncode == 0
    shard = next((tmp_path / "home").rglob("snapshots/*/model-00002*")).resolve()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = mkpack(HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "model-00002" in done.stderr and "expected sha256" in done.stderr
