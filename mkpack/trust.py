"""Whether native code may run here: this user's list of trusted signers and kernels, and the one function that asks it.

A kernel runs when its digest is in the list (built here, rebuilt here with the same bytes, or allowed by name) or when
its artifact is signed by somebody in the list. The list is a JSON file of the user: trust is a matter of persons, not
of artifacts or machines. See docs/SECURITY.md.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mkpack import sign
from mkpack.errors import UserError, os_errors
from mkpack.manifest import Manifest, shown
from mkpack.sign import Signer

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s+([A-Za-z0-9+/=\s]+?)-----END \1-----")
_EC = bytes.fromhex("06072a8648ce3d0201")  # DER of the object identifier of elliptic curve keys
_HOW = {"built": "built here", "rebuilt": "rebuilt here, same bytes", "allowed": "allowed"}


@dataclass(frozen=True)
class Note:
    """Why a kernel or an artifact is trusted. how: a key of _HOW, or the id of a signer; name: of the artifact."""

    how: str
    name: str
    added: str


@dataclass
class Store:
    """The list. kernels: by SHA-256 of the .so. signed: artifacts, by SHA-256 of manifest.json, whose signature by a
    listed signer was checked before; that saves importing the signature libraries on every run."""

    signers: list[Signer] = field(default_factory=list)
    kernels: dict[str, Note] = field(default_factory=dict)
    signed: dict[str, Note] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"version": 1, **asdict(self)}, indent=1, sort_keys=True)


def path() -> Path:
    """The file that holds the list: trust.json in mkpack's folder of $XDG_CONFIG_HOME (~/.config)."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # A relative value is to be ignored, says the specification; here it would let the current folder decide.
    try:
        home = Path(base) if os.path.isabs(base) else Path("~/.config").expanduser()
    except RuntimeError as e:
        raise UserError("no place for the trust list: this user has no home folder; set XDG_CONFIG_HOME") from e
    return home / "mkpack" / "trust.json"


def read() -> Store:
    """The list, empty when there is none. UserError when it is damaged, or when others could have written it."""
    where = path()
    try:
        with open(where, "rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return Store()
    except OSError as e:
        raise UserError(f"cannot read the trust list {where}: {e.strerror}") from e
    if not only_mine(status):
        raise UserError(
            f"the trust list {where} can be changed by others, so nothing in it counts; look at what it says, then "
            f"make it yours alone (chmod 600 {where})"
        )
    try:
        raw = json.loads(data)
        if raw["version"] != 1:
            raise UserError(f"the trust list {where} is of version {shown(raw['version'])}; upgrade mkpack")
        store = Store(
            [Signer(**s) for s in raw["signers"]],
            {str(k): Note(**n) for k, n in raw["kernels"].items()},
            {str(k): Note(**n) for k, n in raw["signed"].items()},
        )
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as e:
        raise UserError(f"the trust list {where} is damaged ({type(e).__name__}: {shown(str(e))}); remove it") from e
    return store


def only_mine(status: os.stat_result) -> bool:
    """Whether nobody but this user (and root) can have written a file."""
    return status.st_uid in (os.geteuid(), 0) and not stat.S_IMODE(status.st_mode) & 0o022


@contextlib.contextmanager
def _changed() -> Iterator[Store]:
    """The list to change; it is written back, whole or not at all, unless the block raises."""
    import filelock

    where = path()
    with os_errors(f"write the trust list {where}"):
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(where.with_suffix(".lock")):
            store = read()
            yield store
            fd, temporary = tempfile.mkstemp(dir=where.parent, prefix=".trust.")  # mode 0600
            try:
                with open(fd, "w", encoding="utf-8") as file:
                    file.write(store.to_json())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, where)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise


def add(what: str, *, issuer: str | None = None, name: str | None = None) -> str:
    """Trusts a signer or a kernel, for good, and says in a line what was added.

    what: a PEM file with a public key or a certificate, the SHA-256 of a kernel, or, with `issuer`, the identity that a
    sigstore certificate names (an e-mail address or a URL). UserError when it is none of them.
    """
    if issuer is None and _DIGEST.fullmatch(what.lower()):
        remember([what.lower()], "allowed", name or "")
        return f"kernel {what.lower()}"
    signer = _identity(what, issuer) if issuer is not None else _from_pem(Path(what), name)
    with _changed() as store:
        store.signers = [s for s in store.signers if s.id != signer.id] + [signer]
    return str(signer)


