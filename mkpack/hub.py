"""Download of a source repo from a Hugging Face hub, pinned to one commit.

Only calls of huggingface_hub that have been stable for years are used. It reads its environment variables (HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE) when it is imported, which happens inside the functions here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

from mkpack.checkpoint import INDEX, SINGLE, index_shards, is_aux
from mkpack.errors import UserError, combine

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# model_info has no limit of its own; a hub that takes longer than this to list a repo is not coming back.
_LIST_TIMEOUT = 60.0


@dataclass(frozen=True)
class SourceSnapshot:
    """A downloaded source: `folder` holds the files of `repo` at the 40-hex `commit`.

    sha256: digests in hex that the hub keeps of its large files, by name; `Checkpoint.digests` compares them.
    """

    folder: Path
    repo: str
    commit: str
    sha256: dict[str, str] = field(default_factory=dict)


def fetch_source(
    repo: str, revision: str, *, cache_dir: Path | None = None, progress: bool = True, weights: bool = True
) -> SourceSnapshot:
    """Bring the files a build needs of `repo` at `revision` (branch, tag or commit) into the hub cache.

    Without `weights` everything but the safetensors: enough to plan a build.
    The revision is resolved first and everything is read at that commit. A file whose size is not what the hub lists
    is fetched again once. With HF_HUB_OFFLINE set, only the cache is used. Raises UserError for everything a hub, a
    network or a full disk can answer; what was complete by then stays in the cache, so the same call continues.
    """
    from huggingface_hub import constants

    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    if constants.HF_HUB_OFFLINE:
        return _cached(repo, revision, cache, weights)
    with _client_errors(repo, revision), _quiet(not progress):
        return _online(repo, revision, cache, weights)


def _online(repo: str, revision: str, cache: Path, weights: bool) -> SourceSnapshot:
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_LIST_TIMEOUT)
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise UserError(
            f"source {repo}: {constants.ENDPOINT} does not answer like a Hugging Face hub; check HF_ENDPOINT"
        ) from e
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise UserError(f"source {repo}: the hub did not name a commit for revision {revision}, found {commit!r}")

    def get(name: str, *, again: bool = False) -> Path:
        return Path(hf_hub_download(repo, name, revision=commit, cache_dir=cache, force_download=again))

    listed = {f.rfilename: f for f in info.siblings or []}
    names = {"config.json", *(n for n in listed if n == "README.md" or is_aux(n))}
    if "config.json" not in listed:
        raise UserError(f"source {repo} at {commit}: no config.json, so this is not a checkpoint of a model")

    if weights and INDEX in listed:
        index = get(INDEX)
        if index.stat().st_size != listed[INDEX].size:
            index = get(INDEX, again=True)
        names |= {INDEX, *_shards(repo, commit, index, listed)}
    elif weights and SINGLE in listed:
        names.add(SINGLE)
    elif weights:
        raise UserError(f"source {repo} at {commit}: {_no_safetensors(listed)}")

    storage = cache / _repo_folder(repo)
    folder = storage / "snapshots" / commit
    sizes = {name: listed[name].size for name in sorted(names)}
    _check_disk(repo, storage, folder, {name: listed[name] for name in sizes})
    snapshot_download(repo, revision=commit, cache_dir=cache, allow_patterns=[escape(name) for name in sizes])

    # A file that was cut short once stays in the cache for good: the client only looks whether it is there.
    for name in _wrong_sizes(folder, sizes):
        get(name, again=True)
    if wrong := _wrong_sizes(folder, sizes):
        raise combine(f"source {repo} at {commit} did not arrive whole, try again", wrong.values())
    _keep_ref(storage, revision, commit)
    return SourceSnapshot(folder, repo, commit, _known_digests(folder, sizes))


def _cached(repo: str, revision: str, cache: Path, weights: bool) -> SourceSnapshot:
    """The snapshot a former download left, found without the network."""
    storage = cache / _repo_folder(repo)
    title = f"source {repo}: HF_HUB_OFFLINE is set and"
    commit = revision
    if not _COMMIT.fullmatch(revision):
        ref = _ref(storage, revision)
        if ref is None or not ref.is_file():
            raise UserError(
                f"{title} revision {revision} is not cached in {cache}; unset HF_HUB_OFFLINE to download it, "
                "or name a cached commit"
            )
        commit = ref.read_text(encoding="ascii", errors="replace").strip()
    folder = storage / "snapshots" / commit
    if not folder.is_dir():
        raise UserError(f"{title} commit {commit} is not cached in {cache}; unset HF_HUB_OFFLINE to download it")

    names = [f.name for f in sorted(folder.iterdir()) if f.name == "config.json" or is_aux(f.name)]
    missing = [] if "config.json" in names else ["config.json"]
    if not weights:
        needed: list[str] = []
    elif (folder / INDEX).is_file():
        weight_map, problems = index_shards((folder / INDEX).read_bytes())
        if problems:
            raise combine(f"{folder / INDEX}", problems)
        needed = sorted(set(weight_map.values()))
    else:
        needed = [SINGLE]
    missing += [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise combine(
            f"{title} the cache of commit {commit} is not complete; unset HF_HUB_OFFLINE to download the rest",
            [f"{name} is absent" for name in missing],
        )
    return SourceSnapshot(folder, repo, commit, _known_digests(folder, [*names, *needed]))


def _shards(repo: str, commit: str, index: Path, listed: Iterable[str]) -> set[str]:
    weight_map, problems = index_shards(index.read_bytes())
    shards = set(weight_map.values())
    problems += [f"it names {shard}, which the repo does not have" for shard in sorted(shards - set(listed))]
    if problems:
        raise combine(f"source {repo} at {commit}, {INDEX}", problems)
    return shards


def _no_safetensors(listed: Iterable[str]) -> str:
    text = f"no safetensors weights, expected {SINGLE} or {INDEX} at the top of the repo"
    kinds = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")
    found = sorted(name for name in listed if any(fnmatchcase(name, kind) for kind in kinds))
    return text + (f", found {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}" if found else "")


def _check_disk(repo: str, storage: Path, folder: Path, files: dict[str, Any]) -> None:
    """Refuse before the download when what the cache does not hold yet is larger than the free space."""
    needed = 0
    for name, listed in files.items():
        size = listed.size or 0
        blob = storage / "blobs" / (listed.lfs.sha256 if listed.lfs else listed.blob_id or name)
        if not any(path.is_file() and path.stat().st_size == size for path in (folder / name, blob)):
            needed += size
    place = storage
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"source {repo}: the download needs {needed:,} bytes, but the disk of {place} has {free:,} bytes free; "
            "free some space, or set HF_HOME to a folder on a larger disk"
        )


def _wrong_sizes(folder: Path, sizes: dict[str, int | None]) -> dict[str, str]:
    wrong = {}
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None or (size is not None and found != size):
            have = "no file" if found is None else f"{found} bytes"
            wrong[name] = f"{name}: expected {size} bytes, found {have}"
    return wrong


def _known_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hub's SHA-256 of large files: the cache names their blobs by it, and links to them."""
    links = {name: os.path.basename(os.readlink(folder / name)) for name in names if (folder / name).is_symlink()}
    return {name: blob for name, blob in links.items() if _SHA256.fullmatch(blob)}


