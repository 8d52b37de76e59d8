"""Processes that a launcher would start, on the emulated machine: python launched.py BLOCKS ARGUMENTS OF mkpack."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """What a launcher sets for one of its processes."""
    ours = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {**os.environ, **{name: str(value) for name, value in ours.items()}, **more}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(rank: int, size: int, port: int, blocks: int, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """One process that runs the command line of mkpack where the emulated GPU is."""
    return subprocess.Popen(
        [sys.executable, __file__, str(blocks), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(rank, size, port, **more),
    )


def talk(artifact: str) -> None:
    """An answer for every line of standard input, and one before; a second is the longest wait."""
    from mkpack import launcher, loader

    with loader.load(artifact, wait_limit=1.0, world=launcher.world()) as model:
        if model.follows:
            launcher.serve(model)
            return
        for _line in itertools.chain([""], sys.stdin):
            for _piece in model.generate("hi", raw=True, max_new_tokens=3, temperature=0.0):
                pass
            print("answered", flush=True)


def main(blocks: int, arguments: Sequence[str]) -> None:
    sys.path[:0] = [str(Path(__file__).parent)]
    import emulator

    from mkpack import cli
    from mkpack.errors import InternalError, UserError

    with emulator.machine(blocks):
        if arguments[0] == "--talk":
            try:
                talk(arguments[1])
            except (UserError, InternalError) as error:
                sys.exit(str(error))
            return
        sys.argv = ["mkpack", *arguments]
        cli.main()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
