"""`mkpack verify --rebuild`: an artifact built again from its recipe and source, and held against the first one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkpack.artifact import Artifact, open_artifact
from mkpack.build import build
from mkpack.errors import UserError, os_errors
from mkpack.manifest import Manifest, shown

if TYPE_CHECKING:
    from rich.console import Console


def reproduce(path: Path, *, recipe: Path | None = None, console: Console | None = None) -> Iterator[tuple[bool, str]]:
    """Builds again what `path` holds and gives (differs?, line to print) for every entry and every other fact.

    recipe: the file it was built from, where it was; the artifact's own copy is enough when its source is on the Hub,
    which is then read at the commit of the first build. Needs all that a build needs, and disk for a second artifact
    beside the first; nothing of either is run but kernels compiled here, when quality is measured. UserError when the
    build is refused.
    """
    with open_artifact(path) as first, _work_folder(path) as folder:
        if recipe is None:
            recipe = folder / "recipe.yaml"
            recipe.write_bytes(first.read("recipe.yaml"))
            if first.manifest.source.kind != "hub":
                raise UserError(
                    f"{path}: its source is files of the machine it was built on; name the recipe beside them with "
                    "--recipe"
                )
        made = build(recipe, output=folder / "again.mkpack", like=first.manifest, console=console)
        with open_artifact(made) as second:
            yield from compare(first, second)


def compare(first: Artifact, second: Artifact) -> Iterator[tuple[bool, str]]:
    """(differs?, line) of every entry, then of every fact in which the manifests differ."""
    a, b = first.manifest.entries, second.manifest.entries
    for name in sorted({*a, *b}):
        if name not in b:
            yield True, f"differs  {name}: not made again"
        elif name not in a:
            yield True, f"differs  {name}: not in the artifact"
        elif a[name].sha256 != b[name].sha256:
            yield (
                True,
                f"differs  {name}: {a[name].size} bytes, sha256 {a[name].sha256}; made again: {b[name].size} bytes, "
                f"sha256 {b[name].sha256}",
            )
        else:
            yield False, f"same     {name}"
    facts = list(_facts(first.manifest, second.manifest))
    yield from ((True, f"differs  manifest.json: {fact}") for fact in facts)
    if not facts and first.digest == second.digest:
        yield False, "same     manifest.json"


def _facts(first: Manifest, second: Manifest) -> Iterator[str]:
    exclude = {"entries"}
    a, b = first.model_dump(mode="json", exclude=exclude), second.model_dump(mode="json", exclude=exclude)
    for key in sorted(a):
        yield from _differences(key, a[key], b[key])


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from _differences(f"{where}.{shown(key)}", a.get(key), b.get(key))
    elif a != b:
        yield f"{where}: {shown(a)}; made again: {shown(b)}"


@contextlib.contextmanager
def _work_folder(path: Path) -> Iterator[Path]:
    """Beside the artifact, for the disk, and named so that a build there removes it if this process is killed."""
    folder = path.absolute().with_name(f".{path.name}.{os.getpid()}.work")
    with os_errors(f"build beside {path}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
