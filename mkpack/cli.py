"""The command line: typer commands that hold no logic, import what they need when they run, and report errors."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mkpack import __version__, cli_hub, cli_trust
from mkpack.errors import InternalError, UserError, visible

if TYPE_CHECKING:
    from rich.console import Console

# Plain help and no decorated tracebacks: rich would take longer to import than everything else here.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="NAME.mkpack, or the folder it was unpacked to.")]
# Not a Path, which would make hf:/org/name of hf://org/name.
ArtifactOrRepo = Annotated[
    str, typer.Argument(metavar="ARTIFACT|ORG/NAME", help="An artifact, or a repo on the hub: ORG/NAME[@REVISION].")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Worker threads. [default: one per core]")]
Ranks = Annotated[
    bool, typer.Option("--ranks", help="CPU: every rank has threads and memory of its own, and they exchange words.")
]
Target = Annotated[
    str | None, typer.Option(metavar="TARGET", help="Kernel to run: cpu, gpu, or a target of the artifact.")
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Check every byte first.")]


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 mkpack's or the machine's fault, 2 the user's, 130
    stopped by Ctrl-C."""
    # A shell's >&- leaves no stream at all; what is written is then nobody's loss.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away, which is its right; nothing more may be written, not even by Python's own shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        print(f"mkpack: error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run() -> int:
    try:
        app(prog_name="mkpack")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(f"mkpack: error: {visible(str(error))}", file=sys.stderr)
        return 2
    except InternalError as error:
        print(f"mkpack: internal error: {visible(str(error))}", file=sys.stderr)
        return 1
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mkpack {__version__}")
        raise typer.Exit


def _console() -> Console:
    """Progress goes to standard error, so that standard output is the result alone."""
    from rich.console import Console

    return Console(stderr=True)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile a mixture-of-experts checkpoint into one artifact that decodes one request at memory speed."""


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.")],
    output: Annotated[
        str | None,  # not a Path, which would forget that a name ended in a slash
        typer.Option("--output", "-o", metavar="PATH", help="File or folder to write. [default: ./NAME.mkpack]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its costs; build nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build even when the artifact is up to date.")] = False,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Keep the working folder and say where.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="GPU kernels keep times for mkpack trace; they get slower.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse when calibration leaves experts with few tokens.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=0, help="Only rank R's weights, for GPU targets and mkpack bench --rank-of. [default: all]"
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Build the artifact a recipe describes."""
    if dry_run:
        from mkpack import plan as planner

        plan = planner.plan(recipe, rank=rank)
        typer.echo(plan.to_json() if json else plan.render())
        return
    from mkpack import build as builder

    path = builder.build(
        recipe,
        output=output,
        force=force,
        keep_work=keep_work,
        trace=trace,
        strict=strict,
        rank=rank,
        console=_console(),
    )
    typer.echo(_dumps({"artifact": str(path), "bytes": path.stat().st_size}) if json else f"{path}")


