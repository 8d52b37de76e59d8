"""Native code that came from elsewhere: what keeps it from running, the three ways in, and the list that remembers."""

from __future__ import annotations

import functools
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import fake
import pytest
from artifacts import FILES, manifest
from fake import FAKE, HELLO
from patience import PATIENCE_S
from signing import key_pair, public

from mkpack import session, sign, trust
from mkpack.artifact import extract, open_artifact, write_artifact
from mkpack.digest import digest_of
from mkpack.errors import UserError
from mkpack.loader import load

# The kernel of a stranger: it leaves a file behind as soon as it is loaded, before any function of it is called.
CANARY = r"""
#include <cstdlib>
#include <cstdio>
__attribute__((constructor)) static void sing() {
  if (const char* path = getenv("CANARY"))
    if (FILE* f = fopen(path, "w")) fclose(f);
}
"""


@pytest.fixture(autouse=True)
def no_trust_yet(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    """The file that a loaded kernel of `make` leaves."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    return tmp_path / "canary"


@pytest.fixture
def make(tmp_path):
    return functools.partial(fake.artifact, tmp_path, trusted=False, source=FAKE + CANARY)


def kernel_of(path: Path) -> str:
    with open_artifact(path) as artifact:
        return artifact.manifest.entries[f"kernels/{fake.TARGET}.so"].sha256


def refused(path: Path, **options) -> str:
    with pytest.raises(UserError) as e:
        load(path, **options)
    return str(e.value)


def answer(path: Path, **options) -> str:
    with load(path, **options) as model:
        return "".join(model.generate("Hi"))


def mkpack(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mkpack", *map(str, arguments)], capture_output=True, text=True)


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_a_strangers_kernel_is_refused_with_the_three_ways_in(make, canary):
    path = make(HELLO)
    text = refused(path)
    assert not canary.exists()
    assert str(path) in text and "it has no signature" in text
    ways = ("mkpack trust add", "--rebuild-kernel", f"--trust-kernel {kernel_of(path)}")
    assert all(way in text for way in ways)
    trust.remember([kernel_of(path)], "built", "fake")
    assert answer(path) == "Héllo 😀!" and canary.exists()  # the canary does sing


def test_a_kernel_is_allowed_by_its_digest_and_remembered(make, canary):
    path = make(HELLO)
    other = "0" * 64
    text = refused(path, trust_kernel=other)
    assert other in text and kernel_of(path) in text and not canary.exists()
    assert trust.read().kernels == {}
    assert answer(path, trust_kernel=kernel_of(path).upper()) == "Héllo 😀!"
    assert answer(path) == "Héllo 😀!"
    extract(path, path.with_suffix(""))
    assert answer(path.with_suffix("")) == "Héllo 😀!"  # the same bytes wherever they lie
    trust.remove(kernel_of(path)[:12])
    assert "Three ways" in refused(path)


def test_a_kernel_with_one_other_byte_is_another(make, canary):
    """Also when manifest.json was changed along."""
    path = make(HELLO)
    trust.remember([kernel_of(path)], "built", "fake")
    changed = make(HELLO, name="changed", source=FAKE + CANARY + "\nint another = 1;\n")
    assert "Three ways" in refused(changed) and not canary.exists()


def test_a_signature_of_somebody_trusted_is_enough(make, canary, tmp_path):
    path, key = make(HELLO), key_pair(tmp_path)
    sign.sign(path, key=key)
    assert "says it was made by the key" in refused(path) and not canary.exists()
    trust.add(str(public(key)), name="friend")
    assert answer(path) == "Héllo 😀!"
    # Known from here on, so that later runs import no cryptography; until the signer is removed.
    code = (
        f"import mkpack, sys; mkpack.load({str(path)!r}); print({{'model_signing', 'cryptography'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
    trust.remove("friend")
    assert "Three ways" in refused(path)


def test_a_signature_says_nothing_of_another_manifest(make, canary, tmp_path):
    """The signature of one artifact, beside a stranger's."""
    signed, key = make(HELLO, name="signed"), key_pair(tmp_path)
    sign.sign(signed, key=key)
    trust.add(str(public(key)))
    other = make(HELLO, name="other", source=FAKE + CANARY + "\nint another = 1;\n")
    (tmp_path / "signed.mkpack.sig").rename(tmp_path / "other.mkpack.sig")
    text = refused(other)
    assert "it signs others than these" in text and not canary.exists()


def test_a_signature_that_cannot_be_checked_is_none(make, canary, tmp_path, monkeypatch):
    path, key = make(HELLO), key_pair(tmp_path)
    sign.sign(path, key=key)
    trust.add(str(public(key)))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "model_signing.verifying", None)
        assert "pip install 'mkpack[sign]'" in refused(path)
    (tmp_path / "fake.mkpack.sig").write_bytes(b"{}")
    assert "no sigstore bundle" in refused(path) and not canary.exists()


