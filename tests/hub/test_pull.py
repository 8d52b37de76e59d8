"""Pulling and running what was published, through the real client against a local hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import fake
import pytest
from client import REPO, TOKEN, Client, commit, error
from fake import HELLO, TARGET
from patience import PATIENCE_S
from server import FakeHub
from signing import key_pair, public
from test_trust import CANARY

from mkpack import sign, trust
from mkpack.manifest import CHUNK

OTHER = "riscv64"  # no machine that runs these tests
WEIGHTS = "weights/rank0.bin"
KERNEL = f"kernels/{TARGET}.so"


@pytest.fixture
def published(hub, client, tmp_path) -> str:
    """The commit of a repo with two kernels, one of which this machine runs."""
    path = fake.artifact(tmp_path, HELLO, targets=(TARGET, OTHER))
    found = commit(client.push(path, REPO))
    hub.log.clear()
    return found


def files(hub: FakeHub) -> dict[str, bytes]:
    home = hub.repos[REPO]
    return home.commits[home.refs["main"]]


def kernel_digest(hub: FakeHub) -> str:
    return json.loads(files(hub)["manifest.json"])["entries"][KERNEL]["sha256"]


def cached(client: Client, name: str) -> Path:
    """The file of the cache behind a name of the snapshot."""
    (found,) = client.home.glob(f"hf/hub/models--someone--tiny-moe/snapshots/*/{name}")
    return found.resolve()


def change(client: Client, name: str) -> None:
    path = cached(client, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_only_what_this_machine_needs_is_downloaded(hub, client, published):
    found = client.pull(REPO)
    assert (found["commit"], found["target"]) == (published, TARGET)
    assert hub.downloads() == sorted(["manifest.json", *found["files"]])
    assert set(found["files"]) == {KERNEL, WEIGHTS, *fake.TOKENIZER_FILES}
    assert found["damaged"] == [] and found["held"][WEIGHTS] == 8192


def test_nothing_is_downloaded_twice(hub, client, published):
    client.pull(REPO)
    hub.log.clear()
    assert client.pull(REPO)["damaged"] == []
    assert hub.downloads() == []
    assert len(hub.log) == 1, "only the branch is resolved"
    hub.log.clear()
    assert client.pull(f"{REPO}@{published}")["commit"] == published
    assert hub.log == [], "a commit does not change: nothing is asked"


def test_it_is_pinned_when_the_branch_moves_meanwhile(hub, client, published):
    hub.after.append((r"/revision/main", lambda: hub.commit(REPO, {"manifest.json": b"{}"})))
    assert client.pull(REPO)["commit"] == published
    assert all(published in line for line in hub.log if "/resolve/" in line)


def test_a_kernel_for_another_machine_and_single_ranks(hub, client, published):
    found = client.pull(REPO, target=OTHER, check=False, ranks=[0])
    assert found["target"] == OTHER and f"kernels/{OTHER}.so" in found["files"] and KERNEL not in found["files"]
    text = error(client.pull(REPO, target="riscv", check=False))
    assert f"target riscv: the repo has {OTHER}, {TARGET}" in text and f'(did you mean "{OTHER}"?)' in text
    assert "rank 1: expected 0 to 0, the ranks it has" in error(client.pull(REPO, ranks=[1]))


def test_it_runs_offline_afterwards(hub, client, published):
    answer = client.run(f"hf://{REPO}", trust_kernel=kernel_digest(hub))
    assert answer == {"text": "Héllo 😀!", "target": TARGET}
    hub.log.clear()
    client.kill()
    client.env["HF_HUB_OFFLINE"] = "1"
    for reference in (f"hf://{REPO}", f"hf://{REPO}@main", f"hf://{REPO}@{published}"):
        assert client.run(reference)["text"] == "Héllo 😀!"
    assert hub.log == []
    assert "revision v2 is not cached" in error(client.run(f"hf://{REPO}@v2"))
    assert "manifest.json is absent" in error(client.run(f"hf://{REPO}@{'0' * 40}"))


def test_native_code_of_a_repo_does_not_run_unasked(hub, client, published):
    text = error(client.run(f"hf://{REPO}"))
    assert "nobody you trust vouches for it" in text and kernel_digest(hub) in text
    assert hub.downloads() == ["manifest.json"], "it was refused after a download that may take hours"
    assert "not the one that was allowed" in error(client.run(f"hf://{REPO}", trust_kernel="0" * 64))
    assert hub.downloads() == ["manifest.json"]


def test_a_trusted_signature_is_all_that_a_run_asks_for(hub, client, published, tmp_path, monkeypatch):
    """The signature of the artifact that was pushed."""
    key = key_pair(tmp_path)
    signature = sign.sign(tmp_path / "fake.mkpack", key=key)
    hub.commit(REPO, files(hub) | {"model.sig": signature.read_bytes()})
    assert "says it was made by the key" in error(client.run(f"hf://{REPO}"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(client.home / "config"))
    trust.add(str(public(key)))
    assert client.run(f"hf://{REPO}")["text"] == "Héllo 😀!"


def test_pulling_runs_nothing(hub, client, tmp_path):
    path = fake.artifact(tmp_path, HELLO, source=fake.FAKE + CANARY, trusted=False)
    client.push(path, REPO)
    client.kill()
    client.env["CANARY"] = str(tmp_path / "canary")
    assert client.pull(REPO)["damaged"] == []
    assert not (tmp_path / "canary").exists()
    assert client.run(f"hf://{REPO}", trust_kernel=kernel_digest(hub))["text"] == "Héllo 😀!"
    assert (tmp_path / "canary").exists()


def test_a_signature_is_pulled_with_what_it_signs(hub, client, published):
    hub.commit(REPO, files(hub) | {"model.sig": b"{}"})
    folder = Path(client.pull(REPO)["folder"])
    assert (folder / "model.sig").read_bytes() == b"{}"
    client.offline = True
    assert "model.sig: not a signature" in error(client.run(f"hf://{REPO}"))


def test_without_a_network_the_cache_will_do_and_that_is_said(hub, client, published):
    client.pull(REPO)
    hub.fail("", times=10**6, status=503)
    assert client.pull(REPO)["commit"] == published
    client.kill()
    assert f"using what is cached of commit {published}" in client.said()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        client.env["HF_ENDPOINT"] = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert client.pull(REPO)["commit"] == published
        assert "cannot be reached" in error(client.pull("someone/else"))
    # A refusal is no network that is down.
    client.kill()
    del client.env["HF_ENDPOINT"]
    hub.faults.clear()
    hub.repos[REPO].private = True
    hub.repos[REPO].readers = set()
    assert "no such repo" in error(client.pull(REPO))


def test_places_and_tokens_of_the_environment(hub, client, published, tmp_path):
    hub.repos[REPO].private, hub.repos[REPO].readers = True, {TOKEN}
    client.kill()
    client.env["HF_HOME"] = str(tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") in client.pull(REPO)["folder"]
    client.kill()
    del client.env["HF_TOKEN"]
    client.env["HF_HOME"] = str(tmp_path / "third")
    assert "set HF_TOKEN, none is set" in error(client.pull(REPO))


# --- damage in the cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, KERNEL, "tokenizer/tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "altered", "absent"])
def test_a_damaged_file_is_found_on_load_and_fetched_again(hub, client, published, name, how):
    digest = kernel_digest(hub)
    client.run(f"hf://{REPO}", trust_kernel=digest)
    path = cached(client, name)
    good = path.read_bytes()
    if how == "truncated":
        os.truncate(path, len(good) // 2)
    elif how == "altered":
        change(client, name)
    else:
        path.unlink()
    hub.log.clear()
    assert client.run(f"hf://{REPO}")["text"] == "Héllo 😀!"
    assert hub.downloads() == [name]
    assert cached(client, name).read_bytes() == good


@pytest.mark.parametrize("name", [WEIGHTS, "manifest.json"])
def test_a_damaged_file_is_refused_offline(hub, client, published, name):
    client.run(f"hf://{REPO}", trust_kernel=kernel_digest(hub))
    change(client, name)
    client.offline = True
    text = error(client.run(f"hf://{REPO}"))
    assert "offline; pull it with the network first" in text and name in text


def test_no_verify_looks_at_sizes_alone(hub, client, published):
    client.pull(REPO)
    change(client, WEIGHTS)
    hub.log.clear()
    assert WEIGHTS in client.pull(REPO, verify=False)["damaged"][0]
    os.truncate(cached(client, WEIGHTS), 100)
    assert client.pull(REPO, verify=False)["damaged"] == []
    assert hub.downloads() == [WEIGHTS]


def test_of_many_parts_only_the_damaged_one_is_fetched_again(hub, client, tmp_path):
    blob = bytes(range(256)) * (CHUNK // 256) + b"end".ljust(4096, b".")
    client.part = CHUNK
    client.push(fake.artifact(tmp_path, HELLO, weights=blob), REPO)
    client.pull(REPO)
    for part in ("weights/rank0-00001-of-00002.bin", "weights/rank0-00002-of-00002.bin"):
        change(client, part)
        hub.log.clear()
        assert client.pull(REPO)["damaged"] == []
        assert hub.downloads() == [part]


# --- what does not fit -------------------------------------------------------------------------------------------


def test_every_mismatch_is_told_before_a_weight_is_downloaded(hub, client, tmp_path):
    path = fake.artifact(tmp_path, HELLO, targets=("sm_100a", "riscv64"))
    client.push(path, REPO)
    hub.log.clear()
    text = error(client.pull(REPO))
    assert "cannot run someone/tiny-moe@" in text and "3 problems" in text
    assert "the artifact has riscv64, sm_100a" in text
    assert "sm_100a needs an NVIDIA GPU of compute capability 10.0" in text
    assert "riscv64 is no target that this version of mkpack knows" in text
    assert hub.downloads() == ["manifest.json"]


def test_a_newer_format(hub, client, published):
    newer = json.loads(files(hub)["manifest.json"]) | {"format_version": 99, "minimum_runtime": "99.0"}
    hub.commit(REPO, files(hub) | {"manifest.json": json.dumps(newer).encode()})
    text = error(client.pull(REPO))
    assert "newer format" in text and "needs a newer runtime" in text
    assert hub.downloads() == ["manifest.json"]


def test_a_repo_that_lacks_weights_or_has_others(hub, client, published):
    whole = dict(files(hub))
    for changes, said in (
        ({WEIGHTS: None}, f"{WEIGHTS} (weights of rank 0): the repo does not have it"),
        ({WEIGHTS: b"short"}, f"{WEIGHTS} (weights of rank 0): expected 8192 bytes, the repo's has 5"),
        ({WEIGHTS: bytes(8192)}, f"{WEIGHTS} (weights of rank 0): expected sha256"),
    ):
        changed = {n: d for n, d in (whole | changes).items() if d is not None}
        hub.commit(REPO, changed)
        hub.log.clear()
        assert said in error(client.pull(REPO))
        assert set(hub.downloads()) <= {"manifest.json"}


def test_a_hub_that_lies_about_content(hub, client, published, monkeypatch):
    """The listing has the right digest, what arrives has another: it never counts as pulled."""
    changed = {n: (d[:-1] + b"!" if n == "tokenizer/tokenizer_config.json" else d) for n, d in files(hub).items()}
    hub.commit(REPO, changed)
    text = error(client.pull(REPO))
    assert "tokenizer/tokenizer_config.json: sha256 expected" in text and "push it again" in text
    assert hub.downloads().count("tokenizer/tokenizer_config.json") == 2, "tried once more, no oftener"


def test_no_artifact_and_an_unfinished_one(hub, client):
    hub.commit(REPO, {"config.json": b"{}", "model.safetensors": b"weights"})
    assert "no manifest.json, so this is no artifact of mkpack, or its upload was never finished" in error(
        client.pull(REPO)
    )
    assert hub.downloads() == []
    assert "no such repo" in error(client.pull("someone/absent"))
    assert "has no revision 'v9'" in error(client.pull(f"{REPO}@v9"))
    assert "expected ORG/NAME" in error(client.pull("tiny"))


def test_disk_space_is_checked_first(hub, client, published):
    hub.repos[REPO].listed_sizes["manifest.json"] = 65 << 20
    assert "at most 67108864 may be" in error(client.pull(REPO))
    assert hub.downloads() == []


@pytest.mark.parametrize(
    ("status", "said"), [(403, "forbids access (403)"), (429, "limits the rate (429)"), (500, "fault of its own (500)")]
)
def test_a_hub_that_refuses(hub, client, published, status, said):
    hub.fail("resolve/.*/weights", times=10**6, status=status)
    assert said in error(client.pull(REPO))
    hub.faults.clear()
    assert client.pull(REPO)["damaged"] == []


# --- interrupted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"cut": -1}, {"cut": 40}], ids=str)
def test_a_pull_that_is_cut_off_at_any_request_goes_on(hub, client, published, tmp_path, how):
    digest = kernel_digest(hub)
    client.pull(REPO)
    steps = len(hub.log)
    assert steps >= 10
    for n in range(steps):
        client.cache = tmp_path / f"cache-{n}"
        hub.fail("", times=10**6, skip=n, **how)
        assert "error" in client.pull(REPO), n
        client.offline = True
        assert "offline" in error(client.pull(REPO)).lower(), n
        client.offline = False
        hub.faults.clear()
        assert client.run(f"hf://{REPO}", trust_kernel=digest)["text"] == "Héllo 😀!", n


def test_a_cut_download_resumes_where_it_was_cut(hub, client, tmp_path):
    client.push(fake.artifact(tmp_path, HELLO, weights=bytes(range(256)) * (25 << 12)), REPO)
    hub.fail(f"GET .*{WEIGHTS}", cut=20_000_000)
    assert client.pull(REPO)["damaged"] == []
    assert len(hub.ranges) == 1 and 0 < int(hub.ranges[0][len("bytes=") : -1]) <= 20_000_000


def test_a_killed_pull_keeps_complete_files(hub, client, published):
    hub.after.append((rf"GET .*{WEIGHTS}", client.kill))
    hub.fail(f"GET .*{KERNEL}", times=1, cut=0)
    process = client.begin("pull", REPO)
    process.wait(timeout=PATIENCE_S)
    hub.faults.clear()
    assert client.pull(REPO)["damaged"] == []


def test_two_processes_pull_at_once(hub, client, published, tmp_path):
    """Into one cache, in which a file is damaged as well: both end with the right bytes."""
    digest = kernel_digest(hub)
    client.pull(REPO)
    change(client, WEIGHTS)
    cached(client, KERNEL).unlink()
    others = [Client(hub, tmp_path) for _ in range(3)]
    try:
        running = [other.begin("run", f"hf://{REPO}", trust_kernel=digest) for other in others]
        answers = [json.loads(process.stdout.readline()) for process in running]
    finally:
        for other in others:
            other.kill()
    assert answers == [{"text": "Héllo 😀!", "target": TARGET}] * 3
    client.offline = True
    assert client.pull(REPO)["damaged"] == []


# --- the command line --------------------------------------------------------------------------------------------


def mkpack(client: Client, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("mkpack")), *words]
    return subprocess.run(
        command, env=client.environment(), capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
        cwd=client.home,
    )  # fmt: skip


def test_from_an_artifact_to_an_answer(hub, client, tmp_path):
    path = fake.artifact(tmp_path, HELLO, targets=(TARGET, OTHER))
    done = mkpack(client, "push", str(path), REPO, "--dry-run")
    assert done.returncode == 0 and f"repo      {REPO}, main (new)" in done.stdout, done.stderr
    done = mkpack(client, "push", str(path), REPO)
    assert done.returncode == 0 and f"run it:   mkpack run {REPO}" in done.stdout, done.stderr
    done = mkpack(client, "inspect", REPO, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["name"] == "fake", done.stderr
    assert hub.downloads() == ["manifest.json"]
    done = mkpack(client, "run", f"{REPO}@main", "-p", "Hi", "--trust-kernel", kernel_digest(hub))
    assert (done.returncode, done.stdout) == (0, "Héllo 😀!\n"), done.stderr
    done = mkpack(client, "pull", REPO, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["files"][WEIGHTS] == 8192, done.stderr
    done = mkpack(client, "pull", REPO, "--target", OTHER)
    assert done.returncode == 0 and f": {OTHER}, 5 files, " in done.stdout, done.stderr
