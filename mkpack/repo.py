"""An artifact as a repo of a hub: which files it has there, and which of them a run needs. docs/PUBLISHING.md tells it.

An entry is a file of the same name. One of more than PART bytes is cut into files of that size: a download or an upload
that is interrupted repeats only the files it did not finish. A part covers whole digest chunks, so each can be checked
by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mkpack.errors import UserError
from mkpack.manifest import CHUNK, MANIFEST_NAME, SIGNATURE_NAME, Entry, Manifest

PART = 64 * CHUNK  # 2 GiB; hubs advise against files above 20 GB
CARD = "README.md"
BENCH = "bench"  # folder of measured speeds, a file a target
SCHEME = "hf://"
DEFAULT_REVISION = "main"
OWN = (MANIFEST_NAME, SIGNATURE_NAME, CARD)  # files of a repo that no entry may be called

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class RepoFile:
    """The bytes [start, end) of an entry, as the file `path` of a repo."""

    path: str
    entry: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def needed(manifest: Manifest, target: str | None, ranks: Iterable[int] | None = None) -> list[str]:
    """The entries that running the kernel of `target` takes, in the manifest's order: everything but other kernels and
    the weights of other layouts; with `ranks` also without the blobs of other ranks.
    """
    spared = {kernel.path for kernel in manifest.kernels.values()} | {w.path for w in manifest.weights}
    if target is None:
        return [name for name in manifest.entries if name not in spared]
    kernel = manifest.kernels[target]
    wanted = None if ranks is None else set(ranks)
    kept = {kernel.path, *(w.path for w in manifest.weights_in(kernel.layout) if wanted is None or w.rank in wanted)}
    return [name for name in manifest.entries if name not in spared - kept]


def files(manifest: Manifest, entries: Iterable[str]) -> list[RepoFile]:
    """The repo's files of these entries."""
    return [file for name in entries for file in _parts(name, manifest.entries[name].size)]


def _parts(name: str, size: int) -> list[RepoFile]:
    if size <= PART:
        return [RepoFile(name, name, 0, size)]
    count, path = -(-size // PART), PurePosixPath(name)
    return [
        RepoFile(
            str(path.with_name(f"{path.stem}-{i + 1:05d}-of-{count:05d}{path.suffix}")),
            name,
            i * PART,
            min(size, (i + 1) * PART),
        )
        for i in range(count)
    ]


def digests(manifest: Manifest, file: RepoFile) -> Entry:
    """What the bytes of one file must digest to, as an Entry. `sha256` of a part with chunks is not known: zeros."""
    whole = manifest.entries[file.entry]
    if file.size == whole.size:
        return whole
    chunks = whole.chunks[file.start // CHUNK : -(-file.end // CHUNK)]
    if len(chunks) == 1:
        return Entry(size=file.size, sha256=chunks[0])
    return Entry(size=file.size, sha256="0" * 64, chunks=chunks)


def clashes(manifest: Manifest) -> list[str]:
    """Why the entries cannot be files of a repo, a text each: a name that two of them, or the repo itself, needs."""
    found: dict[str, list[str]] = {}
    for file in files(manifest, manifest.entries):
        found.setdefault(file.path.lower(), []).append(file.entry)
    taken = [f"{names[0]} and {names[1]} would be the same file" for names in found.values() if len(names) > 1]
    own = {name.lower() for name in OWN}
    return taken + [f"{names[0]}: a repo has a file of its own of that name" for p, names in found.items() if p in own]


def parse(reference: str) -> tuple[str, str]:
    """(repo, revision) of "hf://org/name@revision", with or without the scheme. UserError when it is no such thing."""
    repo, at, revision = reference.removeprefix(SCHEME).partition("@")
    if not _REPO.fullmatch(repo) or (at and not revision) or not revision.isprintable() or " " in revision:
        raise UserError(f"{reference!r}: expected ORG/NAME or ORG/NAME@REVISION of a repo on the hub")
    return repo, revision or DEFAULT_REVISION


def located(text: str) -> Path | str:
    """A command's ARTIFACT: a path; or hf://ORG/NAME of a repo, which looks like ORG/NAME and is no path, nor could be
    one that was mistyped (it ends in .mkpack, or a folder ORG lies here)."""
    repo = text.removeprefix(SCHEME).partition("@")[0]
    if not text.startswith(SCHEME) and (
        os.path.lexists(text) or not _REPO.fullmatch(repo) or repo.endswith(".mkpack") or Path(repo).parent.is_dir()
    ):
        return Path(text)
    parse(text)
    return text if text.startswith(SCHEME) else SCHEME + text


def ranks_problem(manifest: Manifest, ranks: Sequence[int]) -> str | None:
    """Why these are not ranks of the artifact, or None."""
    wrong = [r for r in ranks if not 0 <= r < manifest.tp]
    if wrong:
        return f"rank {wrong[0]}: expected 0 to {manifest.tp - 1}, the ranks it has"
    absent = [r for r in ranks if manifest.one_rank not in (None, r)]
    return f"rank {absent[0]}: {manifest.holds}" if absent else None