def test_two_ways_at_once_contradict(make):
    assert "contradict" in refused(make(HELLO), trust_kernel="0" * 64, rebuild_kernel=True)


def test_a_manifest_that_contradicts_its_kernel_is_refused(make, canary, tmp_path):
    """Memory for logits is reserved by the manifest's vocab_size: a trusted kernel must not meet another one."""
    facts = {"abi": 1, "context": 64, "tokens_per_step": 4, "tp": 1, "spec": "0" * 64}
    path = make(HELLO, described=json.dumps(facts))
    text = refused(path, trust_kernel=kernel_of(path))
    assert "contradicts the description of its kernel" in text and ": spec;" in text and not canary.exists()
    good = {**facts, "spec": digest_of(fake.SPEC.model_dump(mode="json")), "context": 65}
    path = make(HELLO, described=json.dumps(good))
    assert ": context;" in refused(path, trust_kernel=kernel_of(path))
    path = make(HELLO, described=json.dumps({**good, "context": 64, "down_input": "bf16"}))
    assert ": down_input;" in refused(path, trust_kernel=kernel_of(path))
    path = make(HELLO, described=json.dumps({**good, "context": 64}))
    assert answer(path, trust_kernel=kernel_of(path)) == "Héllo 😀!"


# -- what never runs it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "inspect {}",
        "inspect {} --tensors --json",
        "verify {}",
        "verify {} --signature",
        "unpack {} out",
        "run {} -p Hi",
    ],
)
def test_looking_at_an_artifact_runs_nothing_of_it(make, canary, tmp_path, command):
    path, key = make(HELLO), key_pair(tmp_path)
    sign.sign(path, key=key)
    if "--signature" in command:
        trust.add(str(public(key)))
    words = [w.format(path) if "{" in w else str(tmp_path / w) if w == "out" else w for w in command.split()]
    done = mkpack(*words)
    assert done.returncode == (2 if words[0] == "run" else 0), done.stderr
    assert not canary.exists()
    assert mkpack("run", path, "-p", "Hi", "--trust-kernel", kernel_of(path)).stdout == "Héllo 😀!\n"
    assert canary.exists()


def test_unpack_takes_the_signature_along(make, tmp_path):
    path, key = make(HELLO), key_pair(tmp_path)
    sign.sign(path, key=key)
    assert mkpack("unpack", path, tmp_path / "out").returncode == 0
    done = mkpack("verify", tmp_path / "out", "--key", public(key))
    assert done.returncode == 0 and "signed   by key" in done.stdout


def test_what_a_stranger_wrote_cannot_steer_a_terminal(tmp_path):
    """In inspect, in the list, in errors, and in what the model says on a terminal; a pipe gets every byte."""
    evil = "x\x1b]0;title\x07\x9b2J\r"
    path = tmp_path / "evil.mkpack"
    write_artifact(path, list(FILES.items()), lambda entries: manifest(entries, name=evil, license=evil))
    done = mkpack("inspect", path)
    assert done.returncode == 0 and "x\ufffd]0;title" in done.stdout
    trust.remember(["ab" * 32], "allowed", evil)
    listed = mkpack("trust", "list").stdout
    with pytest.raises(UserError) as e:
        trust.add(evil)
    for text in (done.stdout, listed, str(e.value)):
        assert not set("\x1b\x07\x9b\r") & set(text)


def test_a_model_cannot_steer_a_terminal(monkeypatch):
    class Says:
        result = None

        def __iter__(self):
            yield from ("a\tb\n", "\x1b[2J", "é")

        def close(self) -> None:
            pass

    for terminal, expected in ((True, "a\tb\n\ufffd[2Jé\n"), (False, "a\tb\n\x1b[2Jé\n")):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", out)
        pieces: list[str] = []
        session._show(Says(), pieces)  # type: ignore[arg-type]
        assert out.getvalue() == expected and "".join(pieces) == "a\tb\n\x1b[2Jé"


# -- the list ---------------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path):
    key, digest = key_pair(tmp_path), "ab" * 32
    assert mkpack("trust", "add", public(key), "--name", "a friend").stdout.endswith("(a friend)\n")
    assert mkpack("trust", "add", digest.upper()).stdout == f"trusted: kernel {digest}\n"
    assert "identity x@y.z of https://i" in mkpack("trust", "add", "x@y.z", "--issuer", "https://i").stdout
    shown = mkpack("trust", "list").stdout
    assert "(a friend)" in shown and digest[:16] in shown and "allowed" in shown and str(tmp_path / "config") in shown
    listed = json.loads(mkpack("trust", "list", "--json").stdout)
    assert [s["kind"] for s in listed["signers"]] == ["key", "identity"] and list(listed["kernels"]) == [digest]
    assert mkpack("trust", "remove", "a friend").stdout.startswith("removed: key ")
    assert mkpack("trust", "remove", digest[:8]).stdout == f"removed: kernel {digest}\n"
    done = mkpack("trust", "remove", digest[:8])
    assert done.returncode == 2 and "names nothing in the trust list" in done.stderr


