"""Recipes for tests, and what a built artifact holds, by the checkpoint's own tensor names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from mkpack import platform
from mkpack.artifact import Artifact, open_artifact
from mkpack.build import build
from mkpack.errors import UserError
from mkpack.formats import dequantise
from mkpack.layout import Layout
from mkpack.model import Model
from mkpack.models import model_spec
from mkpack.pack import unpack
from mkpack.spec import TensorRole, tensors

# Answers --version and -march and writes an "object" at once, counting; BUILD_PAUSE lets it take its time.
_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "stub 1.0"; exit 0; }
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2; shift;; -MF) dep=$2; shift;; esac
  shift
done
[ -z "$out" ] && exit 0
echo "$out" >> "$0.log"
[ -n "$BUILD_PAUSE" ] && sleep "$BUILD_PAUSE"
echo kernel > "$out"; echo "$out:" > "$dep"
"""

# Everybody who asks what time it is gets it wrong by 400 days; how long something takes is told right.
_CLOCK = r"""
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static const long shift = 400L * 86400;
extern "C" int clock_gettime(clockid_t clock, struct timespec* t) noexcept {
  static auto real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, t);
  if (clock == CLOCK_REALTIME) t->tv_sec += shift;
  return code;
}
extern "C" time_t time(time_t* out) noexcept {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
extern "C" int gettimeofday(struct timeval* tv, void*) noexcept {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  *tv = {t.tv_sec, t.tv_nsec / 1000};
  return 0;
}
"""

ROOT = Path(__file__).parents[1]
# Short: every tiny model has max_position_embeddings 256.
LIMITS = {"context": 128}
BF16 = {"experts": "bf16"}  # needs torch but not modelopt, which takes seconds to import

# Kills the process at the n-th call of a function: format(point=(module, function, n)).
DIE = """
import importlib, os, signal
module, name, calls = {point!r}
module, count = importlib.import_module(module), 0
kept = getattr(module, name)
def die(*words, **keys):
    global count
    count += 1
    if count == calls:
        os.kill(os.getpid(), signal.SIGKILL)
    return kept(*words, **keys)
setattr(module, name, die)
"""