@app.command()
def run(
    artifact: ArtifactOrRepo,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the prompt from a file, - is standard input.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to make. [default: until it ends]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the artifact's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that make up p; 1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop what is under p times the likeliest; 0 is off.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what was said; 1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Equal seeds give equal answers.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    target: Target = None,
    threads: Threads = None,
    ranks: Ranks = False,
    context: Annotated[
        int | None, typer.Option(min=1, help="Positions to keep room for. [default: the artifact's limit]")
    ] = None,
    verify: Verify = True,
    trust_kernel: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Allow exactly this kernel, now and later.")
    ] = None,
    rebuild_kernel: Annotated[
        bool, typer.Option("--rebuild-kernel", help="Do not use the artifact's kernel, compile it here.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print the speed, and its bound, on standard error.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Answer a prompt, or hold a conversation on a terminal."""
    import mkpack
    from mkpack import launcher, session
    from mkpack.repo import located

    if greedy and temperature:
        raise UserError(f"--greedy and --temperature {temperature:g} contradict each other; give one of them")
    if raw and system is not None:
        raise UserError("--system is a message of the chat template; drop --raw, or put the text into the prompt")
    sampling = session.sampling(
        max_new_tokens=max_new_tokens,
        seed=seed,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    options = session.Options(raw, system, stats, json, sampling)
    world = launcher.world()
    first = world is None or world.rank == 0  # the others are asked nothing
    text = session.find_prompt(prompt, prompt_file) if first else None
    with mkpack.load(
        located(artifact),
        target=target,
        threads=threads,
        context=context,
        verify=verify,
        trust_kernel=trust_kernel,
        rebuild_kernel=rebuild_kernel,
        ranks=ranks,
        world=world,
    ) as model:
        if rebuild_kernel and model.rebuilt:
            typer.echo(model.rebuilt.render(), err=True)
        if not first:
            launcher.serve(model)
        elif text is None:
            session.converse(model, options)
        else:
            session.answer(model, text, options)


@app.command()
def inspect(
    artifact: ArtifactOrRepo,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also where each tensor lies.")] = False,
    json: AsJson = False,
) -> None:
    """Show what an artifact holds; runs nothing of it."""
    from mkpack import describe

    show = describe.to_json if json else describe.describe
    typer.echo(show(describe.manifest_of(artifact), tensors))


app.command()(cli_hub.push)
app.command()(cli_hub.pull)
app.command()(cli_trust.verify)
app.command()(cli_trust.sign)
app.add_typer(cli_trust.trust, name="trust")


@app.command()
def audit(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in the Hugging Face format.")],
    json: AsJson = False,
) -> None:
    """Show what a checkpoint holds and what a build would refuse. Exit code 1 when it would; builds nothing."""
    from rich.progress import track

    from mkpack import audit as audits

    console = _console()
    found = audits.audit(
        checkpoint,
        lambda items, title: track(
            items, title, console=console, transient=True, disable=json or not console.is_terminal
        ),
    )
    if json:
        typer.echo(found.to_json())
    else:
        audits.show(found)
    raise typer.Exit(found.exit_code)


@app.command()
def unpack(
    artifact: Artifact,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet, or is empty.")],
) -> None:
    """Unpack an artifact into a folder, which runs like the file."""
    from mkpack.artifact import extract
    from mkpack.sign import carry

    extract(artifact, folder)
    carry(artifact, folder)
    typer.echo(f"{folder}")


@app.command()
def graph(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT|RECIPE", help="An artifact, or a recipe (.yaml).")],
    layer: Annotated[
        int | None, typer.Option(min=0, help="Only this layer. [default: all; the picture shows 0]")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a layer into an SVG file.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="cpu, gpu, or a target it has. [default: CPUs']")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a GPU's kernels. [default: the one for any step]")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what a step does: phases, buffers, waits, bytes."""
    from mkpack import graph as graphs

    found = graphs.read(path, target, kernel)
    if svg is not None:
        found.save_svg(svg, layer or 0)
    typer.echo(found.to_json(layer) if json else found.render(layer))


@app.command()
def bench(
    artifact: ArtifactOrRepo,
    target: Target = None,
    threads: Threads = None,
    ranks: Ranks = False,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Positions in the cache when it starts; may be repeated.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="GPU: prompt of the generation that is timed. [default: 39]")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="GPU: tokens that it makes. [default: 512]")] = None,
    rank_of: Annotated[
        int | None, typer.Option(metavar="N", help="GPU: one of the artifact's N ranks alone, its peers looped back.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", help="Which; the others' weights need not be there. [default: 0, or the only one it holds]"
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure speed beside the bound of this machine's memory."""
    from mkpack import bench as benchmark
    from mkpack import launcher
    from mkpack.repo import located

    if rank is not None and rank_of is None:
        raise UserError(f"--rank {rank}: expected --rank-of N with it, the number of the artifact's ranks")
    result = benchmark.run(
        located(artifact),
        target=target,
        threads=threads,
        ranks=ranks,
        contexts=context,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rank_of=rank_of,
        rank=rank,
        world=launcher.world(),
    )
    if result is None:  # this process has no rank 0, which prints
        return
    typer.echo(result.to_json() if json else result.render())


@app.command()
def trace(
    artifact: ArtifactOrRepo,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="A .json or .json.gz; a page (.html) goes beside it.")
    ],
    target: Target = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are traced.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, max=16, help="Tokens of every step.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=0, help="Positions in the cache before them. [default: 512]")
    ] = None,
) -> None:
    """Show when every SM did what in a few steps. The artifact must have been built with --trace."""
    from mkpack import trace as tracing
    from mkpack.repo import located

    found = tracing.run(located(artifact), output, target=target, steps=steps, tokens=tokens, context=context)
    typer.echo(found)


@app.command("eval")
def evaluate(
    artifact: Artifact,
    against: Annotated[Path, typer.Option(metavar="OTHER", help="The artifact it is held against.")],
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to read. [default: mkpack's own]")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens.")] = None,
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Compare the quality of two artifacts on a text."""
    from mkpack import quality

    result = quality.compare(artifact, against, text=text, tokens=tokens, threads=threads)
    typer.echo(result.to_json() if json else result.render())


@app.command()
def doctor(json: AsJson = False) -> None:
    """Tell what works here and how to get the rest."""
    from mkpack import doctor as doctors

    diagnosis = doctors.diagnose()
    if json:
        typer.echo(diagnosis.to_json())
    else:
        doctors.show(diagnosis)
    raise typer.Exit(diagnosis.exit_code)


def _dumps(value: object) -> str:
    import json

    return json.dumps(value)
