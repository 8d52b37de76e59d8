"""What a push does to a repo, found out before anything is sent: which files it lacks, what stays, what goes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkpack import card, sign
from mkpack.artifact import Artifact
from mkpack.card import Bench
from mkpack.errors import UserError, combine
from mkpack.hub_client import Listing, RemoteFile
from mkpack.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest, capped, to_text
from mkpack.repo import BENCH, CARD, RepoFile, files


@dataclass(frozen=True)
class Plan:
    """What a push does to a repo. uploads and kept: sizes of files by their path there; removed: paths.

    manifest, digest: what the repo holds afterwards, and the SHA-256 of manifest.json.
    """

    repo: str
    revision: str
    manifest: Manifest
    digest: str
    creates: bool
    uploads: dict[str, int]
    kept: dict[str, int]
    removed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """Whether the repo is already as the push would make it."""
        return not self.uploads and not self.removed

    def render(self) -> str:
        lines = [f"repo      {self.repo}, {self.revision}{' (new)' if self.creates else ''}"]
        lines.append(f"artifact  {self.manifest.name}: {', '.join(sorted(self.manifest.kernels)) or 'no kernel'}")
        lines += [f"upload    {path}  {size:,} bytes" for path, size in self.uploads.items()]
        lines += [f"remove    {path}" for path in self.removed]
        lines.append(
            f"in all    {sum(self.uploads.values()):,} bytes to send, {len(self.kept)} files are there already"
        )
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])

    def to_json(self) -> str:
        document = {
            "repo": self.repo,
            "revision": self.revision,
            "creates": self.creates,
            "kernels": sorted(self.manifest.kernels),
            "uploads": self.uploads,
            "kept": self.kept,
            "removed": list(self.removed),
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=2)


@dataclass
class Remote:
    """The repo as it is. listing: None while there is none; has_branch: whether the branch to push to exists.

    manifest, manifest_bytes: of the artifact it holds, when it holds one. benches: by target.
    """

    listing: Listing | None
    has_branch: bool
    manifest: Manifest | None = None
    manifest_bytes: bytes = b""
    readme: str | None = None
    benches: dict[str, Bench] = field(default_factory=dict)

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        return self.listing.files if self.listing else {}


def make_plan(
    artifact: Artifact, name: str, branch: str, remote: Remote, private: bool, replace: bool, bench: Sequence[Path]
) -> tuple[Plan, dict[str, Reader]]:
    """What a push of `artifact` does to the repo `name`, and the content of each file to upload as the client takes it.

    UserError: the repo holds another artifact and `replace` is not given, or has not what its manifest says; it is not
    `private` but should be; a result of `bench` is none, or of no kernel.
    """
    if private and remote.listing is not None and not remote.listing.private:
        raise UserError(
            f"--private: the repo {name} exists and everybody can see it; change that in its settings first"
        )
    old, new, data, notes = remote.manifest, artifact.manifest, artifact.read(MANIFEST_NAME), []
    if old is not None and replace:
        notes.append(f"replaces the artifact {old.name} with its kernels {', '.join(sorted(old.kernels))}")
    elif old is not None:
        if different := differences(remote.manifest_bytes, data):
            title = f"{name} holds another artifact (push --replace to put this one in its place, or --revision BRANCH)"
            raise combine(title, capped(different))
        data = merged(remote.manifest_bytes, data)
    manifest = Manifest.parse(data, MANIFEST_NAME)
    given = [card.read_bench_file(file) for file in bench]
    card.check_benches(manifest, given)

    contents: dict[str, Reader] = {}
    sizes: dict[str, int] = {}
    kept: dict[str, int] = {}
    absent: list[str] = []

    def put(path: str, data: bytes) -> None:
        if _same(remote.files.get(path), data):
            kept[path] = len(data)
        else:
            contents[path], sizes[path] = Reader(memoryview(data)), len(data)

    for file in files(manifest, manifest.entries):
        ours = new.entries.get(file.entry) == manifest.entries[file.entry]
        if _is_there(artifact if ours else None, manifest, remote, file):
            kept[file.path] = file.size
        elif not ours:
            absent.append(f"{file.path} is not in the repo as its manifest says, and is no file of this artifact")
        else:
            piece = artifact.map(file.entry)[file.start : file.end] if file.size else memoryview(b"")
            contents[file.path] = Reader(piece)
            sizes[file.path] = file.size
    if absent:
        title = f"{name} is not complete (push --replace puts this artifact alone in its place)"
        raise combine(title, capped(absent))

    benches = _benches(remote, manifest, given)
    for target, result in benches.items():
        put(f"{BENCH}/{target}.json", result.to_bytes())
    if remote.readme is not None and card.BEGIN not in remote.readme:
        notes.append(f"{CARD} there was not written by mkpack push and stays as it is")
    put(CARD, card.render(manifest, name, benches, remote.readme).encode())
    changed = data != remote.manifest_bytes
    signature = sign.find(artifact.path)
    if signature is not None and _digest(data) == artifact.digest:
        put(SIGNATURE_NAME, signature.read_bytes())
    elif changed and (signature is not None or SIGNATURE_NAME in remote.files):
        notes.append(
            f"there is no {SIGNATURE_NAME} over this: the kernels are of several artifacts, or of an unsigned one; "
            "build one artifact with all targets, sign it and push that"
        )
    put(MANIFEST_NAME, data)
    stays = {*sizes, *kept} | ({SIGNATURE_NAME} if not changed else set())
    removed = sorted(path for path in _owned(remote) if path in remote.files and path not in stays)
    creates = remote.listing is None or not remote.has_branch
    return Plan(name, branch, manifest, _digest(data), creates, sizes, kept, tuple(removed), tuple(notes)), contents


def differences(old: bytes, new: bytes) -> list[str]:
    """Why the kernels of two manifests cannot be in one repo, a text each: they must be of the same model in the same
    limits, and read the same weights. Texts are compared as they were written: kernels carry digests of parts of them.
    """
    a, b = json.loads(old), json.loads(new)
    same = ("spec", "precision", "limits", "tp", "license", "source", "format_version")
    found = [f"{key}: the repo has another" for key in same if a[key] != b[key]]

    def digests(manifest: dict[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
        return [(name, manifest["entries"][name]["sha256"]) for name in names]

    if digests(a, a["tokenizer_files"]) != digests(b, b["tokenizer_files"]):
        found.append("tokenizer: the repo has other files")
    for layout in sorted(a["sections"].keys() & b["sections"].keys()):
        theirs, ours = (digests(m, [w["path"] for w in m["weights"] if w["layout"] == layout]) for m in (a, b))
        if ours != theirs or a["sections"][layout] != b["sections"][layout]:
            found.append(f"weights of the layout {layout}: the repo has others")
    return found


def merged(old: bytes, new: bytes) -> bytes:
    """The manifest of a repo that holds `old` and gets the kernels of `new`, which has the same model (differences).

    When `new` has all kernels of `old`, that is `new` itself. Else the rest (recipe, report, producer) stays that of
    `old`, and so does everything that was published.
    """
    a, b = json.loads(old), json.loads(new)
    if a["kernels"].keys() <= b["kernels"].keys():
        return new
    weights = [w for w in b["weights"] if w["layout"] not in a["sections"]]
    gone = {kernel["path"] for target, kernel in a["kernels"].items() if target in b["kernels"]}
    fresh = {kernel["path"] for kernel in b["kernels"].values()} | {w["path"] for w in weights}
    entries = {name: entry for name, entry in a["entries"].items() if name not in gone}
    a |= {
        "minimum_runtime": max(a["minimum_runtime"], b["minimum_runtime"], key=_release),
        "kernels": a["kernels"] | b["kernels"],
        "weights": a["weights"] + weights,
        "sections": b["sections"] | a["sections"],
        "entries": entries | {name: b["entries"][name] for name in fresh},
    }
    return to_text(a)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def _benches(remote: Remote, manifest: Manifest, given: Sequence[Bench]) -> dict[str, Bench]:
    """Speeds by target: those given now, and those in the repo of kernels that stay the same."""

    def digest(m: Manifest, target: str) -> str | None:
        return m.entries[m.kernels[target].path].sha256 if target in m.kernels else None

    old = remote.manifest
    stay = {t: b for t, b in remote.benches.items() if old and digest(old, t) == digest(manifest, t) is not None}
    return dict(sorted((stay | {b.target: b for b in given}).items()))


def _owned(remote: Remote) -> set[str]:
    """Files of the repo that earlier pushes put there; others are the publisher's own."""
    if remote.manifest is None:
        return {SIGNATURE_NAME}
    entries = {file.path for file in files(remote.manifest, remote.manifest.entries)}
    return entries | {SIGNATURE_NAME} | {f"{BENCH}/{target}.json" for target in remote.benches}