def _ref(storage: Path, revision: str) -> Path | None:
    """The cache's file for a branch or tag, None for a name that would lie outside the cache."""
    refs = Path(os.path.normpath(storage / "refs"))
    path = Path(os.path.normpath(refs / revision))
    return path if path.is_relative_to(refs) and path != refs else None


def _keep_ref(storage: Path, revision: str, commit: str) -> None:
    """Note the commit of a branch for offline use, as the client does when it is not asked for a commit."""
    ref = _ref(storage, revision)
    if ref is None or _COMMIT.fullmatch(revision):
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    part = ref.with_name(f"{ref.name}.{os.getpid()}.part")
    part.write_text(commit, encoding="ascii")
    part.replace(ref)


def _repo_folder(repo: str) -> str:
    """Folder of a repo in the cache, by the cache's documented layout."""
    return "models--" + repo.replace("/", "--")


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    from huggingface_hub import utils

    if not quiet or utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.enable_progress_bars()  # type: ignore[attr-defined]


@contextmanager
def _client_errors(repo: str, revision: str) -> Iterator[None]:
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
        raise UserError(f"source {repo}: {_explain(error, revision, constants.ENDPOINT)}") from error


def _explain(error: BaseException, revision: str, endpoint: str) -> str:
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
        return f"the repo is gated: accept its conditions at {endpoint} with your account; {token}"
    if first(errors.RepositoryNotFoundError):
        return f"no such repo at {endpoint}, or it is private: check the name; {token}"
    if first(errors.RevisionNotFoundError):
        return f"the repo has no revision {revision!r}: expected a branch, a tag or a commit"
    if first(errors.HFValidationError):
        return f"not a repo name, expected OWNER/NAME: {_line(error)}"
    http = first(errors.HfHubHTTPError)
    if http is not None:
        return _explain_status(http, endpoint, token)
    kinds = {c.__name__ for e in chain for c in type(e).__mro__}
    offline = "; HF_HUB_OFFLINE=1 uses what is cached"
    if "TimeoutException" in kinds:
        return f"{endpoint} did not answer in time{offline}"
    if kinds & {"ReadError", "WriteError", "CloseError", "RemoteProtocolError"}:
        return f"the connection to {endpoint} was cut ({_line(chain[-1])}): run again, complete files are kept"
    if "TransportError" in kinds:
        return f"{endpoint} cannot be reached ({_line(chain[-1])}): check the network and HF_ENDPOINT{offline}"
    full = first(OSError)
    if full is not None and full.filename is not None:
        return f"{full.filename}: {full.strerror}"
    return f"the download failed, run again to continue: {_line(error)}"


def _explain_status(http: Any, endpoint: str, token: str) -> str:
    status, url = http.response.status_code, http.response.url
    if status == 401:
        return f"{endpoint} refused the credentials (401): {token}"
    if status == 403:
        return f"{endpoint} forbids access (403): {token}"
    if status == 404:
        return f"{url} was not found (404)"
    if status == 429:
        wait = http.response.headers.get("Retry-After")
        return f"{endpoint} limits the rate (429): wait {f'{wait} seconds' if wait else 'some minutes'}, then run again"
    if status >= 500:
        return f"{endpoint} has a fault of its own ({status}): run again later, complete files are kept"
    return f"{endpoint} answered {status} for {url}: {_line(http)}"


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