def remember(digests: Iterable[str], how: str, name: str) -> None:
    """Trusts kernels by digest. how: "built", "rebuilt" or "allowed"; name: of the artifact, for people."""
    digests = list(digests)
    if not digests or all(d in read().kernels for d in digests):
        return
    with _changed() as store:
        for digest in digests:
            store.kernels.setdefault(digest, Note(how, shown(name), _today()))


def remove(what: str) -> list[str]:
    """Takes everything back that `what` names: the beginning of an id or digest (at least 8 digits), or the whole name
    of a signer. Returns a line for each. UserError when it names nothing."""

    def meant(key: str) -> bool:
        return len(what) >= 8 and key.startswith(what.lower())

    with _changed() as store:
        signers = [s for s in store.signers if meant(s.id) or s.name == what]
        kernels = [d for d in store.kernels if meant(d)]
        if not signers and not kernels:
            raise UserError(f"{shown(what)} names nothing in the trust list; mkpack trust list shows what is there")
        gone = {s.id for s in signers}
        store.signers = [s for s in store.signers if s.id not in gone]
        store.kernels = {d: n for d, n in store.kernels.items() if d not in kernels}
        store.signed = {d: n for d, n in store.signed.items() if n.how not in gone}
    return [*(str(s) for s in signers), *(f"kernel {d}" for d in kernels)]


def render(store: Store) -> str:
    """What `mkpack trust list` prints."""
    lines = [f"trust list: {path()}", "", "signers:" if store.signers else "signers: none"]
    lines += [f"  {s}" for s in store.signers]
    lines.append("kernels:" if store.kernels else "kernels: none")
    lines += [f"  {d[:16]}  {_HOW.get(n.how, n.how)} {n.added}  {n.name}".rstrip() for d, n in store.kernels.items()]
    return "\n".join(lines)


def require(
    where: str,
    manifest: Manifest,
    digest: str,
    target: str,
    *,
    signature: Path | None = None,
    allow: str | None = None,
) -> None:
    """Returns when the kernel of `target` may be loaded into this process; UserError that names the ways otherwise.

    where: the artifact, for the error. digest: SHA-256 of its manifest.json. signature: the file with its signature, if
    there is one. allow: the SHA-256 of a kernel that the user allows now; it is remembered. Only the manifest and the
    signature are looked at: whoever loads a kernel checks its bytes against the manifest first, and loads those.
    """
    kernel = manifest.kernels[target]
    found = manifest.entries[kernel.path].sha256
    if allow is not None:
        if allow.lower() != found:
            raise UserError(
                f"{where}: the kernel {kernel.path} is not the one that was allowed: expected {shown(allow)}, found "
                f"{found}; nothing of it was run"
            )
        remember([found], "allowed", manifest.name)
        return
    store = read()
    before = store.signed.get(digest)
    if found in store.kernels or (before and any(s.id == before.how for s in store.signers)):
        return
    reason = _signed(store, manifest, digest, signature)
    if reason is None:
        return
    raise UserError(
        f"{where}: its kernel was not built on this machine by you, and nobody you trust vouches for it; native code "
        "can do whatever you can, so it was not run. Three ways to run it:\n"
        f"  - trust who signed it: mkpack trust add PUBLIC_KEY.pem, then run it again ({reason})\n"
        "  - do not use this kernel, compile it here from mkpack's own sources: mkpack run --rebuild-kernel\n"
        f"  - allow exactly this kernel, now and later: mkpack run --trust-kernel {found}, or mkpack trust add\n"
        "docs/SECURITY.md of mkpack says what each of them protects from"
    )


