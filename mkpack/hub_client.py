"""What every use of a Hugging Face hub shares: errors in mkpack's words, progress bars, the cache's layout.

huggingface_hub reads its environment variables (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE) when it is imported, which
happens inside the functions here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkpack.errors import UserError


class Unreachable(UserError):
    """No hub answered, or only with a fault of its own: what is cached may be used instead."""


COMMIT = re.compile(r"[0-9a-f]{40}")
# model_info has no limit of its own; a hub that takes longer than this to list a repo is not coming back.
LIST_TIMEOUT = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """A file as a hub lists it. git_id: its id in git; sha256: of one in large file storage, else None."""

    size: int | None
    git_id: str | None
    sha256: str | None

    @property
    def blob(self) -> str | None:
        """Its ETag, which is the name of its content in the cache."""
        return self.sha256 or self.git_id


@dataclass(frozen=True)
class Listing:
    """A repo at one commit (40 hex): its files by name, and whether only some may see it."""

    commit: str
    files: dict[str, RemoteFile]
    private: bool


def list_repo(title: str, repo: str, revision: str) -> Listing:
    """The commit that a branch, tag or commit names, and its files.

    Raises UserError when what answers is no hub, and the client's errors (see client_errors) otherwise.
    """
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=LIST_TIMEOUT)
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise UserError(
            f"{title}: {constants.ENDPOINT} does not answer like a Hugging Face hub; check HF_ENDPOINT"
        ) from e
    commit = info.sha or ""
    if not COMMIT.fullmatch(commit):
        raise UserError(f"{title}: the hub did not name a commit for revision {revision}, found {commit!r}")
    files = {f.rfilename: RemoteFile(f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in info.siblings or []}
    return Listing(commit, files, bool(info.private))


def check_disk(title: str, storage: Path, folder: Path, files: Mapping[str, RemoteFile]) -> None:
    """Refuse before the download when what the cache does not hold yet is larger than the free space.

    storage: the repo's folder in the cache; folder: the snapshot in it.
    """
    needed = 0
    for name, listed in files.items():
        size = listed.size or 0
        blob = storage / "blobs" / (listed.blob or name)
        if not any(path.is_file() and path.stat().st_size == size for path in (folder / name, blob)):
            needed += size
    place = storage
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{title}: the download needs {needed:,} bytes, but the disk of {place} has {free:,} bytes free; "
            "free some space, or set HF_HOME to a folder on a larger disk"
        )


def wrong_sizes(folder: Path, sizes: Mapping[str, int | None]) -> dict[str, str]:
    """What is wrong, by name, with the files that are absent or have another size than listed."""
    wrong = {}
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None or (size is not None and found != size):
            have = "no file" if found is None else f"{found} bytes"
            wrong[name] = f"{name}: expected {size} bytes, found {have}"
    return wrong


def ref_path(storage: Path, revision: str) -> Path | None:
    """The cache's file for a branch or tag, None for a name that would lie outside the cache."""
    refs = Path(os.path.normpath(storage / "refs"))
    path = Path(os.path.normpath(refs / revision))
    return path if path.is_relative_to(refs) and path != refs else None


def keep_ref(storage: Path, revision: str, commit: str) -> None:
    """Note the commit of a branch for offline use, as the client does when it is not asked for a commit."""
    ref = ref_path(storage, revision)
    if ref is None or COMMIT.fullmatch(revision):
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    part = ref.with_name(f"{ref.name}.{os.getpid()}.part")
    part.write_text(commit, encoding="ascii")
    part.replace(ref)


def repo_folder(repo: str) -> str:
    """Folder of a repo in the cache, by the cache's documented layout."""
    return "models--" + repo.replace("/", "--")


@contextmanager
def quiet(silent: bool) -> Iterator[None]:
    from huggingface_hub import utils

    if not silent or utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.enable_progress_bars()  # type: ignore[attr-defined]


@contextmanager
def client_errors(title: str, revision: str, doing: str = "download") -> Iterator[None]:
    """Turn what the client raises into one UserError of one line; anything else passes as it is."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    # The client's HTTP library differs between versions (httpx, httpx2); its base error is the parent of the hub's.
    network: Any = next(c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, network) as error:
        text, kind = _explain(error, revision, constants.ENDPOINT, doing)
        raise kind(f"{title}: {text}") from error


def _explain(error: BaseException, revision: str, endpoint: str, doing: str) -> tuple[str, type[UserError]]:
    from huggingface_hub import errors, get_token

    chain = list(_causes(error))

    def first(*types: type[BaseException]) -> Any:
        return next((e for e in chain if isinstance(e, types)), None)

    token = (
        "the token in use (HF_TOKEN or hf auth login) does not give access"
        if get_token()
        else "set HF_TOKEN, none is set"
    )
    if first(errors.GatedRepoError):
        return f"the repo is gated: accept its conditions at {endpoint} with your account; {token}", UserError
    if first(errors.RepositoryNotFoundError):
        return f"no such repo at {endpoint}, or it is private: check the name; {token}", UserError
    if first(errors.RevisionNotFoundError):
        return f"the repo has no revision {revision!r}: expected a branch, a tag or a commit", UserError
    if first(errors.HFValidationError):
        return f"not a repo name, expected OWNER/NAME: {_line(error)}", UserError
    http = first(errors.HfHubHTTPError)
    if http is not None:
        return _explain_status(http, endpoint, token)
    kinds = {c.__name__ for e in chain for c in type(e).__mro__}
    offline = "; HF_HUB_OFFLINE=1 uses what is cached"
    if "TimeoutException" in kinds:
        return f"{endpoint} did not answer in time{offline}", Unreachable
    if kinds & {"ReadError", "WriteError", "CloseError", "RemoteProtocolError"}:
        return (
            f"the connection to {endpoint} was cut ({_line(chain[-1])}): run again, complete files are kept",
            UserError,
        )
    if "TransportError" in kinds:
        return (
            f"{endpoint} cannot be reached ({_line(chain[-1])}): check the network and HF_ENDPOINT{offline}",
            Unreachable,
        )
    full = first(OSError)
    if full is not None and full.filename is not None:
        return f"{full.filename}: {full.strerror}", UserError
    return f"the {doing} failed, run again to continue: {_line(error)}", UserError


def _explain_status(http: Any, endpoint: str, token: str) -> tuple[str, type[UserError]]:
    status, url = http.response.status_code, http.response.url
    if status == 401:
        return f"{endpoint} refused the credentials (401): {token}", UserError
    if status == 403:
        return f"{endpoint} forbids access (403): {token}", UserError
    if status == 404:
        return f"{url} was not found (404)", UserError
    if status in (409, 412):
        return "the branch was changed by somebody else meanwhile: run again", UserError
    if status == 429:
        wait = http.response.headers.get("Retry-After")
        return (
            f"{endpoint} limits the rate (429): wait {f'{wait} seconds' if wait else 'some minutes'}, then run again",
            UserError,
        )
    if status >= 500:
        return f"{endpoint} has a fault of its own ({status}): run again later, complete files are kept", Unreachable
    return f"{endpoint} answered {status} for {url}: {_line(http)}", UserError


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        current = current.__cause__ or current.__context__
    return iter(seen)


def _line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
