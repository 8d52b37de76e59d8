"""What `mkpack verify` checks on demand, beside digests: who signed an artifact, and whether it can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mkpack import sign, trust
from mkpack.artifact import open_artifact
from mkpack.errors import UserError


def signature(
    path: Path,
    *,
    key: Path | None = None,
    certificate: Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
) -> str:
    """A line that says who signed the artifact: one of those given, or else of the trust list. UserError when none did.

    Says nothing about the bytes of the entries; describe.check does.
    """
    with open_artifact(path) as artifact:
        found = sign.find(artifact.path)
        if found is None:
            raise UserError(
                f"{path} is not signed: there is no {sign.signature_path(path)}; whoever made it can sign "
                "it (mkpack sign)"
            )
        signer = trust.check_signature(
            artifact.manifest,
            artifact.digest,
            found,
            key=key,
            certificate=certificate,
            identity=identity,
            issuer=issuer,
        )
    return f"signed   by {signer}"


def kernels(path: Path) -> Iterator[tuple[bool, str]]:
    """(differs?, line) of every kernel, compiled again from the manifest and the installed sources."""
    from mkpack import rebuild

    with open_artifact(path) as artifact:
        manifest = artifact.manifest
    for made in rebuild.rebuild(str(path), manifest, sorted(manifest.kernels)):
        yield not made.same, f"{'same   ' if made.same else 'differs'}  {made.render()}"


def again(path: Path, recipe: Path | None) -> Iterator[tuple[bool, str]]:
    """reproduce.reproduce() with its progress on standard error."""
    from rich.console import Console

    from mkpack.reproduce import reproduce

    yield from reproduce(path, recipe=recipe, console=Console(stderr=True))
