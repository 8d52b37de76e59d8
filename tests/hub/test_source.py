"""Download of a source, through the real client against a local hub. Each fetch is a process of its own, because the
client reads its environment when it is imported."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from patience import PATIENCE_S

REPO = "someone/tiny-moe"
ROOT = Path(__file__).resolve().parents[2]

# Waits of the client between its own retries are cut short; nothing else of it is changed.
SCRIPT = """
import json, sys, time
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.01))
from mkpack.errors import UserError
from mkpack.hub import fetch_source
try:
    found = fetch_source(sys.argv[1], sys.argv[2], progress=False)
    print(json.dumps({"folder": str(found.folder), "repo": found.repo, "commit": found.commit, "sha256": found.sha256}))
except UserError as e:
    print(json.dumps({"error": str(e)}))
"""

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def index(*shards: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}).encode()


def sharded() -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "mixtral"}',
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b'{"legacy": true}',
        "special_tokens_map.json": b'{"eos_token": "</s>"}',
        "chat_template.jinja": b"{{ messages }}",
        "hf_quant_config.json": b'{"quantization": {}}',
        "LICENSE": b"Apache",
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        INDEX: index(SHARD_1, SHARD_2),
        SHARD_1: bytes(range(256)) * 400,
        SHARD_2: b"second" * 1000,
    }


def single() -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": b"weights" * 100}


@pytest.fixture
def fetch(hub, tmp_path):
    """fetch(revision) -> dict of the snapshot, or of the error; keyword arguments are environment variables."""

    def run(revision: str = "main", repo: str = REPO, **env: str) -> dict:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()
        }
        settings = {
            "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, repo, revision],
            env=inherited | settings | env, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def error(found: dict) -> str:
    assert "error" in found, found
    assert "\n" not in found["error"], "one line"
    return found["error"]


def held(found: dict) -> dict[str, bytes]:
    assert "folder" in found, found
    return {f.name: f.read_bytes() for f in Path(found["folder"]).iterdir()}


def test_only_needed_files_are_fetched(hub, fetch):
    extra = {
        "model.safetensors": b"stray",
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "onnx/model.onnx": b"onnx",
        ".gitattributes": b"*.bin lfs",
        "original/config.json": b"{}",
    }
    commit = hub.commit(REPO, sharded() | extra)
    found = fetch()
    assert held(found) == sharded()
    assert hub.downloads() == sorted(sharded())
    assert (found["repo"], found["commit"]) == (REPO, commit)
    # The digests that the hub keeps of large files come along.
    assert found["sha256"] == {n: sha256(sharded()[n]).hexdigest() for n in (SHARD_1, SHARD_2, "tokenizer.json")}


def test_a_single_file_without_an_index(hub, fetch):
    hub.commit(REPO, single())
    assert held(fetch()) == single()


def test_names_are_not_taken_as_patterns(hub, fetch):
    hub.commit(REPO, single() | {"LICENSE.[a]": b"1", "LICENSE.a": b"2"})
    assert held(fetch())["LICENSE.[a]"] == b"1"


def test_nothing_is_fetched_twice(hub, fetch):
    hub.commit(REPO, sharded())
    fetch()
    hub.log.clear()
    assert held(fetch()) == sharded()
    assert hub.downloads() == []


def test_branch_tag_and_commit_name_the_same_commit(hub, fetch):
    commit = hub.commit(REPO, single())
    hub.repos[REPO].refs |= {"v1.0": commit, "feature/x": commit}
    hub.commit(REPO, sharded())
    assert [fetch(r)["commit"] for r in ("v1.0", "feature/x", commit)] == [commit] * 3


def test_the_commit_is_pinned_when_the_branch_moves_meanwhile(hub, fetch):
    before = hub.commit(REPO, sharded())
    moved = {name: data + b"!" for name, data in sharded().items() if name != INDEX} | {INDEX: sharded()[INDEX]}
    hub.after.append((r"/revision/main", lambda: hub.commit(REPO, moved)))
    found = fetch()
    assert hub.repos[REPO].refs["main"] != before
    assert found["commit"] == before and held(found) == sharded()
    assert all(before in line for line in hub.log if "/resolve/" in line)


def test_a_cut_download_resumes_where_it_was_cut(hub, fetch):
    files = sharded() | {SHARD_1: bytes(range(256)) * 50_000}
    hub.commit(REPO, files)
    hub.fail(f"GET .*{SHARD_1}", cut=12_000_000)
    assert held(fetch()) == files
    # The client writes in blocks of its own size, so it goes on at the last whole one.
    assert len(hub.ranges) == 1 and 0 < int(hub.ranges[0][len("bytes=") : -1]) <= 12_000_000


def test_a_broken_download_keeps_complete_files_and_goes_on(hub, fetch, tmp_path):
    hub.commit(REPO, sharded())
    hub.fail(f"GET .*{SHARD_1}", times=100, cut=0)
    text = error(fetch())
    assert "was cut" in text and "run again" in text
    # What had arrived is not asked for again.
    arrived = {f.name for f in tmp_path.glob("home/hub/models--*/snapshots/*/*")}
    assert INDEX in arrived and SHARD_1 not in arrived
    hub.faults.clear()
    hub.log.clear()
    assert held(fetch()) == sharded()
    assert hub.downloads() == sorted(sharded().keys() - arrived)


def test_a_connection_that_is_reset(hub, fetch):
    hub.commit(REPO, sharded())
    hub.fail(f"GET .*{SHARD_1}", times=100, cut=70_000, reset=True)
    assert "was cut" in error(fetch())


@pytest.mark.parametrize("name", [SHARD_2, "config.json", INDEX])
def test_a_truncated_file_in_the_cache_is_fetched_again(hub, fetch, name):
    hub.commit(REPO, sharded())
    folder = Path(fetch()["folder"])
    os.truncate(folder / name, 7)
    hub.log.clear()
    found = fetch()
    assert held(found) == sharded()
    assert hub.downloads() == [name]


def test_a_file_that_never_has_its_listed_size_is_refused(hub, fetch):
    hub.commit(REPO, sharded())
    size = len(sharded()[SHARD_2])
    hub.repos[REPO].listed_sizes[SHARD_2] = size + 1
    text = error(fetch())
    assert f"{SHARD_2}: expected {size + 1} bytes, found {size} bytes" in text
    assert hub.downloads().count(SHARD_2) == 2, "tried once more, no oftener"


def test_disk_space_is_checked_first(hub, fetch):
    hub.commit(REPO, sharded())
    hub.repos[REPO].listed_sizes[SHARD_1] = 1 << 60
    text = error(fetch())
    assert f"{1 << 60:,}"[:9] in text and "bytes free" in text and "HF_HOME" in text
    assert hub.downloads() == [INDEX], "nothing large was asked for"


def test_disk_space_counts_only_what_is_not_cached(hub, fetch):
    # The shard of another commit, already here under the same content, is not needed again.
    hub.commit(REPO, single())
    fetch()
    hub.commit(REPO, single() | {"config.json": b'{"changed": 1}'})
    fetch_log = len(hub.log)
    assert held(fetch())["config.json"] == b'{"changed": 1}'
    assert not any("GET" in line and "model.safetensors" in line for line in hub.log[fetch_log:])


def test_repo_not_found(hub, fetch):
    text = error(fetch(repo="someone/absent"))
    assert "someone/absent" in text and "no such repo" in text and "set HF_TOKEN" in text


def test_private_repo(hub, fetch):
    hub.commit(REPO, single())
    hub.repos[REPO].private = True
    hub.repos[REPO].readers = {"owner"}
    hub.tokens = {"owner", "stranger"}
    assert "private" in error(fetch()) and "set HF_TOKEN" in error(fetch())
    assert "the token in use" in error(fetch(HF_TOKEN="stranger"))
    assert held(fetch(HF_TOKEN="owner")) == single()


def test_gated_repo(hub, fetch):
    hub.commit(REPO, single())
    hub.repos[REPO].gated = True
    hub.repos[REPO].readers = {"member"}
    hub.tokens = {"member", "stranger"}
    assert "gated" in error(fetch()) and "accept its conditions" in error(fetch(HF_TOKEN="stranger"))
    assert held(fetch(HF_TOKEN="member")) == single()


def test_a_token_that_is_not_valid(hub, fetch):
    hub.commit(REPO, single())
    text = error(fetch(HF_TOKEN="expired"))
    assert "401" in text and "HF_TOKEN" in text and "expired" not in text, "a token is never printed"


def test_forbidden(hub, fetch):
    hub.commit(REPO, single())
    hub.fail("/api/models", status=403)
    assert "403" in error(fetch())


def test_revision_not_found(hub, fetch):
    hub.commit(REPO, single())
    assert "no revision 'v9'" in error(fetch("v9"))


def test_rate_limit(hub, fetch):
    hub.commit(REPO, single())
    hub.fail("/api/models", status=429, headers={"Retry-After": "17"})
    assert "429" in error(fetch())
    hub.fail("/api/models", status=429, headers={"Retry-After": "17"})
    assert "wait 17 seconds" in error(fetch())


@pytest.mark.parametrize("status", [500, 503])
def test_server_fault(hub, fetch, status):
    hub.commit(REPO, single())
    hub.fail("/api/models", status=status)
    assert str(status) in error(fetch())


def test_server_fault_at_a_file(hub, fetch):
    hub.commit(REPO, single())
    hub.fail("/resolve/.*model.safetensors", times=100, status=502)
    assert "502" in error(fetch())


def test_connection_refused(fetch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # Bound and not listening: nobody else gets it, and it refuses.
        text = error(fetch(HF_ENDPOINT=f"http://127.0.0.1:{free.getsockname()[1]}"))
    assert "cannot be reached" in text and "refused" in text and "HF_HUB_OFFLINE=1" in text


def test_connection_cut_before_an_answer(hub, fetch):
    hub.commit(REPO, single())
    hub.fail("/api/models", cut=-1)
    assert "was cut" in error(fetch())


@pytest.mark.parametrize("body", [b"<html>Welcome to the portal</html>", b"[]", b"{}"])
def test_an_endpoint_that_is_no_hub(hub, fetch, body):
    hub.fail("/api/models", status=200, body=body)
    text = error(fetch())
    assert hub.url in text and "not answer like a Hugging Face hub" in text and "HF_ENDPOINT" in text


def test_a_name_that_no_repo_can_have(fetch):
    text = error(fetch(repo="a/b/c"))
    assert "OWNER/NAME" in text and "a/b/c" in text


def test_no_safetensors(hub, fetch):
    hub.commit(REPO, {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    text = error(fetch())
    assert "no safetensors" in text and "pytorch_model.bin" in text
    assert hub.downloads() == []


def test_no_config(hub, fetch):
    hub.commit(REPO, {"model.safetensors": b"x"})
    assert "config.json" in error(fetch())


def test_an_index_that_names_an_absent_shard(hub, fetch):
    files = sharded()
    del files[SHARD_2]
    hub.commit(REPO, files)
    assert f"names {SHARD_2}, which the repo does not have" in error(fetch())


@pytest.mark.parametrize("shard", ["../../secret.safetensors", "/etc/x.safetensors"])
def test_an_index_that_leaves_the_folder(hub, fetch, shard):
    hub.commit(REPO, {"config.json": b"{}", INDEX: index(shard)})
    assert f'"{shard}" is not the name' in fetch()["error"]


def test_offline_uses_a_cached_ref_or_commit(hub, fetch):
    commit = hub.commit(REPO, sharded())
    hub.repos[REPO].refs["feature/x"] = commit
    online = [fetch(r) for r in ("main", "feature/x")]
    hub.log.clear()
    offline = [fetch(r, HF_HUB_OFFLINE="1") for r in ("main", "feature/x", commit)]
    assert offline == [online[0]] * 3
    assert hub.log == []


def test_offline_and_not_cached(hub, fetch):
    commit = hub.commit(REPO, sharded())
    for revision in ("main", commit):
        text = error(fetch(revision, HF_HUB_OFFLINE="1"))
        assert "HF_HUB_OFFLINE" in text and revision in text and "not cached" in text
    fetch()
    assert "revision v2 is not cached" in error(fetch("v2", HF_HUB_OFFLINE="1"))
    assert "not cached" in error(fetch("../snapshots", HF_HUB_OFFLINE="1"))


def test_offline_and_only_partly_cached(hub, fetch):
    hub.commit(REPO, sharded())
    folder = Path(fetch()["folder"])
    (folder / SHARD_2).unlink()
    shutil.move(folder / "config.json", folder / "elsewhere")
    found = fetch(HF_HUB_OFFLINE="1")["error"]
    assert "not complete" in found and f"{SHARD_2} is absent" in found and "config.json is absent" in found
