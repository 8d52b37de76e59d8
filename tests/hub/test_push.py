"""Publishing through the real client against a local hub: what a repo holds, what is sent, what stops a push."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import fake
import pytest
from client import REPO, TOKEN, commit, error
from fake import HELLO, TARGET
from patience import PATIENCE_S
from server import FakeHub

from mkpack import card
from mkpack.artifact import open_artifact
from mkpack.manifest import CHUNK, Manifest

OTHER = "x86-64-v4" if TARGET != "x86-64-v4" else "x86-64-v3"


@pytest.fixture
def artifact(tmp_path) -> Path:
    return fake.artifact(tmp_path, HELLO)


def files(hub: FakeHub, branch: str = "main") -> dict[str, bytes]:
    """What the branch holds, without what the hub put there itself."""
    home = hub.repos[REPO]
    return {n: d for n, d in home.commits[home.refs[branch]].items() if n != ".gitattributes"}


def manifest(hub: FakeHub) -> Manifest:
    return Manifest.parse(files(hub)["manifest.json"], "manifest.json")


def bench(folder: Path, target: str = TARGET, **changes: object) -> Path:
    """A result as mkpack bench --json prints it."""
    point = {"context": 128, "decode_ms": 2.0, "decode_mb": 1.0, "decode_bound_ms": 1.5, "prefill_ms": 1.0}
    result = {"artifact": "/home/me/a.mkpack", "target": target, "threads": 4, "random_weights": False,
              "bandwidth_gb_s": 31.25, "load_s": 1.0, "check": "equal bits", "points": [point]}  # fmt: skip
    path = folder / f"bench-{target}.json"
    path.write_text(json.dumps(result | changes))
    return path


def test_a_new_repo_holds_every_entry_as_a_file(hub, client, artifact):
    done = client.push(artifact, REPO)
    assert commit(done) == hub.repos[REPO].refs["main"] and not hub.repos[REPO].private
    found = files(hub)
    with open_artifact(artifact) as opened:
        expected = {name: opened.read(name) for name in ["manifest.json", *opened.manifest.entries]}
    assert {n: d for n, d in found.items() if n != "README.md"} == expected
    assert done["plan"]["uploads"] == {name: len(data) for name, data in found.items()}


def test_nothing_is_seen_before_all_of_it_is(hub, client, artifact):
    """One commit: the manifest is in no commit that lacks anything, and no other commit has files of the artifact."""
    client.push(artifact, REPO)
    first, second = hub.repos[REPO].commits.values()
    assert first.keys() == {".gitattributes"} and "manifest.json" in second
    sent = [line.split("?")[0] for line in hub.log]
    assert sent[-1] == f"POST /api/models/{REPO}/commit/main"
    assert sent.index("POST /api/validate-yaml") < sent.index(f"POST /{REPO}.git/info/lfs/objects/batch")


def test_pushing_again_sends_nothing(hub, client, artifact):
    before = commit(client.push(artifact, REPO))
    hub.log.clear()
    done = client.push(artifact, REPO)
    assert commit(done) == before and done["plan"]["uploads"] == {}
    assert not any(line.startswith(("POST", "PUT")) for line in hub.log)


def test_dry_run_changes_nothing(hub, client, artifact, tmp_path):
    plan = client.plan(artifact, REPO, private=True)
    assert plan["creates"] and plan["uploads"]["weights/rank0.bin"] == 8192
    assert hub.repos == {} and not any(line.startswith(("POST", "PUT")) for line in hub.log)
    client.push(artifact, REPO)
    hub.log.clear()
    two = fake.artifact(tmp_path, HELLO, name="two", targets=(TARGET, OTHER))
    plan = client.plan(two, REPO)
    assert not plan["creates"] and plan["uploads"].keys() == {f"kernels/{OTHER}.so", "README.md", "manifest.json"}
    assert not any(line.startswith(("POST", "PUT")) for line in hub.log)


def test_private_and_branches(hub, client, artifact):
    commit(client.push(artifact, REPO, private=True, revision="v2/test"))
    assert hub.repos[REPO].private
    assert files(hub, "main") == {} and "manifest.json" in files(hub, "v2/test")
    commit(client.push(artifact, REPO, private=True))
    assert files(hub, "main").keys() == files(hub, "v2/test").keys()


def test_private_is_not_believed_of_a_public_repo(hub, client, artifact):
    client.push(artifact, REPO)
    assert "everybody can see it" in error(client.push(artifact, REPO, private=True))


def test_a_kernel_is_added_and_nothing_else_is_sent(hub, client, artifact, tmp_path):
    client.push(artifact, REPO)
    before = files(hub)
    # Built elsewhere: another recipe text, and a kernel for that machine alone.
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,))
    hub.log.clear()
    done = client.push(other, REPO)
    assert done["plan"]["uploads"].keys() == {f"kernels/{OTHER}.so", "README.md", "manifest.json"}
    after = files(hub)
    assert after.keys() == before.keys() | {f"kernels/{OTHER}.so"}
    assert {n: d for n, d in after.items() if n in before and n not in ("README.md", "manifest.json")} == {
        n: d for n, d in before.items() if n not in ("README.md", "manifest.json")
    }
    found = manifest(hub)
    assert found.kernels.keys() == {TARGET, OTHER} and found.name == "fake"
    assert {n: sha256(after[n]).hexdigest() for n in found.entries} == {n: e.sha256 for n, e in found.entries.items()}
    assert f"`{TARGET}`" in after["README.md"].decode() and f"`{OTHER}`" in after["README.md"].decode()
    # Both publishers may push again: nothing changes.
    for path in (artifact, other):
        assert commit(client.push(path, REPO)) == commit(done)


def test_a_kernel_compiled_again_takes_the_place_of_the_old_one(hub, client, artifact, tmp_path):
    both = fake.artifact(tmp_path, HELLO, name="both", targets=(TARGET, OTHER))
    client.push(both, REPO)
    newer = fake.artifact(tmp_path, HELLO, name="newer", source=fake.FAKE.replace("1e9 *", "2e9 *"))
    done = client.push(newer, REPO)
    assert done["plan"]["uploads"].keys() == {f"kernels/{TARGET}.so", "README.md", "manifest.json"}
    found, held = manifest(hub), files(hub)
    assert found.kernels.keys() == {TARGET, OTHER}
    assert sha256(held[f"kernels/{TARGET}.so"]).hexdigest() == found.entries[f"kernels/{TARGET}.so"].sha256
    assert held[f"kernels/{TARGET}.so"] != held[f"kernels/{OTHER}.so"]


def test_another_model_needs_replace_and_takes_the_old_files_away(hub, client, artifact, tmp_path):
    both = fake.artifact(tmp_path, HELLO, name="both", targets=(TARGET, OTHER))
    client.push(both, REPO)
    before = hub.repos[REPO].refs["main"]
    other = fake.artifact(tmp_path, [*HELLO, *HELLO], name="other")
    text = error(client.push(other, REPO))
    assert "weights of the layout cpu: the repo has others" in text and "--replace" in text and "--revision" in text
    assert hub.repos[REPO].refs["main"] == before
    done = client.push(other, REPO, replace=True)
    assert done["plan"]["removed"] == [f"kernels/{OTHER}.so"]
    assert any("replaces the artifact both" in note for note in done["notes"])
    assert f"kernels/{OTHER}.so" not in files(hub) and manifest(hub).name == "other"


def test_files_of_the_publisher_stay(hub, client, artifact):
    hub.commit(REPO, {"picture.png": b"png", "README.md": b"# mine\n", "weights/notes.txt": b"notes"})
    done = client.push(artifact, REPO)
    held = files(hub)
    assert (held["picture.png"], held["README.md"], held["weights/notes.txt"]) == (b"png", b"# mine\n", b"notes")
    assert any("README.md there was not written by mkpack push" in note for note in done["notes"])


def test_words_around_the_generated_card_stay(hub, client, artifact, tmp_path):
    client.push(artifact, REPO)
    text = files(hub)["README.md"].decode()
    hub.commit(REPO, files(hub) | {"README.md": text.replace("# fake", "# A fine model\n\nMy words.").encode()})
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,))
    commit(client.push(other, REPO))
    text = files(hub)["README.md"].decode()
    assert "# A fine model\n\nMy words." in text and f"`{OTHER}`" in text and text.count(card.BEGIN) == 1


def test_measured_speeds_come_with_their_bound_and_stay_with_their_kernel(hub, client, artifact, tmp_path):
    client.push(artifact, REPO, bench=[str(bench(tmp_path))])
    held = files(hub)
    assert f"| `{TARGET}` | 128 | 2.00 | 500.0 | 1.50 | 75% |" in held["README.md"].decode()
    assert b"/home/me" not in b"".join(held.values())
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,))
    client.push(other, REPO, bench=[str(bench(tmp_path, OTHER))])
    text = files(hub)["README.md"].decode()
    assert f"| `{TARGET}` | 128 |" in text and f"| `{OTHER}` | 128 |" in text
    # A kernel that was compiled again was not measured.
    newer = fake.artifact(tmp_path, HELLO, name="newer", source=fake.FAKE.replace("1e9 *", "2e9 *"))
    done = client.push(newer, REPO)
    assert done["plan"]["removed"] == [f"bench/{TARGET}.json"]
    text = files(hub)["README.md"].decode()
    assert f"| `{TARGET}` | 128 |" not in text and f"| `{OTHER}` | 128 |" in text


def test_speeds_that_are_none_are_refused(hub, client, artifact, tmp_path):
    (tmp_path / "none.json").write_text('{"target": "x"}')
    for path, said in (
        (tmp_path / "none.json", "expected what mkpack bench --json prints"),
        (bench(tmp_path, "sm_90a"), f"sm_90a: the artifact has {TARGET}"),
        (bench(tmp_path, check="logits in two ways: DIFFERENT"), "do not publish it"),
        (tmp_path / "absent.json", "No such file"),
    ):
        assert said in error(client.push(artifact, REPO, bench=[str(path)]))
    assert hub.repos == {}


def test_a_damaged_artifact_is_not_pushed(hub, client, artifact):
    data = bytearray(artifact.read_bytes())
    data[data.index(b"worker 3 did not arrive")] ^= 1
    artifact.write_bytes(data)
    text = error(client.push(artifact, REPO))
    assert "is not pushed, for it is damaged" in text and f"kernels/{TARGET}.so" in text
    assert hub.log == []


@pytest.mark.parametrize(
    ("repo", "options", "said"),
    [
        ("tiny", {}, "expected ORG/NAME"),
        ("someone/tiny@v1", {}, "the branch to push to is --revision v1"),
        ("someone/tiny", {"revision": "0" * 40}, "a commit cannot be changed"),
    ],
)
def test_names_are_checked_before_the_hub_is_asked(hub, client, artifact, repo, options, said):
    assert said in error(client.push(artifact, repo, **options))
    assert hub.log == []


def test_an_entry_that_the_repo_needs_for_itself(hub, client, tmp_path):
    clash = fake.artifact(tmp_path, HELLO, files={**fake.TOKENIZER_FILES, "README.md": b"mine"})
    assert "README.md: a repo has a file of its own of that name" in error(client.push(clash, REPO))


def test_offline_is_said_plainly(hub, client, artifact):
    client.env["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE is set, and a push needs the hub" in error(client.push(artifact, REPO))


def test_weights_are_cut_into_parts_that_are_uploaded_in_parts(hub, client, tmp_path):
    """A blob of two parts; one part is more than the hub takes at once."""
    blob = bytes(range(256)) * (CHUNK // 256) + b"the end".ljust(4096, b"!")
    path = fake.artifact(tmp_path, HELLO, weights=blob)
    client.part, hub.part = CHUNK, CHUNK // 2
    done = client.push(path, REPO)
    names = [f"weights/rank0-0000{i}-of-00002.bin" for i in (1, 2)]
    assert [name for name in done["plan"]["uploads"] if name.startswith("weights/")] == names
    held = files(hub)
    assert b"".join(held[name] for name in names) == blob and len(held[names[0]]) == CHUNK
    assert sum(line.startswith("POST /complete/") for line in hub.log) == 1, "the second is small"
    hub.log.clear()
    assert client.push(path, REPO)["plan"]["uploads"] == {}
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,), weights=blob)
    done = client.push(other, REPO)
    assert done["plan"]["uploads"].keys() == {f"kernels/{OTHER}.so", "README.md", "manifest.json"}
    # What the repo holds is one piece again where it is run.
    pulled = client.pull(REPO)
    assert pulled["held"]["weights/rank0.bin"] == len(blob) and pulled["damaged"] == []


# --- what a hub answers -----------------------------------------------------------------------------------------


def test_no_token(hub, client, artifact):
    del client.env["HF_TOKEN"]
    assert "set HF_TOKEN, none is set" in error(client.push(artifact, REPO))
    assert hub.repos == {}


def test_a_token_that_may_not_write(hub, client, artifact):
    hub.read_only.add(TOKEN)
    text = error(client.push(artifact, REPO))
    assert "forbids access (403)" in text and "does not give access" in text
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("status", "said"), [(429, "limits the rate (429)"), (500, "has a fault of its own (500): run again later")]
)
@pytest.mark.parametrize("step", ["revision/main", "repos/create", "preupload", "objects/batch", "PUT", "commit/main"])
def test_a_hub_that_refuses_a_step(hub, client, artifact, status, said, step):
    hub.fail(step, times=10**6, status=status)
    assert said in error(client.push(artifact, REPO))
    assert "manifest.json" not in (files(hub) if REPO in hub.repos else {})
    hub.faults.clear()
    commit(client.push(artifact, REPO))
    assert client.pull(REPO)["damaged"] == []


def test_short_faults_are_overcome(hub, client, artifact):
    hub.fail("PUT", times=2, status=503)
    commit(client.push(artifact, REPO))


def test_somebody_else_pushes_meanwhile(hub, client, artifact):
    client.push(artifact, REPO)
    theirs = files(hub) | {"notes.txt": b"theirs"}
    hub.after.append((r"objects/batch", lambda: hub.commit(REPO, theirs)))
    other = fake.artifact(artifact.parent, HELLO, name="elsewhere", targets=(OTHER,))
    assert "changed by somebody else meanwhile: run again" in error(client.push(other, REPO))
    assert files(hub) == theirs
    commit(client.push(other, REPO))
    assert files(hub)["notes.txt"] == b"theirs" and manifest(hub).kernels.keys() == {TARGET, OTHER}


def test_a_repo_whose_files_are_not_those_of_its_manifest(hub, client, artifact, tmp_path):
    client.push(fake.artifact(tmp_path, HELLO, name="both", targets=(TARGET, OTHER)), REPO)
    hub.commit(REPO, {n: d for n, d in files(hub).items() if n != f"kernels/{OTHER}.so"})
    text = error(client.push(artifact, REPO))
    assert f"kernels/{OTHER}.so is not in the repo as its manifest says" in text and "--replace" in text
    commit(client.push(artifact, REPO, replace=True))
    assert manifest(hub).kernels.keys() == {TARGET} and client.pull(REPO)["damaged"] == []


@pytest.mark.parametrize("name", ["weights/rank0.bin", "tokenizer/tokenizer_config.json"])
def test_what_somebody_changed_in_the_repo_is_sent_again(hub, client, artifact, name):
    client.push(artifact, REPO)
    data = files(hub)[name]
    hub.commit(REPO, files(hub) | {name: data[:-1] + b"?"})
    assert name in error(client.pull(REPO))
    done = client.push(artifact, REPO)
    assert done["plan"]["uploads"].keys() == {name} and files(hub)[name] == data
    assert client.pull(REPO)["damaged"] == []


def test_a_signature_goes_with_the_manifest_it_signs(hub, client, artifact, tmp_path):
    (tmp_path / "fake.mkpack.sig").write_bytes(b"{}")
    client.push(artifact, REPO)
    assert files(hub)["model.sig"] == b"{}"
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,))
    done = client.push(other, REPO)
    assert done["plan"]["removed"] == ["model.sig"] and "build one artifact with all targets" in done["notes"][0]
    # Nor does one stay beside a manifest that cannot be read.
    hub.commit(REPO, files(hub) | {"manifest.json": b"{}", "model.sig": b"{}"})
    assert "--replace puts this artifact in its place" in error(client.push(other, REPO))
    client.push(other, REPO, replace=True)
    assert "model.sig" not in files(hub) and client.pull(REPO, target=OTHER, check=False)["damaged"] == []


# --- interrupted at every step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "cut"])
def test_a_push_that_is_cut_off_at_any_request_is_complete_or_plainly_unfinished(hub, client, artifact, how):
    """From the n-th request on no answer comes any more; `lost`: that request has had no effect, `cut`: it has."""
    commit(client.push(artifact, "someone/whole"))
    steps, unfinished = len(hub.log), 0
    assert steps >= 10
    for n in range(steps):
        repo = f"someone/cut-{n}"
        hub.fail(
            rf"{repo}|repos/create|/upload/|/verify|validate", times=10**6, skip=n, **{how: -1 if how == "cut" else 0}
        )
        hub.objects.clear()
        assert "error" in client.push(artifact, repo), n
        hub.faults.clear()
        home = hub.repos.get(repo)
        held = home.commits[home.refs["main"]] if home else {}
        if "manifest.json" not in held:
            unfinished += 1
            found = error(client.pull(repo))
            assert "no manifest.json" in found if home else "no such repo" in found, n
        else:
            assert client.pull(repo)["damaged"] == [], n
        commit(client.push(artifact, repo))
        assert client.pull(repo)["damaged"] == [], n
    assert unfinished >= steps - 1


def test_an_added_kernel_that_is_cut_off_leaves_the_repo_runnable(hub, client, artifact, tmp_path):
    client.push(artifact, REPO)
    source = fake.FAKE.replace("1e9 *", "2e9 *")
    other = fake.artifact(tmp_path, HELLO, name="elsewhere", targets=(OTHER,), source=source)
    before = hub.repos[REPO].refs["main"]
    for step in ("preupload", "objects/batch", "PUT", "commit/main"):
        hub.fail(step, times=10**6, lost=0)
        error(client.push(other, REPO))
        assert hub.repos[REPO].refs["main"] == before
        assert client.pull(REPO)["damaged"] == []
        hub.faults.clear()
    commit(client.push(other, REPO))


def test_a_killed_push_goes_on_with_what_had_not_arrived(hub, client, tmp_path):
    path = fake.artifact(tmp_path, HELLO, weights=bytes(CHUNK) + b"end".ljust(4096, b"."))
    client.part = CHUNK
    hub.after.append((r"PUT /upload/", client.kill))
    process = client.begin("push", path, REPO)
    process.wait(timeout=PATIENCE_S)
    arrived = set(hub.objects)
    assert arrived and "manifest.json" not in files(hub)
    hub.log.clear()
    commit(client.push(path, REPO))
    assert not arrived & set(hub.uploads()), "what had arrived was sent again"
    assert client.pull(REPO)["damaged"] == []
