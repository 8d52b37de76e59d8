"""Loads an artifact: verified bytes -> the kernel for this machine -> Model. No torch, no compiler.

with load("model.mkpack") as model:
    for piece in model.generate("What is the capital of France?"):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING

from mkpack import abi, gate, platform
from mkpack.artifact import Artifact, open_artifact
from mkpack.compat import choose_target
from mkpack.errors import UserError, combine
from mkpack.layout_cuda import per_device_of
from mkpack.model import Digests, Model
from mkpack.native import NativeModel, Placement
from mkpack.repo import SCHEME
from mkpack.text import FILES

if TYPE_CHECKING:
    from mkpack.launcher import World
    from mkpack.manifest import Manifest
    from mkpack.pull import Pulled

MAX_THREADS = 1024  # csrc/cpu/model.cpp refuses more


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    context: int | None = None,
    verify: bool = True,
    wait_limit: float = 30.0,
    target: str | None = None,
    trust_kernel: str | None = None,
    rebuild_kernel: bool = False,
    ranks: bool = False,
    rank_of: int | None = None,
    rank: int | None = None,
    world: World | None = None,
) -> Model:
    """Loads an artifact for this machine: a file, an unpacked folder, or hf://org/name@revision, which is pulled first.

    target: the kernel to run, for instance "sm_90a" or "x86-64-v3", or "gpu" or "cpu" for the best of its kind; by
    default a kernel for this machine's GPU (the first that CUDA_VISIBLE_DEVICES leaves), else for its CPU. threads:
    default one for each core this process may use. context: KV cache positions, at most (and by default) the compiled-
    in limit. verify: check the digest of the weights, in the background; Model waits for it before its first token.
    Everything else is always checked. wait_limit: seconds a step may wait before it is given up. ranks: of an artifact
    for several, on a CPU: each rank is a group of threads (at least one) with its own blob and memory, and they
    exchange what they compute; by default all threads work on all ranks' parts in memory that they share. rank_of: of
    an artifact for so many ranks, on a GPU: only `rank` (by default the one it holds alone, else 0) is loaded and
    checked, its peers are looped back, and what it computes means nothing (`mkpack bench --rank-of`); the other ranks'
    weights need not be there. world: of an artifact for several ranks, on a GPU: this process has a part of them, which
    is loaded and checked here, and others of this host have the rest (`launcher.world()`, where a launcher such as
    torchrun started them). All must load it; the one of rank 0 is asked for tokens, the others call Model.follow().

    A kernel that was not built here runs when its artifact is signed by somebody in the trust list, or when its SHA-256
    is `trust_kernel`, which is remembered (trust.py). rebuild_kernel: do not use it, compile it here instead, which
    needs what a build needs but torch; Model.rebuilt tells whether the result has the same bytes.

    Raises UserError listing everything that does not fit, before any code of the artifact is loaded.
    """
    if rebuild_kernel and trust_kernel is not None:
        raise UserError("rebuild_kernel and trust_kernel contradict each other; give one of them")
    found: list[str] = []
    if (text := os.fspath(path)).startswith(SCHEME):
        from mkpack.pull import pull  # a hub's side, which other loads do without

        def ask(found: Pulled) -> None:
            if found.target and not rebuild_kernel:  # before the weights, which may take hours
                gate.require(found.open(), found.target, trust_kernel)

        # Every byte is checked by the pull.
        only = None if rank_of is None else [rank or 0]
        artifact, verify = pull(text, target=target, ranks=only, verify=verify, before=ask).open(), False
    else:
        artifact = open_artifact(text, found)
    try:
        alone = None if rank_of is None else (rank_alone(artifact.manifest, rank), rank_of)
        return _load(
            artifact,
            found,
            threads,
            context,
            verify,
            wait_limit,
            target,
            trust_kernel,
            rebuild_kernel,
            ranks,
            alone,
            world,
        )
    except BaseException:
        artifact.close()
        raise


def rank_alone(manifest: Manifest, rank: int | None) -> int:
    """The rank that is loaded by itself: the wanted one, or the one that the artifact holds alone, or the first."""
    return rank if rank is not None else manifest.one_rank or 0


def _load(
    artifact: Artifact,
    found: list[str],
    threads: int | None,
    context: int | None,
    verify: bool,
    wait_limit: float,
    wanted: str | None,
    trust_kernel: str | None,
    rebuild_kernel: bool,
    ranks: bool,
    alone: tuple[int, int] | None,
    world: World | None,
) -> Model:
    """found: problems so far, to which more are added. alone: a rank, of so many, to be loaded by itself."""
    manifest = artifact.manifest
    target, wrong = choose_target(manifest, wanted)
    found += wrong
    placement: Placement | None = None
    here = range(manifest.tp)
    if alone is not None and target is not None:
        found += _alone_refusals(manifest, target, ranks, *alone)
        here = range(alone[0], alone[0] + 1)
    elif target is not None and manifest.kernels[target].layout == "cuda" and manifest.one_rank is not None:
        found.append(manifest.holds)
    if world is not None and target is not None:
        if refused := _world_refusals(manifest, target, world, ranks, alone):
            found += refused
        else:
            driver = platform.cuda_driver()
            placement = world.place(manifest.tp, per_device_of(manifest), len(driver.devices) if driver else 0)
            here = range(placement.first, placement.first + placement.held)
    if len(here) < manifest.tp:
        others = {entry.path for entry in manifest.weights if entry.rank not in here}
        found[:] = [problem for problem in found if problem.split(": ")[0] not in others]
    if ranks and target is not None:
        found += _ranks_refusals(manifest, target, rebuild_kernel)
    limit = manifest.limits.context
    if context is not None and not 1 <= context <= limit:
        found.append(f"context {context}: expected 1 to {limit}, the limit this artifact was built with")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        found.append(f"threads {threads}: expected 1 to {MAX_THREADS}")
    if not wait_limit > 0:
        found.append(f"wait_limit {wait_limit}: expected seconds above 0")
    # Everything but the weights is checked here: the rest of the artifact is small, and none of it is exempt.
    small = sorted(set(artifact.held) - {entry.path for entry in manifest.weights})
    damaged = {problem.split(": ")[0] for problem in found}
    content = {name: _read(artifact, name, found) for name in small if name not in damaged}
    if found or target is None:
        raise combine(f"cannot load {artifact.path}", found)

    rebuilt = gate.admit(artifact, target, trust_kernel, rebuild_kernel)
    kernel = manifest.kernels[target]
    blobs = [entry for entry in manifest.weights_in(kernel.layout) if entry.rank in here]
    code = rebuilt.data if rebuilt else content[kernel.path]
    group, positions = None, context or limit
    if world is not None:
        from mkpack.launcher import Group

        same = {"artifact": artifact.digest, "target": target, "kernel": hashlib.sha256(code).hexdigest()}
        group = Group(world, {**same, "context": str(positions)})
    weights = [entry.path for entry in blobs]
    # A GPU's kernel reads its weights once, into the GPU: they need not stay in this machine's memory, nor fit there.
    on_gpu = kernel.layout == "cuda"
    with group.loading() if group else contextlib.nullcontext():
        addresses = [artifact.address(name, "pass" if on_gpu else "stay") for name in weights]
        digests = Digests(artifact, weights, drop=on_gpu) if verify else None
        library = gate.open_library(artifact, target, code)
        try:
            native = NativeModel(
                library,
                addresses,
                blobs[0].nbytes,
                threads=threads or platform.cores(),
                context=positions,
                wait_limit=wait_limit,
                ranks=ranks,
                looped_of=alone[1] if alone else None,
                placement=placement,
            )
        except UserError as e:
            if on_gpu and choose_target(manifest, "cpu")[0]:
                raise UserError(f"{e}; --target cpu runs it on this machine's CPU instead") from e
            raise
        if group is not None:
            try:
                if digests:
                    digests.wait()  # a damaged blob of one rank would be the wait of all others
                group.connect(native)
            except BaseException:
                native.close()
                raise
    if on_gpu:
        for name in weights:
            artifact.drop(name)
    files = {os.path.basename(name): content[name] for name in manifest.tokenizer_files}
    files = {name: data for name, data in files.items() if name in FILES}
    model = Model(artifact, native, target, positions, files, digests, group)
    model.rebuilt = rebuilt
    return model


def _ranks_refusals(manifest: Manifest, target: str, rebuilt: bool) -> list[str]:
    """Why the ranks of an artifact cannot have memory of their own."""
    kernel = manifest.kernels[target]
    if kernel.layout != "cpu":
        return [f"ranks: expected a CPU target, found {target}; choose one (--target cpu)"]
    if manifest.tp == 1:
        return ["ranks: this artifact was built for one rank; build it with parallel.tp above 1"]
    facts = json.loads(kernel.description)
    known = facts.get("abi", 1) if isinstance(facts, dict) else 1
    if known < abi.SINCE_RANKS and not rebuilt:
        return [f"ranks: the kernel {kernel.path} was built by an older mkpack, which has none; rebuild it"]
    return []


def _world_refusals(
    manifest: Manifest, target: str, world: World, ranks: bool, alone: tuple[int, int] | None
) -> list[str]:
    """Why ranks cannot be in several processes."""
    found = []
    if manifest.kernels[target].layout != "cuda":
        found.append(
            f"rank {world.rank}: WORLD_SIZE is {world.world_size}, and only a GPU's ranks can be in several processes, "
            f"found {target}; choose a GPU target (--target gpu) or start one process"
        )
    if ranks or alone:
        found.append(f"rank {world.rank}: WORLD_SIZE is {world.world_size}: ranks and rank_of are for one process")
    return found


def _alone_refusals(manifest: Manifest, target: str, ranks: bool, rank: int, rank_of: int) -> list[str]:
    """Why a rank cannot be loaded by itself."""
    found = []
    if manifest.kernels[target].layout != "cuda":
        found.append(f"rank_of: expected a GPU target, found {target}; build the artifact with one (sm_90a)")
    if rank_of != manifest.tp or rank_of == 1:
        has = (
            f"{manifest.tp}, the ranks this artifact was built for"
            if manifest.tp > 1
            else "an artifact of several ranks"
        )
        found.append(f"rank_of {rank_of}: expected {has}; parallel.tp of its recipe says how many")
    if not 0 <= rank < manifest.tp:
        found.append(f"rank {rank}: expected 0 to {manifest.tp - 1}, the ranks it has")
    elif manifest.one_rank not in (None, rank):
        found.append(f"rank {rank}: {manifest.holds}")
    if ranks:
        found.append("ranks and rank_of contradict each other; give one of them")
    return found


def _read(artifact: Artifact, name: str, found: list[str]) -> bytes:
    data = artifact.read(name, verify=False)
    digest, expected = hashlib.sha256(data).hexdigest(), artifact.manifest.entries[name].sha256
    if digest != expected:
        found.append(f"{name}: sha256 expected {expected}, found {digest}; copy or download it again, or rebuild it")
    return data
