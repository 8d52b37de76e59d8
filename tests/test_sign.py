"""Signatures: who made one is found out, nothing else passes, and OpenSSF's own tool agrees."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from artifacts import FILES, damage, write
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import certificate, key_pair, public

from mkpack import checks, sign, trust
from mkpack.artifact import extract, open_artifact
from mkpack.errors import UserError
from mkpack.sign import Signer


@pytest.fixture(autouse=True)
def no_trust_yet(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def key(tmp_path) -> Path:
    return key_pair(tmp_path)


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path / "tiny.mkpack")


def refused(path: Path, **given: Any) -> str:
    with pytest.raises(UserError) as e:
        checks.signature(path, **given)
    return str(e.value)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_a_signature_names_its_key(path, tmp_path, curve):
    key = key_pair(tmp_path, curve=curve)
    assert sign.sign(path, key=key) == tmp_path / "tiny.mkpack.sig"
    assert checks.signature(path, key=public(key)).startswith("signed   by key ")
    assert "not among those you trust" in refused(path)
    trust.add(str(public(key)), name="a friend")
    assert checks.signature(path).endswith("(a friend)")


def test_file_and_folder_share_a_signature(path, key, tmp_path):
    sign.sign(path, key=key)
    extract(path, tmp_path / "tiny")
    assert "is not signed" in refused(tmp_path / "tiny")
    sign.carry(path, tmp_path / "tiny")
    checks.signature(tmp_path / "tiny", key=public(key))
    with open_artifact(tmp_path / "tiny") as artifact:  # the signature is no entry
        assert not artifact.verify() and "model.sig" not in artifact.manifest.entries
    (tmp_path / "tiny/model.sig").unlink()
    assert sign.sign(tmp_path / "tiny", key=key) == tmp_path / "tiny/model.sig"
    checks.signature(tmp_path / "tiny", key=public(key))


def test_the_tool_of_model_signing_agrees(path, key, tmp_path):
    from model_signing import hashing, verifying
    from model_signing import signing as theirs

    sign.sign(path, key=key)
    folder = tmp_path / "tiny"
    extract(path, folder)
    sign.carry(path, folder)
    their_verifier = verifying.Config().use_elliptic_key_verifier(public_key=public(key))
    their_verifier.verify(folder, folder / "model.sig")
    (folder / "model.sig").unlink()
    hashes = hashing.Config().set_ignored_paths(paths=["model.sig"])
    theirs.Config().set_hashing_config(hashes).use_elliptic_key_signer(private_key=key).sign(
        folder, folder / "model.sig"
    )
    checks.signature(folder, key=public(key))
    damage(folder, "weights/rank-0.bin")
    with pytest.raises(ValueError, match="rank-0.bin"):
        their_verifier.verify(folder, folder / "model.sig")


def test_another_key_is_another(path, key, tmp_path):
    sign.sign(path, key=key)
    other = key_pair(tmp_path, "other")
    text = refused(path, key=public(other))
    assert "tiny.mkpack.sig" in text and "not among those you trust" in text
    # Neither does a signature that lies about its key.
    lying = json.loads((tmp_path / "tiny.mkpack.sig").read_text())
    lying["verificationMaterial"]["publicKey"]["hint"] = Signer("key", _id(other), "").id
    (tmp_path / "tiny.mkpack.sig").write_text(json.dumps(lying))
    assert "the signature is wrong" in refused(path, key=public(other))


def _id(key: Path) -> str:
    import hashlib

    return hashlib.sha256(public(key).read_bytes()).hexdigest()


def test_a_signature_of_another_artifact_is_none(path, key, tmp_path):
    sign.sign(path, key=key)
    other = write(tmp_path / "other.mkpack", {**FILES, "recipe.yaml": b"name: tinY\n"})
    (tmp_path / "tiny.mkpack.sig").rename(tmp_path / "other.mkpack.sig")
    text = refused(other, key=public(key))
    assert "it signs others than these" in text and "recipe.yaml" in text


@pytest.mark.parametrize("change", ["added", "left out"])
def test_every_entry_is_signed(path, key, tmp_path, change):
    """A signature over fewer or more entries than there are is no signature of this artifact."""
    files = dict(FILES)
    files.pop("LICENSE.txt") if change == "added" else files.update({"NOTICE": b""})
    sign.sign(write(tmp_path / "signed.mkpack", files), key=key)
    (tmp_path / "signed.mkpack.sig").rename(tmp_path / "tiny.mkpack.sig")
    text = refused(path, key=public(key))
    assert "it signs others than these" in text and ("LICENSE.txt" if change == "added" else "NOTICE") in text


def test_an_encrypted_key_needs_its_password(path, tmp_path, monkeypatch):
    key = key_pair(tmp_path, password="open sesame")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="MKPACK_KEY_PASSWORD"):
        sign.sign(path, key=key)
    monkeypatch.setenv("MKPACK_KEY_PASSWORD", "guess")
    with pytest.raises(UserError, match="cannot sign"):
        sign.sign(path, key=key)
    monkeypatch.setenv("MKPACK_KEY_PASSWORD", "open sesame")
    sign.sign(path, key=key)
    checks.signature(path, key=public(key))


def test_what_is_damaged_is_not_signed(path, key, tmp_path):
    sign.sign(path, key=key)
    before = (tmp_path / "tiny.mkpack.sig").read_bytes()
    damage(path, "weights/rank-1.bin")
    with pytest.raises(UserError, match="is damaged .*rank-1.bin"):
        sign.sign(path, key=key)
    assert (tmp_path / "tiny.mkpack.sig").read_bytes() == before


def test_a_failure_leaves_what_was_there(path, key, tmp_path):
    sign.sign(path, key=key)
    names = {p.name for p in tmp_path.iterdir()}
    before = (tmp_path / "tiny.mkpack.sig").read_bytes()
    (tmp_path / "garbage.pem").write_text("no key")
    for wrong in (tmp_path / "absent.pem", tmp_path / "garbage.pem", public(key)):
        with pytest.raises(UserError, match="cannot "):
            sign.sign(path, key=wrong)
    (tmp_path / "garbage.pem").unlink()
    assert {p.name for p in tmp_path.iterdir()} == names
    assert (tmp_path / "tiny.mkpack.sig").read_bytes() == before


# -- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path) -> dict[str, Path]:
    """root -> middle -> leaf; every name's private key is NAME.pem, its certificate NAME.crt.pem."""
    keys = {name: key_pair(tmp_path, name) for name in ("root", "middle", "leaf")}
    certificate(tmp_path, "root", keys["root"], signs=True, years=9)
    certificate(tmp_path, "middle", keys["middle"], "root", signs=True, years=5)
    certificate(tmp_path, "leaf", keys["leaf"], "middle")
    return {name: tmp_path / f"{name}.crt.pem" for name in keys}


