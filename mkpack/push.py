"""Publishes an artifact as a repo of the hub, laid out for partial download (repo.py): plan first, then one commit.

The content of large files goes into the hub's storage first, where nobody sees it; the files, the manifest among them,
appear together with the commit that names them. So whatever interrupts a push leaves the repo as it was, or complete,
and the next push finds the content that had arrived and sends only the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkpack import card
from mkpack.artifact import Artifact, open_artifact
from mkpack.errors import UserError, combine
from mkpack.hub_client import COMMIT, client_errors, list_repo, quiet
from mkpack.manifest import MANIFEST_NAME, capped
from mkpack.progress_bar import progress_bar
from mkpack.pull import pull_manifest
from mkpack.push_plan import Plan, Remote, make_plan
from mkpack.repo import BENCH, CARD, DEFAULT_REVISION, clashes, parse


@dataclass(frozen=True)
class Pushed:
    """A push and the commit that it ended in: a new one, or that of the branch when there was nothing to do."""

    plan: Plan
    commit: str

    def render(self) -> str:
        lines = [f"note      {note}" for note in self.plan.notes]
        if self.plan.is_done:
            return "\n".join([f"{self.plan.repo}@{self.commit} is up to date", *lines])
        sent = f"{len(self.plan.uploads)} files, {sum(self.plan.uploads.values()):,} bytes"
        return "\n".join([f"{self.plan.repo}@{self.commit}: {sent}", *lines, f"run it:   mkpack run {self.plan.repo}"])

    def to_json(self) -> str:
        return json.dumps({"commit": self.commit, **json.loads(self.plan.to_json())}, indent=2)


def plan(
    path: Path, repo: str, *, private: bool = False, revision: str | None = None, replace: bool = False,
    bench: Sequence[Path] = (),
) -> Plan:  # fmt: skip
    """What push() would do; changes nothing. UserError as there, but for damage in the artifact's bytes."""
    with _opened(path, repo, revision) as (artifact, name, branch), _client(name, branch, progress=False):
        return make_plan(artifact, name, branch, _read_remote(name, branch, replace), private, replace, bench)[0]


def push(
    path: Path, repo: str, *, private: bool = False, revision: str | None = None, replace: bool = False,
    bench: Sequence[Path] = (), progress: bool | None = None,
) -> Pushed:  # fmt: skip
    """Makes `repo` hold the artifact at `path`, and returns the commit.

    The repo is created when there is none (seen only by its owner with `private`), and so is the branch `revision`.
    When it already holds the same model, kernels that it has and the artifact lacks stay, and only what is new is sent.
    With `replace` this artifact takes the place of whatever artifact it holds. bench: results of `mkpack bench --json`,
    shown in the model card beside their bound. progress: bars on standard error; by default when that is a terminal.

    UserError: the artifact is damaged, the repo holds something else, whatever a hub or a network answers. What has
    arrived by then need not be sent again, and nobody sees it before all of it has.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    shown = sys.stderr.isatty() if progress is None else progress
    with _opened(path, repo, revision) as (artifact, name, branch):
        with progress_bar("checking", shown) as advance:
            if damage := artifact.verify(progress=advance, full=True):
                raise combine(f"{path} is not pushed, for it is damaged (rebuild it)", capped(damage))
        with _client(name, branch, progress=shown):
            remote = _read_remote(name, branch, replace)
            found, contents = make_plan(artifact, name, branch, remote, private, replace, bench)
            if remote.listing is None:
                HfApi().create_repo(name, private=private or None, exist_ok=True)
            if not remote.has_branch and branch != DEFAULT_REVISION:
                HfApi().create_branch(name, branch=branch, exist_ok=True)
            head = list_repo(name, name, branch).commit
            if remote.listing is not None and head != remote.listing.commit:
                raise UserError(f"{name}: the branch {branch} was changed by somebody else meanwhile: run again")
            if found.is_done:
                return Pushed(found, head)
            content: dict[str, Any] = contents
            operations: list[Any] = [CommitOperationAdd(file, content[file]) for file in found.uploads]
            operations += [CommitOperationDelete(file) for file in found.removed]
            done = HfApi().create_commit(
                name,
                operations,
                commit_message=f"{found.manifest.name}: {', '.join(sorted(found.manifest.kernels))}",
                commit_description=f"mkpack push; sha256 of manifest.json {found.digest}",
                revision=branch,
                parent_commit=head,
            )
            return Pushed(found, done.oid)


@contextmanager
def _opened(path: Path, repo: str, revision: str | None) -> Iterator[tuple[Artifact, str, str]]:
    """The artifact, and repo and branch by name, all of them checked without a hub."""
    from huggingface_hub import constants

    name, given = parse(repo)
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    if "@" in repo:
        raise UserError(f"{repo!r}: expected ORG/NAME; the branch to push to is --revision {given}")
    branch = revision or DEFAULT_REVISION
    if COMMIT.fullmatch(branch):
        raise UserError(f"--revision {branch}: expected a branch; a commit cannot be changed")
    with open_artifact(path) as artifact:
        problems = clashes(artifact.manifest)
        if artifact.manifest.one_rank is not None:
            problems.append(f"{artifact.manifest.holds}; a repo takes all ranks")
        if problems:
            raise combine(f"{path} cannot be a repo", capped(problems))
        yield artifact, name, branch


@contextmanager
def _client(name: str, branch: str, *, progress: bool) -> Iterator[None]:
    from huggingface_hub import utils

    # The client tells of every upload from memory that it takes the older of two protocols; that is as intended.
    before = utils.logging.get_verbosity()
    utils.logging.set_verbosity_error()
    try:
        with client_errors(name, branch, "upload"), quiet(not progress):
            yield
    finally:
        utils.logging.set_verbosity(before)


def _read_remote(name: str, branch: str, replace: bool) -> Remote:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        remote = Remote(list_repo(name, name, branch), True)
    except RevisionNotFoundError:
        remote = Remote(list_repo(name, name, DEFAULT_REVISION), False)  # where the new branch begins
    except RepositoryNotFoundError:
        return Remote(None, False)
    assert remote.listing is not None

    def content(path: str) -> bytes:
        assert remote.listing is not None
        return Path(hf_hub_download(name, path, revision=remote.listing.commit)).read_bytes()

    if MANIFEST_NAME in remote.files:
        try:
            pulled = pull_manifest(f"{name}@{remote.listing.commit}", progress=False)
            remote.manifest, remote.manifest_bytes = pulled.manifest, pulled.manifest_bytes
        except UserError as error:
            if not replace:
                raise UserError(f"{error}; --replace puts this artifact in its place") from error
    if CARD in remote.files:
        remote.readme = content(CARD).decode("utf-8", errors="replace")
    for path in remote.files:
        if path.startswith(f"{BENCH}/") and path.endswith(".json"):
            found = card.read_bench(content(path), f"{name}: {path}")
            remote.benches[found.target] = found
    return remote