def test_a_key_is_trusted_once(tmp_path):
    key = key_pair(tmp_path)
    for name in ("first", "second"):
        trust.add(str(public(key)), name=name)
    assert [s.name for s in trust.read().signers] == ["second"]


RSA = """-----BEGIN PUBLIC KEY-----
MFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBALQJ7S0oTxnx7Dxg7PTDHwdR4sB7vDWH
hD6uQKFXwSRzKzm7pBVUJpcLzsDWhc3WlUuYxWHlDSDb1fYcYb6rWskCAwEAAQ==
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "found none"),
        ("hello", "found none"),
        (RSA, "expected an elliptic curve key"),
        (RSA + RSA, "found PUBLIC KEY, PUBLIC KEY"),
        (RSA.replace("PUBLIC", "PRIVATE"), "holds a private key"),
        (RSA.replace("PUBLIC", "EC PRIVATE"), "holds a private key"),
        (RSA.replace("PUBLIC KEY", "PKCS7"), "found PKCS7"),
        (RSA.replace("AQ==", "AQ="), "not base64"),
        (None, "there is no such file"),
    ],
)
def test_what_is_no_signer_is_refused(tmp_path, content, text):
    file = tmp_path / "signer.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as e:
        trust.add(str(file))
    assert text in str(e.value)
    assert not trust.path().exists()


def test_an_issuer_is_an_address():
    with pytest.raises(UserError, match="expected the https:// address"):
        trust.add("me@example.org", issuer="example.org")


def test_nobody_else_may_write_the_list(make, canary):
    path = make(HELLO)
    trust.remember([kernel_of(path)], "built", "fake")
    assert stat.S_IMODE(trust.path().stat().st_mode) == 0o600
    for mode in (0o620, 0o602, 0o666):
        trust.path().chmod(mode)
        assert "can be changed by others" in refused(path) and not canary.exists()
    trust.path().chmod(0o600)
    answer(path)


def test_the_list_of_another_user_does_not_count(make, monkeypatch):
    path = make(HELLO)
    trust.remember([kernel_of(path)], "built", "fake")
    status = trust.path().stat()
    assert trust.only_mine(status)
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)
    if status.st_uid != 0:  # root's files are everybody's
        assert "can be changed by others" in refused(path)
    assert not trust.only_mine(os.stat_result([0o100600, 0, 0, 0, status.st_uid + 2, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"version": 1, "signers": [1], "kernels": {}, "signed": {}}',
        b'{"version": 1, "signers": [], "kernels": [], "signed": {}}',
        b'{"version": 1, "signers": [], "kernels": {"a": {}}, "signed": {}}',
        b'{"version": 2, "signers": [], "kernels": {}, "signed": {}}',
    ],
)
def test_a_damaged_list_trusts_nobody(make, canary, content):
    path = make(HELLO)
    trust.remember([kernel_of(path)], "built", "fake")
    trust.path().write_bytes(content)
    text = refused(path)
    assert str(trust.path()) in text and not canary.exists()
    with pytest.raises(UserError):
        trust.add("00" * 32)
    assert trust.path().read_bytes() == content  # not replaced by a list that forgot


def test_a_relative_folder_is_not_the_lists(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.path() == tmp_path / ".config/mkpack/trust.json"


def test_a_list_that_cannot_be_written(make, tmp_path, monkeypatch):
    path, key = make(HELLO), key_pair(tmp_path)
    sign.sign(path, key=key)
    trust.add(str(public(key)))

    def full(*_words: object, **_keys: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mkpack.trust.os.fsync", full)
        with pytest.raises(UserError, match="cannot write the trust list .*No space left"):
            trust.add("00" * 32)
        assert answer(path) == "Héllo 😀!"  # checked again next time
    assert {p.name for p in trust.path().parent.iterdir()} == {"trust.json", "trust.lock"}
    assert not trust.read().kernels and not trust.read().signed and len(trust.read().signers) == 1


def test_processes_that_add_at_once_lose_nothing(tmp_path):
    code = (
        "import sys; from mkpack import trust\n"
        "for i in range(20): trust.remember([sys.argv[1] * 62 + f'{i:02}'], 'built', '')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, digit]) for digit in "abc"]
    assert [p.wait(timeout=PATIENCE_S) for p in running] == [0, 0, 0]
    assert len(trust.read().kernels) == 60
