"""The commands about whom to trust: `mkpack trust ...` and `mkpack sign`, and what `mkpack verify` can check beside
digests. Like cli.py they hold no logic and import what they need when they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from mkpack.errors import UserError

trust = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Whose artifacts and which kernels run on this account."
)

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="NAME.mkpack, or the folder it was unpacked to.")]
Issuer = Annotated[
    str | None, typer.Option(metavar="URL", help="Who vouches for a sigstore identity, for instance https://...")
]


@trust.command()
def add(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|SHA256|IDENTITY",
            help="A PEM file with a public key or a certificate; a kernel's SHA-256; or, with --issuer, an identity.",
        ),
    ],
    issuer: Issuer = None,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What to call it. [default: the file's name]")
    ] = None,
) -> None:
    """Trust a signer, or one kernel, until it is removed."""
    from mkpack import trust as trusting

    typer.echo(f"trusted: {trusting.add(what, issuer=issuer, name=name)}")


@trust.command("list")
def show(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show who and what is trusted."""
    from mkpack import trust as trusting

    store = trusting.read()
    typer.echo(store.to_json() if json else trusting.render(store))


@trust.command()
def remove(
    what: Annotated[str, typer.Argument(metavar="ID|NAME", help="The beginning of an id or SHA-256, or a name.")],
) -> None:
    """Trust a signer or a kernel no longer."""
    from mkpack import trust as trusting

    for line in trusting.remove(what):
        typer.echo(f"removed: {line}")


def sign(
    artifact: Artifact,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Private key. [default: sigstore]")] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate of the key.")] = None,
    chain: Annotated[
        list[Path] | None, typer.Option(metavar="PEM", help="Certificate between it and a root; may be repeated.")
    ] = None,
    identity_token: Annotated[
        str | None, typer.Option(envvar="MKPACK_IDENTITY_TOKEN", help="OpenID Connect token, for sigstore.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Signature to write. [default: beside it]")
    ] = None,
) -> None:
    """Sign an artifact: with a key, a certificate, or sigstore. That signs as who you are and needs the network."""
    from mkpack import sign as signing

    path = signing.sign(
        artifact,
        key=key,
        certificate=certificate,
        chain=chain or (),
        identity_token=identity_token,
        output=output,
    )
    typer.echo(f"{path}")


def verify(
    artifact: Artifact,
    signature: Annotated[bool, typer.Option("--signature", help="Also who signed it, of those you trust.")] = False,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Accept this public key's signature alone.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Accept signatures below this certificate alone.")
    ] = None,
    identity: Annotated[str | None, typer.Option(help="Accept this sigstore identity alone, with --issuer.")] = None,
    issuer: Issuer = None,
    rebuild_kernel: Annotated[
        bool, typer.Option("--rebuild-kernel", help="Also whether its kernels can be compiled here to the same bytes.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also whether all of it can be built again to the same bytes.")
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --rebuild: the recipe, where its source is.")
    ] = None,
) -> None:
    """Check every byte of an artifact. On demand also who made it and if it can be made again; runs nothing of it."""
    from mkpack import checks, describe

    if _print(describe.check(artifact)):
        raise UserError(f"{artifact} is damaged; copy or download it again, or rebuild it")
    if signature or key or certificate or identity or issuer:
        typer.echo(checks.signature(artifact, key=key, certificate=certificate, identity=identity, issuer=issuer))
    different = _print(checks.kernels(artifact)) if rebuild_kernel else 0
    if rebuild or recipe:
        different += _print(checks.again(artifact, recipe))
    if different:
        raise UserError(f"{artifact} could not be made again to the same bytes; the lines above say what differs")


def _print(lines: Iterable[tuple[bool, str]]) -> int:
    """Prints (problem?, line) as they come; the number of problems."""
    problems = 0
    for problem, line in lines:
        problems += problem
        typer.echo(line)
    return problems
