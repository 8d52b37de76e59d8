"""Signatures of artifacts, in the format of OpenSSF model-signing: an in-toto statement in a sigstore bundle.

What is signed is the list of all entries with their SHA-256, manifest.json among them: the statement that model-signing
itself makes of the unpacked folder, so that its own tool checks it too. The digests are those of the manifest, so
checking a signature reads the manifest and no weights. Its libraries are imported when they are used: running an
artifact that is not signed needs none of them.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mkpack.artifact import open_artifact
from mkpack.errors import UserError, combine, os_errors
from mkpack.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest, capped, shown

SUFFIX = ".sig"  # NAME.mkpack.sig lies beside NAME.mkpack; in an unpacked folder it is SIGNATURE_NAME
MAX_SIGNATURE = 16 << 20  # bytes; MAX_ENTRIES names and digests need less
PASSWORD = "MKPACK_KEY_PASSWORD"  # environment variable with the password of an encrypted private key

Kind = Literal["key", "certificate", "identity"]


@dataclass(frozen=True)
class Signer:
    """Whoever's signatures are accepted.

    kind: a public key; a root (or intermediate) certificate, for whatever is signed below it; or a sigstore identity.
    id: 64 hex digits that name it. name: for people; of an identity the identity itself, exactly. pem: of a key or a
    certificate. issuer: of an identity, the OpenID Connect issuer that must have vouched for it.
    """

    kind: Kind
    id: str
    name: str
    pem: str = ""
    issuer: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} {self.id[:16]}" if self.kind != "identity" else f"identity {self.name} of {self.issuer}"
        return what if self.kind == "identity" or not self.name else f"{what} ({self.name})"


def signature_path(artifact: Path) -> Path:
    """Where the signature of an artifact (file or folder) belongs."""
    return artifact / SIGNATURE_NAME if artifact.is_dir() else artifact.with_name(artifact.name + SUFFIX)


def find(artifact: Path) -> Path | None:
    """The signature that lies where it belongs, if there is one."""
    path = signature_path(artifact)
    return path if path.is_file() else None


def carry(artifact: Path, folder: Path) -> None:
    """Puts a copy of an artifact's signature into the folder it was unpacked to."""
    if found := find(artifact):
        with os_errors(f"copy {found} into {folder}"):
            shutil.copyfile(found, folder / SIGNATURE_NAME)


