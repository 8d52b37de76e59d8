"""Answers of an artifact, as JSON on standard output: python answers.py ARTIFACT BLOCKS, by itself or under torchrun.
BLOCKS: of the emulated machine, 0 on a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import emulator  # noqa: E402

from mkpack import launcher, loader  # noqa: E402
from mkpack.generation import spread  # noqa: E402

NEW, WAIT_LIMIT_S = 24, 20.0


def main(artifact: str, blocks: int) -> None:
    with (
        emulator.machine(blocks) if blocks else contextlib.nullcontext(),
        loader.load(artifact, target="gpu", wait_limit=WAIT_LIMIT_S, world=launcher.world()) as model,
    ):
        if model.follows:
            launcher.serve(model)
            return
        prompt, new = spread(model.spec.vocab_size, 5 if blocks else 21), 2 if blocks else NEW
        found: dict[str, object] = {"logits": hashlib.sha256(model.step(prompt, len(prompt)).tobytes()).hexdigest()}
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            with model.generate_tokens(prompt, max_new_tokens=new, temperature=temperature, seed=7) as tokens:
                found[name] = list(tokens)
        with model.generate_tokens(prompt, max_new_tokens=200, temperature=0.0) as tokens:
            found["left"] = [next(tokens)]  # and cancelled
        with model.generate_tokens(prompt, max_new_tokens=new, temperature=0.0) as tokens:
            found["again"] = list(tokens) == found["greedy"]
        found["experts"] = model.time_step(prompt[:3])[1]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