def check_signature(
    manifest: Manifest,
    digest: str,
    signature: Path,
    *,
    key: Path | None = None,
    certificate: Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
) -> Signer:
    """Who, of those given or else of the trust list, made this signature over exactly this manifest.

    Whether the entries have the digests of the manifest is Artifact.verify's to say. UserError when nobody did.
    """
    given = [_from_pem(p, None) for p in (key, certificate) if p is not None]
    if identity is not None or issuer is not None:
        if not identity or not issuer:
            raise UserError("--identity and --issuer belong together: who signed, and who vouched for that")
        given.append(_identity(identity, issuer))
    signer, reasons = _find_signer(given or read().signers, manifest, digest, signature)
    if signer is None:
        raise UserError("\n".join(reasons))
    return signer


def _signed(store: Store, manifest: Manifest, digest: str, signature: Path | None) -> str | None:
    """None when a listed signer signed it, which is remembered; else why that is not so."""
    if signature is None:
        return "it has no signature"
    try:
        signer, reasons = _find_signer(store.signers, manifest, digest, signature)
    except UserError as e:
        return str(e)
    if signer is None:
        return "; ".join(reasons)
    # A list that cannot be written only means that the signature is checked again next time.
    with contextlib.suppress(UserError), _changed() as changed:
        changed.signed[digest] = Note(signer.id, shown(manifest.name), _today())
    return None


def _find_signer(
    signers: list[Signer], manifest: Manifest, digest: str, signature: Path
) -> tuple[Signer | None, list[str]]:
    kind = sign.kind_of(signature)
    hint = sign.key_hint(signature)
    # A key's id is what its signatures name, so others need not be tried.
    candidates = [s for s in signers if s.kind == kind and (kind != "key" or not hint or s.id == hint)]
    reasons = []
    for signer in candidates:
        try:
            sign.verify(signature, manifest, digest, signer)
            return signer, []
        except UserError as e:
            reasons.append(str(e))
    who = f"the key {hint[:16]}" if hint else {"key": "a key", "certificate": "a certificate"}.get(kind, "an identity")
    return None, reasons or [f"{signature} says it was made by {who}, which is not among those you trust"]


def _identity(identity: str, issuer: str) -> Signer:
    if not issuer.startswith("https://"):
        raise UserError(f"--issuer {shown(issuer)}: expected the https:// address of an OpenID Connect issuer")
    return Signer("identity", hashlib.sha256(f"{issuer}\0{identity}".encode()).hexdigest(), identity, issuer=issuer)


def _from_pem(file: Path, name: str | None) -> Signer:
    """The one public key or certificate in a PEM file."""
    with os_errors(f"trust {file}"):
        if not file.is_file():
            raise UserError(
                f"{shown(str(file))}: expected a PEM file with a public key or certificate, the SHA-256 of a kernel "
                "(64 hex digits), or an identity with --issuer; there is no such file"
            )
        with open(file, "rb") as opened:
            data = opened.read(1 << 20)
    blocks = [(label.decode(), body) for label, body in _PEM.findall(data)]
    if b"PRIVATE KEY" in data:
        raise UserError(f"{file} holds a private key, which stays with its owner; expected a public key or certificate")
    usable = [b for b in blocks if b[0] in ("PUBLIC KEY", "CERTIFICATE")]
    if len(blocks) != 1 or not usable:
        labels = ", ".join(label for label, _ in blocks) or "none"
        raise UserError(f"{file}: expected one PEM block, PUBLIC KEY or CERTIFICATE, found {labels}")
    label, body = usable[0]
    try:
        der = base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as e:
        raise UserError(f"{file}: the PEM block is not base64: {e}") from e
    if label == "PUBLIC KEY" and _EC not in der[:64]:
        raise UserError(f"{file}: expected an elliptic curve key (P-256, P-384 or P-521), found another kind")
    # Written again, so that the id of a key is the digest that model-signing puts into its signatures as a hint.
    text = base64.b64encode(der).decode()
    lines = [text[i : i + 64] for i in range(0, len(text), 64)]
    pem = "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])
    kind: Any = "key" if label == "PUBLIC KEY" else "certificate"
    return Signer(kind, hashlib.sha256(pem.encode()).hexdigest(), name or file.stem, pem=pem)


def _today() -> str:
    return datetime.date.today().isoformat()