def test_a_certificate_is_trusted_through_its_root(path, chain, tmp_path):
    sign.sign(path, key=tmp_path / "leaf.pem", certificate=chain["leaf"], chain=[chain["middle"]])
    assert checks.signature(path, certificate=chain["root"]).startswith("signed   by certificate")
    assert "a certificate, which is not among those you trust" in refused(path)
    trust.add(str(chain["root"]), name="a company")
    assert checks.signature(path).endswith("(a company)")
    # A key that is trusted itself does not count for a signature by certificate.
    assert "not among" in refused(path, key=public(tmp_path / "leaf.pem"))


def test_other_roots_vouch_for_nothing(path, chain, tmp_path, monkeypatch):
    sign.sign(path, key=tmp_path / "leaf.pem", certificate=chain["leaf"], chain=[chain["middle"]])
    other = certificate(tmp_path, "other", key_pair(tmp_path, "other"), signs=True)
    monkeypatch.setattr("certifi.where", lambda: str(chain["root"]))  # what browsers trust is not asked
    assert "not a signature of this artifact by certificate" in refused(path, certificate=other)
    assert "not among those you trust" in refused(path)


def test_a_chain_with_a_gap_is_refused(path, chain, tmp_path):
    sign.sign(path, key=tmp_path / "leaf.pem", certificate=chain["leaf"])
    assert "not a signature" in refused(path, certificate=chain["root"])


def test_a_certificate_of_another_key_is_refused(path, chain, tmp_path, key):
    with pytest.raises(UserError, match="does not match"):
        sign.sign(path, key=key, certificate=chain["leaf"])
    with pytest.raises(UserError, match="--certificate needs --key"):
        sign.sign(path, certificate=chain["leaf"])


def test_a_certificate_that_may_not_sign_is_refused(path, chain, tmp_path):
    sign.sign(path, key=tmp_path / "middle.pem", certificate=chain["middle"])
    assert "cannot be used for signing" in refused(path, certificate=chain["root"])


# -- sigstore ---------------------------------------------------------------------------------------------------------


