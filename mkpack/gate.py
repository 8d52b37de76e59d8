"""The kernel of an artifact on its way into this process: may it, does it fit its manifest, or is one made here."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from mkpack import sign, trust
from mkpack.artifact import Artifact
from mkpack.digest import digest_of
from mkpack.errors import UserError
from mkpack.native import Library

if TYPE_CHECKING:
    from mkpack.rebuild import Rebuilt


def admit(artifact: Artifact, target: str, trust_kernel: str | None, rebuild_kernel: bool) -> Rebuilt | None:
    """None when the artifact's kernel of `target` may be loaded, else the one made here. Loads nothing.

    UserError: it is not trusted and may not be rebuilt, cannot be, or contradicts its manifest.
    """
    _check_description(artifact, target)
    if rebuild_kernel:
        return _rebuild(artifact, target)
    require(artifact, target, trust_kernel)
    return None


def require(artifact: Artifact, target: str, trust_kernel: str | None) -> None:
    """trust.require() for an artifact with the signature that lies beside it."""
    trust.require(
        str(artifact.path),
        artifact.manifest,
        artifact.digest,
        target,
        signature=sign.find(artifact.path),
        allow=trust_kernel,
    )


def open_library(artifact: Artifact, target: str, code: bytes) -> Library:
    """Loads a kernel that was admitted, from its verified bytes. UserError when it is not that of the manifest."""
    kernel = artifact.manifest.kernels[target]
    library = Library(code, f"{artifact.path}: {kernel.path}")
    if (found := library.describe()) != kernel.description:
        library.close()
        raise UserError(
            f"{artifact.path}: the kernel {kernel.path} is not the one of the manifest: "
            f"{_difference(kernel.description, found)}; build it again"
        )
    return library


def _rebuild(artifact: Artifact, target: str) -> Rebuilt:
    from mkpack import rebuild  # a compiler's side, which other loads do without

    (made,) = rebuild.rebuild(str(artifact.path), artifact.manifest, [target], cached=True)
    if made.same:
        with contextlib.suppress(UserError):  # a list that cannot be written only means compiling again
            trust.remember([made.sha256], "rebuilt", artifact.manifest.name)
    return made


def _check_description(artifact: Artifact, target: str) -> None:
    """UserError when the manifest gives sizes, or a carried format, that are not those its kernel was compiled for:
    memory is reserved by the manifest's, and a kernel that deserves trust may come with a manifest that does not."""
    manifest = artifact.manifest
    kernel, limits = manifest.kernels[target], manifest.limits
    facts = json.loads(kernel.description)
    if not isinstance(facts, dict) or "spec" not in facts:
        return
    spec = manifest.spec.model_dump(mode="json", exclude_unset=True)  # what its builder wrote, no later field
    known: dict[str, Any] = {"tp": manifest.tp, "context": limits.context, "tokens_per_step": limits.tokens_per_step}
    known["spec"] = digest_of(spec)
    known["down_input"] = manifest.precision.get("down_input")
    if wrong := [key for key, value in known.items() if facts.get(key) != value]:
        raise UserError(
            f"{artifact.path}: manifest.json contradicts the description of its kernel {kernel.path}: "
            f"{', '.join(wrong)}; build it again"
        )


def _difference(expected: str, found: str) -> str:
    """The keys in which two JSON descriptions differ, else that the texts do."""
    with contextlib.suppress(ValueError):
        a, b = json.loads(expected), json.loads(found)
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)][:5]
            if keys:
                return ", ".join(f"{k} expected {str(a.get(k))[:80]}, found {str(b.get(k))[:80]}" for k in keys)
    return f"expected the description {expected[:80]!r}, found {found[:80]!r}"
