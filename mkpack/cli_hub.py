"""The commands that deal with a hub: `mkpack push` and `mkpack pull`. Like cli.py they hold no logic and import what
they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="NAME.mkpack, or the folder it was unpacked to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def push(
    artifact: Artifact,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repo on the hub; it is made when it is new.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repo that others do not see.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch, made when it is new. [default: main]")
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Speeds for the model card, of mkpack bench --json; may be repeated."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in the place of the artifact that the repo holds.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent; send nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Publish an artifact on the hub, or add its kernels there. Goes on where it was interrupted."""
    from mkpack import push as pushing

    if dry_run:
        plan = pushing.plan(artifact, repo, private=private, revision=revision, replace=replace, bench=bench or ())
        typer.echo(plan.to_json() if json else plan.render())
        return
    done = pushing.push(artifact, repo, private=private, revision=revision, replace=replace, bench=bench or ())
    typer.echo(done.to_json() if json else done.render())


def pull(
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="Repo on the hub.")],
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Its kernel and weights, whatever machine this is.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Only the weights of this rank; may be repeated.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Download what running a published artifact takes. Checks every byte; runs nothing of it."""
    from mkpack import pull as pulling

    done = pulling.pull(repo, target=target, check=target is None, ranks=rank)
    typer.echo(done.to_json() if json else done.render())