def _is_there(artifact: Artifact | None, manifest: Manifest, remote: Remote, file: RepoFile) -> bool:
    """Whether the repo has this very file. artifact: one that has it too, so that its bytes can be compared."""
    found, entry = remote.files.get(file.path), manifest.entries[file.entry]
    if found is None or found.size != file.size:
        return False
    if found.sha256 and file.size == entry.size:
        return found.sha256 == entry.sha256
    if artifact is None:  # the manifest that the repo has says so
        return True
    return _same(found, artifact.map(file.entry)[file.start : file.end] if file.size else memoryview(b""))


def _same(found: RemoteFile | None, data: bytes | memoryview) -> bool:
    if found is None or found.size not in (None, len(data)):
        return False
    if found.sha256:
        return found.sha256 == _digest(data)
    git = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    git.update(data)
    return found.git_id == git.hexdigest()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class Reader(io.BufferedIOBase):
    """A file to read from over memory, which is not copied: the client reads it in blocks, some of them again.

    All content goes as one, small files too: of bytes alone the client would make an upload by Xet, which not every hub
    has. Every thread has a place of its own: of two files with the same content the client takes one for both uploads.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, threading.local()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return getattr(self._place, "at", 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: len(self._data)}[whence]
        self._place.at = max(0, start + offset)
        return self.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        at = self.tell()
        piece = bytes(self._data[at:] if size is None or size < 0 else self._data[at : at + size])
        self._place.at = at + len(piece)
        return piece