def sigstore_bundle(path: Path, key: Path) -> Path:
    """A signature that says it is one of sigstore; only the network could make a real one."""
    sign.sign(path, key=key)
    file = sign.signature_path(path)
    bundle = json.loads(file.read_text())
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": "AAAA"}, "tlogEntries": []}
    file.write_text(json.dumps(bundle))
    return file


def test_an_identity_is_asked_of_sigstore(path, key, monkeypatch):
    from model_signing import verifying

    sigstore_bundle(path, key)
    asked = []

    class Accepts:
        def verify(self, signature: object) -> Any:
            return asked_for.hash("")

    def use(self: Any, *, identity: str, oidc_issuer: str) -> Any:
        nonlocal asked_for
        asked.append((identity, oidc_issuer))
        asked_for, self._verifier = self._hashing_config, Accepts()
        return self

    asked_for: Any = None
    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", use)
    who = {"identity": "me@example.org", "issuer": "https://issuer.example"}
    assert checks.signature(path, **who) == "signed   by identity me@example.org of https://issuer.example"
    assert asked == [("me@example.org", "https://issuer.example")]
    assert "an identity, which is not among those you trust" in refused(path)
    trust.add("me@example.org", issuer="https://issuer.example")
    checks.signature(path)
    for half in ({"identity": "me@example.org"}, {"issuer": "https://issuer.example"}):
        assert "belong together" in refused(path, **half)


def test_without_the_network_sigstore_says_so(path, key, monkeypatch):
    from sigstore.models import ClientTrustConfig

    def offline() -> None:
        raise ConnectionError("Failed to refresh TUF metadata")

    monkeypatch.setattr(ClientTrustConfig, "production", offline)
    with pytest.raises(UserError, match="cannot sign .*TUF metadata; sigstore needs the network, a key .* does not"):
        sign.sign(path)
    sigstore_bundle(path, key)
    assert "TUF metadata; checking it the first time needs the network" in refused(
        path, identity="me@example.org", issuer="https://issuer.example"
    )


def test_without_the_library_it_is_said_how_to_get_it(path, key, monkeypatch):
    sign.sign(path, key=key)
    for name in [n for n in sys.modules if n.split(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    assert "pip install 'mkpack[sign]'" in refused(path, key=public(key))


# -- hostile signatures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed(tmp_path_factory) -> tuple[Path, Path, bytes]:
    folder = tmp_path_factory.mktemp("signed")
    path, key = write(folder / "tiny.mkpack"), key_pair(folder)
    return path, public(key), sign.sign(path, key=key).read_bytes()


def check(signed: tuple[Path, Path, bytes], data: bytes) -> None:
    """A signature of these bytes is refused in words, or says what the good one says."""
    path, key, good = signed
    sign.signature_path(path).write_bytes(data)
    try:
        checks.signature(path, key=key)
    except UserError:
        return
    a, b = (json.loads(d)["dsseEnvelope"] for d in (good, data))
    # What is signed is what the base64 stands for; spaces in it mean nothing.
    assert base64.b64decode(a["payload"]) == base64.b64decode(b["payload"])
    assert a["payloadType"] == b["payloadType"]


@given(st.data())
@settings(max_examples=60)
def test_damaged_signatures(signed, data):
    bad = bytearray(signed[2])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        bad = bad or bytearray(b"x")
    check(signed, bytes(bad))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=60)
def test_signatures_with_other_values(signed, data):
    bundle = json.loads(signed[2])
    parts = [bundle, bundle["verificationMaterial"], bundle["verificationMaterial"]["publicKey"]]
    parts += [bundle["dsseEnvelope"], bundle["dsseEnvelope"]["signatures"][0]]
    part = data.draw(st.sampled_from(parts))
    name = data.draw(st.sampled_from([*part, "x509CertificateChain", "certificate"]))
    part[name] = data.draw(_json)
    check(signed, json.dumps(bundle).encode())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no sigstore bundle"),
        (b'{"verificationMaterial": 1}', "no sigstore bundle"),
        (b'{"verificationMaterial": {"publicKey": []}}', "not a signature"),
        (b'{"verificationMaterial": {"x509CertificateChain": 1}}', "not among those you trust"),
        (b" " * (sign.MAX_SIGNATURE + 1), "more than"),
    ],
)
def test_what_is_no_signature(signed, data, text):
    sign.signature_path(signed[0]).write_bytes(data)
    assert text in refused(signed[0], key=signed[1])
