"""Brings what a run needs of a published artifact into the hub cache: `hf://org/name@revision` -> verified files.

The revision is resolved to a commit first, and everything is read at that commit. The manifest comes before all else:
what does not fit this machine, or is missing in the repo, is told before a weight is downloaded. Every byte is held
against the manifest's digests, also that of files an earlier pull left in the cache; what differs is fetched again.
Nothing here loads native code.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from mkpack.artifact import MAX_MANIFEST, Artifact
from mkpack.compat import choose_target
from mkpack.digest import Verification
from mkpack.errors import UserError, combine, nearest, os_errors
from mkpack.hub_client import (
    COMMIT,
    Listing,
    RemoteFile,
    Unreachable,
    check_disk,
    client_errors,
    keep_ref,
    list_repo,
    quiet,
    ref_path,
    repo_folder,
    wrong_sizes,
)
from mkpack.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest, capped
from mkpack.progress_bar import progress_bar
from mkpack.repo import RepoFile, digests, files, needed, parse, ranks_problem
from mkpack.sign import MAX_SIGNATURE
from mkpack.snapshot import Mapping, SnapshotStore

_AGAIN = 1  # a file that is wrong after being fetched again so often is wrong in the repo


@dataclass(frozen=True)
class Pulled:
    """What was pulled: `folder` of the cache holds `files` of `repo` at the 40-hex `commit`, verified.

    target: the kernel among them; None when only the manifest was asked for.
    """

    repo: str
    commit: str
    folder: Path
    manifest: Manifest
    manifest_bytes: bytes
    target: str | None
    files: tuple[RepoFile, ...]

    def render(self) -> str:
        size = sum(file.size for file in self.files)
        return f"{self.repo}@{self.commit}: {self.target}, {len(self.files)} files, {size:,} bytes in {self.folder}"

    def to_json(self) -> str:
        document = {"repo": self.repo, "commit": self.commit, "target": self.target, "folder": str(self.folder)}
        return json.dumps(document | {"files": {file.path: file.size for file in self.files}}, indent=2)

    def open(self) -> Artifact:
        """The artifact, of which it has only the entries that were pulled."""
        store = SnapshotStore(self.folder, self.files)
        return Artifact(self.folder, self.manifest, self.manifest_bytes, store)


def pull(
    reference: str,
    *,
    target: str | None = None,
    check: bool = True,
    ranks: Sequence[int] | None = None,
    verify: bool = True,
    progress: bool | None = None,
    before: Callable[[Pulled], object] | None = None,
) -> Pulled:
    """Downloads what running `org/name@revision` takes: the manifest, one kernel, its weights, the small files.

    target: the kernel, as load() takes it; by default the best for this machine. Without `check` it is pulled whether
    it runs here or not, and has to be named in full. ranks: only their weights, for a machine that runs these alone.
    verify: check files that are already in the cache too, not only what is downloaded. progress: bars on standard
    error; by default when that is a terminal. before: called when only manifest and signature are here; what it raises
    ends the pull.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are heeded. When no hub answers, a complete copy in the cache will
    do, and a line on standard error says so. UserError: everything that does not fit, in one message; whatever a hub,
    a network or a disk can answer. What was complete by then stays in the cache, so the same call goes on from there.
    """
    with _source(reference, progress) as source:
        manifest, data = source.manifest()
        chosen, problems = _chosen(manifest, target, check)
        if ranks is not None and (problem := ranks_problem(manifest, ranks)):
            problems.append(problem)
        wanted = files(manifest, needed(manifest, chosen, ranks))
        problems += source.missing(manifest, wanted)
        if problems or chosen is None:
            raise combine(f"cannot run {source.name} here", capped(problems))
        source.fetch_signature()
        pulled = Pulled(source.repo, source.commit, source.folder, manifest, data, chosen, tuple(wanted))
        if before:
            before(pulled)
        source.fetch(manifest, wanted, verify)
        return pulled


def pull_manifest(reference: str, *, progress: bool | None = None) -> Pulled:
    """Only the manifest of a published artifact. Raises what pull() does."""
    with _source(reference, progress) as source:
        return Pulled(source.repo, source.commit, source.folder, *source.manifest(), None, ())


def _chosen(manifest: Manifest, target: str | None, check: bool) -> tuple[str | None, list[str]]:
    if check:
        return choose_target(manifest, target)
    if target in manifest.kernels:
        return target, []
    has = ", ".join(sorted(manifest.kernels)) or "none"
    return None, [f"target {target}: the repo has {has}{nearest(target or '', manifest.kernels)}"]


@contextmanager
def _source(reference: str, progress: bool | None) -> Iterator[_Source]:
    repo, revision = parse(reference)
    shown = sys.stderr.isatty() if progress is None else progress
    with client_errors(f"{repo}@{revision}", revision), quiet(not shown):
        yield _Source(repo, revision, shown)


class _Source:
    """A repo at one commit, its snapshot in the cache, and the hub's list of its files once that was asked for."""

    def __init__(self, repo: str, revision: str, progress: bool) -> None:
        from huggingface_hub import constants

        self.repo, self._revision, self._progress = repo, revision, progress
        self._offline = bool(constants.HF_HUB_OFFLINE)
        self._cache = Path(constants.HF_HUB_CACHE).expanduser()
        self._storage = self._cache / repo_folder(repo)
        self._listing: Listing | None = None
        self.commit = self._resolve()
        self.folder = self._storage / "snapshots" / self.commit

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.commit[:12]}"

    def _resolve(self) -> str:
        if COMMIT.fullmatch(self._revision):
            return self._revision
        cached = self._cached_commit()
        if self._offline:
            if cached is None:
                raise UserError(
                    f"{self.repo}: HF_HUB_OFFLINE is set and revision {self._revision} is not cached in {self._cache}; "
                    "unset it to download, or name a cached commit"
                )
            return cached
        try:
            with client_errors(f"{self.repo}@{self._revision}", self._revision):
                self._listing = list_repo(self.repo, self.repo, self._revision)
        except Unreachable as error:
            if cached is None:
                raise
            print(f"{error}; using what is cached of commit {cached}", file=sys.stderr)
            self._offline = True
            return cached
        return self._listing.commit

    def _cached_commit(self) -> str | None:
        ref = ref_path(self._storage, self._revision)
        if ref is None or not ref.is_file():
            return None
        commit = ref.read_text(encoding="ascii", errors="replace").strip()
        return commit if COMMIT.fullmatch(commit) else None

    def _files(self) -> dict[str, RemoteFile]:
        if self._listing is None:
            self._listing = list_repo(self.name, self.repo, self.commit)
        return self._listing.files

    def _get(self, name: str, *, again: bool = False) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(self.repo, name, revision=self.commit, cache_dir=self._cache, force_download=again)

    def _online(self, why: Iterable[str]) -> None:
        """UserError with the reasons for a download, when there can be none."""
        if self._offline:
            title = f"{self.name}: not complete in the cache {self._cache}, and offline; pull it with the network first"
            raise combine(title, capped(list(why)))

    def manifest(self) -> tuple[Manifest, bytes]:
        """The manifest, and the bytes that it was read from."""
        path = self.folder / MANIFEST_NAME
        if not path.is_file():
            self._online([f"{MANIFEST_NAME} is absent"])
            listed = self._files().get(MANIFEST_NAME)
            if listed is None:
                raise UserError(
                    f"{self.name}: no {MANIFEST_NAME}, so this is no artifact of mkpack, or its upload was never "
                    "finished (mkpack push adds the manifest last)"
                )
            if (listed.size or 0) > MAX_MANIFEST:
                raise UserError(f"{self.name}: {MANIFEST_NAME} has {listed.size} bytes, at most {MAX_MANIFEST} may be")
            self._get(MANIFEST_NAME)
        if not _is_blob(path):
            self._online([f"{MANIFEST_NAME} is damaged"])
            self._get(MANIFEST_NAME, again=True)
        data = path.read_bytes()
        return Manifest.parse(data, f"{self.name}: {MANIFEST_NAME}"), data

    def missing(self, manifest: Manifest, wanted: Iterable[RepoFile]) -> list[str]:
        """What the repo lacks of the files, or has otherwise than the manifest says; only those not cached yet."""
        absent = [f for f in wanted if not _complete(self.folder, f)]
        if not absent or self._offline:
            return []
        ranks = {w.path: f" (weights of rank {w.rank})" for w in manifest.weights}
        found, listed = [], self._files()
        for file in absent:
            remote, entry = listed.get(file.path), manifest.entries[file.entry]
            whose = ranks.get(file.entry, "")
            if remote is None:
                found.append(f"{file.path}{whose}: the repo does not have it; its publisher has to push it again")
            elif remote.size not in (None, file.size):
                found.append(f"{file.path}{whose}: expected {file.size} bytes, the repo's has {remote.size}")
            elif file.size == entry.size and remote.sha256 not in (None, entry.sha256):
                found.append(f"{file.path}{whose}: expected sha256 {entry.sha256}, the repo's has {remote.sha256}")
        return found

    def fetch(self, manifest: Manifest, wanted: Sequence[RepoFile], verify: bool) -> None:
        """Every file in the cache, whole and with the right digest."""
        from huggingface_hub import snapshot_download

        sizes = {file.path: file.size for file in wanted}
        absent = [file for file in wanted if not (self.folder / file.path).exists()]
        if absent:
            self._online(f"{file.path} is absent" for file in absent)
            listed = self._files()
            check_disk(self.name, self._storage, self.folder, {f.path: listed[f.path] for f in absent})
            snapshot_download(
                self.repo,
                revision=self.commit,
                cache_dir=self._cache,
                allow_patterns=[escape(file.path) for file in absent],
            )
        # A file that was cut short once stays in the cache for good: the client only looks whether it is there.
        unchecked = list(wanted) if verify else absent
        for tries in range(_AGAIN + 1):
            short = wrong_sizes(self.folder, sizes)
            unchecked = [file for file in unchecked if file.path not in short]
            wrong = short | self._wrong_digests(manifest, unchecked)
            if not wrong:
                break
            if tries == _AGAIN:
                raise combine(
                    f"{self.name}: files of the repo are not those of its manifest; its publisher has to push it again",
                    capped(list(wrong.values())),
                )
            self._online(wrong.values())
            for path in wrong:
                self._get(path, again=True)
            unchecked = [file for file in wanted if file.path in wrong]
        keep_ref(self._storage, self._revision, self.commit)

    def _wrong_digests(self, manifest: Manifest, chosen: Sequence[RepoFile]) -> dict[str, str]:
        """What is wrong, by name, with files of the right size."""
        with os_errors(f"read the cache {self.folder}"):
            views = {f.path: Mapping(self.folder, [f]).view() if f.size else memoryview(b"") for f in chosen}
        items = {file.path: (digests(manifest, file), views[file.path]) for file in chosen}
        with progress_bar("checking", self._progress and bool(chosen)) as advance:
            problems = Verification(self.name, items, progress=advance).problems()
        return {problem.split(": ")[0]: problem for problem in problems}

    def fetch_signature(self) -> None:
        """The signature too, where there is one; who checks it is trust.py. It comes before the large files, so that a
        complete copy has it."""
        if (self.folder / SIGNATURE_NAME).exists() or self._offline or self._listing is None:
            return
        listed = self._listing.files.get(SIGNATURE_NAME)
        if listed is not None and (listed.size or 0) <= MAX_SIGNATURE:
            self._get(SIGNATURE_NAME)


def _complete(folder: Path, file: RepoFile) -> bool:
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size


def _is_blob(path: Path) -> bool:
    """Whether a file of the cache has the content that the hub gave it: it links to a blob named by its digest, a git
    id or a SHA-256. True where the file system has no links, and so no names to compare."""
    if not path.is_symlink():
        return True
    name, data = os.path.basename(os.readlink(path)), path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return name in (git, hashlib.sha256(data).hexdigest()) or not COMMIT.fullmatch(name[:40])