def sign(
    artifact: Path,
    *,
    key: Path | None = None,
    certificate: Path | None = None,
    chain: Sequence[Path] = (),
    identity_token: str | None = None,
    output: Path | None = None,
) -> Path:
    """Signs an artifact, file or folder, and returns the signature's path; every byte is checked first.

    key: PEM private key on a NIST curve (P-256, P-384, P-521). certificate: of that key, with `chain`, the certificates
    between it and a root, for those who trust the root. Without a key the signature is made by sigstore, with
    `identity_token`, the identity of the CI job this runs in, or a browser to log in with; that needs the network, and
    the identity becomes public. The signature appears complete or not at all. UserError for all that stops it.
    """
    if key is None and (certificate or chain):
        raise UserError("--certificate needs --key, the private key that the certificate is of")
    with open_artifact(artifact) as opened:
        if damage := opened.verify(full=True):
            raise combine(f"{artifact} is not signed, for it is damaged (rebuild it)", capped(damage))
        statement = _Statement(opened.manifest, opened.digest)
    path = output or signature_path(artifact)
    signing = _library("signing").Config().set_hashing_config(statement)
    hint = "" if key else "; sigstore needs the network, a key (--key) does not"
    with _errors(f"cannot sign {artifact}", hint):
        if key and certificate:
            signing.use_certificate_signer(
                private_key=_readable(key),
                signing_certificate=_readable(certificate),
                certificate_chain=chain or [certificate],  # the library cannot have none
            )
        elif key:
            signing.use_elliptic_key_signer(private_key=_readable(key), password=_password(key))
        else:
            signing.use_sigstore_signer(identity_token=identity_token, use_ambient_credentials=identity_token is None)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with _only_errors_on_stdout():
                signing.sign(artifact, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def verify(signature: Path, manifest: Manifest, digest: str, signer: Signer) -> None:
    """UserError, saying why, unless `signature` is `signer`'s over exactly this artifact.

    digest: SHA-256 of manifest.json. That the entries have the digests of the manifest is not checked here.
    """
    _bundle(signature)  # size and form, before the library reads it
    verifying = _library("verifying").Config().set_hashing_config(_Statement(manifest, digest))
    hint = "; checking it the first time needs the network" if signer.kind == "identity" else ""
    title = f"{signature}: not a signature of this artifact by {signer}"
    with _errors(title, hint), tempfile.TemporaryDirectory() as folder:
        pem = Path(folder, "signer.pem")
        pem.write_text(signer.pem)
        if signer.kind == "key":
            verifying.use_elliptic_key_verifier(public_key=pem)
        elif signer.kind == "certificate":
            verifying.use_certificate_verifier(certificate_chain=[pem])
        else:
            verifying.use_sigstore_verifier(identity=signer.name, oidc_issuer=signer.issuer)
        with _only_errors_on_stdout():
            verifying.verify(Path(manifest.name), signature)


def kind_of(signature: Path) -> Kind:
    """Which kind of signer a signature names. UserError when the file is no signature."""
    material = _bundle(signature)["verificationMaterial"]
    if "x509CertificateChain" in material:
        return "certificate"
    return "identity" if "certificate" in material else "key"


def key_hint(signature: Path) -> str:
    """The id of the key that a signature says it was made with, "" when it names none; anybody can write anything."""
    public = _bundle(signature)["verificationMaterial"].get("publicKey")
    hint = public.get("hint") if isinstance(public, dict) else None
    return shown(hint) if isinstance(hint, str) else ""


def _bundle(signature: Path) -> dict[str, Any]:
    with os_errors(f"read {signature}"), open(signature, "rb") as file:
        data = file.read(MAX_SIGNATURE + 1)
    if len(data) > MAX_SIGNATURE:
        raise UserError(f"{signature}: not a signature: more than {MAX_SIGNATURE} bytes")
    try:
        bundle = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{signature}: not a signature: not JSON: {shown(str(e))}") from e
    if not isinstance(bundle, dict) or not isinstance(bundle.get("verificationMaterial"), dict):
        raise UserError(f"{signature}: not a signature: no sigstore bundle")
    return bundle


class _Statement:
    """Takes the place of model_signing.hashing.Config: its digests are those of the manifest, no file is read."""

    def __init__(self, manifest: Manifest, digest: str) -> None:
        self._name = manifest.name
        self._digests = {MANIFEST_NAME: digest, **{name: e.sha256 for name, e in manifest.entries.items()}}

    def hash(self, model_path: object, *, files_to_hash: object = None) -> Any:
        from model_signing import manifest as listing
        from model_signing._hashing.hashing import Digest

        form = listing.SerializationType.from_args(
            {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_NAME]}
        )
        items = [form.new_item(n, Digest("sha256", bytes.fromhex(d))) for n, d in sorted(self._digests.items())]
        return listing.Manifest(self._name, items, form)

    def add_ignored_paths(self, *, model_path: object, paths: Mapping[str, str]) -> None:
        """Nothing of an artifact is left out, whatever the signature lists: every entry is compared."""


def _library(module: str) -> Any:
    try:
        from importlib import import_module

        return import_module(f"model_signing.{module}")
    except ImportError as e:
        raise UserError(
            f"signatures need the package model-signing, which is not installed here ({e}); pip install 'mkpack[sign]'"
        ) from e


def _readable(path: Path) -> Path:
    with os_errors(f"read {path}"), open(path, "rb"):
        return path


def _password(key: Path) -> bytes | None:
    if b"ENCRYPTED" not in key.read_bytes():
        return None
    if (given := os.environ.get(PASSWORD)) is not None:
        return given.encode()
    if not sys.stdin or not sys.stdin.isatty():
        raise UserError(f"{key} is encrypted; put its password into the environment variable {PASSWORD}")
    return getpass.getpass(f"password of {key}: ").encode()


@contextlib.contextmanager
def _errors(title: str, hint: str) -> Iterator[None]:
    """The libraries raise whatever their own libraries raise; all of it means that it did not work."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        text = str(e)
        if text.startswith("Signature mismatch"):
            found = re.findall(r"Hash mismatch for '([^']*)'|(?:Extra|Missing) files [^:]*: ([^'\"]*)", text)
            text = f"it signs others than these files or bytes: {shown(', '.join(a or b for a, b in found))}"
        elif text.startswith("Key mismatch"):
            text = "another key made it"
        elif type(e).__name__ == "InvalidSignature":
            text = "the signature is wrong"
        elif isinstance(e, FileNotFoundError):
            text = f"no such file: {e.filename}"
        text = " ".join(text.split()) or type(e).__name__
        raise UserError(f"{title}: {text[:300]}{'...' if len(text) > 300 else ''}{hint}") from e


@contextlib.contextmanager
def _only_errors_on_stdout() -> Iterator[None]:
    # The library prints its remarks; standard output is for results.
    with contextlib.redirect_stdout(sys.stderr):
        yield
