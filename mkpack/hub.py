"""Download of a source repo from a Hugging Face hub, pinned to one commit.

Only calls of huggingface_hub that have been stable for years are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from mkpack.checkpoint import INDEX, SINGLE, index_shards, is_aux
from mkpack.errors import UserError, combine
from mkpack.hub_client import (
    COMMIT,
    check_disk,
    client_errors,
    keep_ref,
    list_repo,
    quiet,
    ref_path,
    repo_folder,
    wrong_sizes,
)
from mkpack.quant_config import HF_QUANT_CONFIG

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    with client_errors(f"source {repo}", revision), quiet(not progress):
        return _online(repo, revision, cache, weights)


def _online(repo: str, revision: str, cache: Path, weights: bool) -> SourceSnapshot:
    from huggingface_hub import hf_hub_download, snapshot_download

    found = list_repo(f"source {repo}", repo, revision)
    commit, listed = found.commit, found.files

    def get(name: str, *, again: bool = False) -> Path:
        return Path(hf_hub_download(repo, name, revision=commit, cache_dir=cache, force_download=again))

    names = {"config.json", *(n for n in listed if n in ("README.md", HF_QUANT_CONFIG) or is_aux(n))}
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

    storage = cache / repo_folder(repo)
    folder = storage / "snapshots" / commit
    sizes = {name: listed[name].size for name in sorted(names)}
    check_disk(f"source {repo}", storage, folder, {name: listed[name] for name in sizes})
    snapshot_download(repo, revision=commit, cache_dir=cache, allow_patterns=[escape(name) for name in sizes])

    # A file that was cut short once stays in the cache for good: the client only looks whether it is there.
    for name in wrong_sizes(folder, sizes):
        get(name, again=True)
    if wrong := wrong_sizes(folder, sizes):
        raise combine(f"source {repo} at {commit} did not arrive whole, try again", wrong.values())
    keep_ref(storage, revision, commit)
    return SourceSnapshot(folder, repo, commit, _known_digests(folder, sizes))


def _cached(repo: str, revision: str, cache: Path, weights: bool) -> SourceSnapshot:
    """The snapshot a former download left, found without the network."""
    storage = cache / repo_folder(repo)
    title = f"source {repo}: HF_HUB_OFFLINE is set and"
    commit = revision
    if not COMMIT.fullmatch(revision):
        ref = ref_path(storage, revision)
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


def _known_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hub's SHA-256 of large files: the cache names their blobs by it, and links to them."""
    links = {name: os.path.basename(os.readlink(folder / name)) for name in names if (folder / name).is_symlink()}
    return {name: blob for name, blob in links.items() if _SHA256.fullmatch(blob)}