def write_recipe(path: Path, checkpoint: Path, **keys: Any) -> Path:
    """A recipe file for a checkpoint folder; `keys` replace or add top-level keys."""
    data = {"name": "tiny", "license": "mit", "source": {"folder": str(checkpoint)}, "limits": LIMITS, **keys}
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def stub_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a compiler that compiles nothing, for builds whose kernel is not run, and points CXX at it."""
    path.write_text(_COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def another_day(folder: Path) -> dict[str, str]:
    """Environment of a process, and of those it starts, that lives 400 days later, in another zone and language, and
    orders its sets otherwise."""
    compiler = platform.compiler()
    assert compiler
    (folder / "clock.cpp").write_text(_CLOCK)
    subprocess.run(
        [*compiler.command, "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.cpp", "-ldl"], check=True
    )
    return {
        "LD_PRELOAD": str(folder / "clock.so"),
        "TZ": "Pacific/Auckland",
        "LANG": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "12345",
    }


def compilations(stub: Path) -> int:
    """How many kernels a stub compiler has begun."""
    log = stub.with_name(f"{stub.name}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def layout_of(artifact: Artifact, *, untied: bool = False) -> Layout:
    """The layout an artifact was packed with, made again. untied: the head of a tied model under its own name, which a
    tied embedding stored in two precisions has too."""
    m = artifact.manifest
    spec = m.spec.model_copy(update={"tie_word_embeddings": False}) if untied else m.spec
    router = next((s.format for s in m.sections["cpu"] if s.name.endswith(".router")), "f32")
    layout = Layout(spec, m.precision, m.tp, router)
    assert [(s.name, s.offset, s.nbytes) for s in layout.sections] == [
        (s.name, s.offset, s.nbytes) for s in m.sections["cpu"]
    ]
    return layout


def dequantised(path: Path, checkpoint: Path) -> dict[str, np.ndarray]:
    """float32 arrays, by checkpoint tensor name, of what the artifact stores; "lm_head.weight" always among them
    unless the head is the embedding itself."""
    return families.by_source(*_stored(path, checkpoint))


def plain_weights(path: Path, checkpoint: Path) -> dict[str, np.ndarray]:
    """The same by canonical name, as plain_model wants them."""
    return _stored(path, checkpoint)[1]


def _stored(path: Path, checkpoint: Path) -> tuple[list[TensorRole], dict[str, np.ndarray]]:
    spec, names = model_spec(json.loads((checkpoint / "config.json").read_bytes()))
    with open_artifact(path) as artifact:
        split = spec.tie_word_embeddings and not layout_of(artifact).tied
        layout = layout_of(artifact, untied=split)
        roles = list(tensors(layout.spec, names))
        shapes = {r.name: r.shape for r in roles}
        blobs = [np.frombuffer(artifact.read(w.path), np.uint8) for w in artifact.manifest.weights_in("cpu")]
        return roles, {r.name: dequantise(unpack(layout, blobs, shapes, r.name)) for r in roles}


def oracle(path: Path, checkpoint: Path, scratch: Path) -> Any:
    """The transformers model in float32 on the dequantised weights of an artifact."""
    torch.set_num_threads(1)  # several wait for each other, spinning, as soon as the machine has other work
    weights = dequantised(path, checkpoint)
    config = json.loads((checkpoint / "config.json").read_bytes())
    if config.get("tie_word_embeddings") and "lm_head.weight" in weights:
        # Two precisions of one matrix are two matrices: the oracle gets a checkpoint with a head of its own.
        twin = scratch / "untied"
        shutil.copytree(checkpoint, twin, ignore=shutil.ignore_patterns("*.safetensors*"))
        state = families.checkpoint_tensors(checkpoint)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, twin / "model.safetensors", metadata={"format": "pt"})
        (twin / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        checkpoint = twin
    return families.reference(checkpoint, weights)


def generated(model: Model, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens of an artifact, stop tokens not heeded."""
    return list(model.generate_tokens(prompt, temperature=0, repetition_penalty=1, max_new_tokens=n, stop_tokens=()))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest over positions of ||found - expected|| / ||expected||."""
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def assert_greedy(logits: np.ndarray, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """The tokens are those that greedy decoding of a model gives, ties to the lowest id.

    logits: the model's for prompt + tokens, of one pass: when every token is the largest after those before it, then
    the whole is what choosing one by one gives.
    """
    chosen = logits[len(prompt) - 1 :][: len(tokens)]
    best = chosen.argmax(axis=1)
    wrong = np.flatnonzero(best != np.asarray(tokens))
    if len(wrong):
        i = wrong[0]
        gap = chosen[i, best[i]] - chosen[i, tokens[i]]
        raise AssertionError(f"token {i} is {tokens[i]}, expected {best[i]}, whose logit is {gap:g} larger")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(recipe: Path, output: Path | str | None) -> str:
    """The text a build is refused with; it leaves nothing but the lock."""
    folder = Path(output or ".")
    before = names(folder) if folder.is_dir() else set()
    with pytest.raises(UserError) as caught:
        build(recipe, output=output)
    if folder.is_dir():
        assert names(folder) - before <= {".tiny.mkpack.lock"}
    return str(caught.value)


@contextlib.contextmanager
def process(recipe: Path, out: Path, before: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A build in a process of its own, after the Python text `before`; it prints READY when it begins."""
    code = (
        "import sys, torch, mkpack.build as builder\nfrom pathlib import Path\n"
        f"{before}\nprint('READY', flush=True)\n"
        "builder.build(Path(sys.argv[1]), output=Path(sys.argv[2]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [*options.pop("launcher", ()), sys.executable, "-c", code, str(recipe), str(out)]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()
