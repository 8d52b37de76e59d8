"""What the GPU suite does with kernels, each function in a process of its own: what hangs is ended from outside, what
crashes takes nothing with it, and GPU memory is back afterwards.

    run("name of a function here, or module:name", arguments ..., limit=seconds)
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as a program this file has no conftest.py that does it

import kernels  # noqa: E402
import layerwise  # noqa: E402
import numpy as np  # noqa: E402
import plain_model  # noqa: E402

from mkpack import abi, loader, platform  # noqa: E402
from mkpack.artifact import open_artifact  # noqa: E402
from mkpack.errors import InternalError, UserError  # noqa: E402
from mkpack.formats import dequantise  # noqa: E402
from mkpack.layout import Layout  # noqa: E402
from mkpack.layout_cuda import CudaLayout  # noqa: E402
from mkpack.manifest import Limits, Manifest  # noqa: E402
from mkpack.pack import unpack  # noqa: E402
from mkpack.spec import SourceNames, tensors  # noqa: E402

Tokens = Sequence[int]


class JobFailed(AssertionError):
    """A job raised, crashed or took too long."""


def run(job: str, *arguments: Any, limit: float, before: Sequence[str | Path] = (), **environment: str) -> Any:
    """The result of a function of this file (or of a module that PYTHONPATH in `environment` finds), called in another
    process. before: a program and its options that runs that process, such as a checker; its output is the second part
    of the result then."""
    with tempfile.TemporaryDirectory(prefix="mkpack-gpu-") as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        given.write_bytes(pickle.dumps((job, arguments)))
        command = [*map(str, before), sys.executable, __file__, str(given), str(found)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=limit)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0].decode(errors="replace")
            raise JobFailed(f"{job} did not end within {limit:g} s\n{output[-3000:]}") from None
        if not found.exists():
            raise JobFailed(f"{job} ended with code {process.returncode} and no result\n{output[-3000:]}")
        good, result = pickle.loads(found.read_bytes())
    if not good:
        raise JobFailed(f"{result}\n{output[-3000:]}")
    return (result, output) if before else result


# ---- models --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Built:
    """A compiled model and its packed weights."""

    kernel: Path
    layout: Layout | CudaLayout
    limits: Limits
    blobs: tuple[Path, ...]  # of the ranks

    @property
    def blob(self) -> Path:
        """That of the only rank."""
        (blob,) = self.blobs
        return blob

    @contextmanager
    def running(self, **options: Any) -> Iterator[kernels.Model]:
        options = {"threads": platform.cores(), "wait_limit_s": 20.0, **options}
        blobs = [np.memmap(blob, np.uint8, "r") for blob in self.blobs]
        with kernels.running(self.kernel, self.layout, self.limits, blobs, **options) as model:
            yield model

    def target(self) -> str:
        return "gpu" if isinstance(self.layout, CudaLayout) else "cpu"


def of_artifact(folder: Path, target: str) -> Built:
    """One target of an artifact's folder. target: "cpu" or "gpu"."""
    with open_artifact(folder) as artifact:
        manifest = artifact.manifest
        name = next(t for t in sorted(manifest.kernels) if (manifest.kernels[t].layout == "cuda") == (target == "gpu"))
        kernel = manifest.kernels[name]
        blobs = tuple(folder / entry.path for entry in manifest.weights_in(kernel.layout))
        layout = layouts(manifest)[target == "gpu"]
        return Built(folder / kernel.path, layout, manifest.limits, blobs)


def layouts(manifest: Manifest) -> tuple[Layout, CudaLayout]:
    """The layouts that an artifact for a CPU and a GPU was packed with, made again."""
    router = next((s.format for s in manifest.sections["cpu"] if s.name.endswith(".router")), "f32")
    return (
        Layout(manifest.spec, manifest.precision, manifest.tp, router),
        CudaLayout(manifest.spec, manifest.precision, router),
    )


def plain_weights(cpu: Built) -> dict[str, np.ndarray]:
    """What an artifact's CPU blob stores, float32 by canonical name."""
    assert isinstance(cpu.layout, Layout)
    shapes = {role.name: role.shape for role in tensors(cpu.layout.spec, SourceNames())}
    blobs = [np.memmap(cpu.blob, np.uint8, "r")]
    return {name: dequantise(unpack(cpu.layout, blobs, shapes, name)) for name in shapes}


# ---- measures ------------------------------------------------------------------------------------------------------
def error(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """||found - wanted|| / ||wanted|| over all positions, and the largest of one position; infinite where NaN is."""
    wrong = np.where(np.isfinite(found), found - wanted, np.inf)
    each = np.linalg.norm(wrong, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(np.linalg.norm(wrong) / np.linalg.norm(wanted)), float(each.max())


def gap_errors(found: np.ndarray, twin: np.ndarray) -> np.ndarray:
    """At every position, the error of the distance between the twin's two largest logits."""
    rows = np.arange(len(twin))
    second, first = np.argpartition(twin, -2, axis=1)[:, -2:].T
    second, first = (
        np.where(twin[rows, first] < twin[rows, second], a, b) for a, b in ((first, second), (second, first))
    )
    return np.abs((found[rows, first] - found[rows, second]) - (twin[rows, first] - twin[rows, second]))


def device_memory() -> int | None:
    """Bytes free on the first GPU, whose context stays open from here on; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
    )
    return None if any(call() for call in calls) else free.value


def host_memory() -> int:
    """Bytes of this process in memory, of its own."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


# ---- jobs ----------------------------------------------------------------------------------------------------------
def generations(built: Built, prompts: Sequence[Tokens], new: int, requests: Sequence[Mapping[str, Any]]) -> Any:
    """Tokens of every prompt with every request, each in an empty cache, and the seconds of all of them."""
    with built.running() as model:
        start, found = time.monotonic(), []
        for prompt in prompts:
            for request in requests:
                assert model.truncate(0) == abi.OK
                made = model.generate(prompt, max_new_tokens=new, **request)
                assert made.code == abi.OK, made.error
                found.append(made.tokens)
        return found, time.monotonic() - start


def against_twin(gpu: Built, cpu: Built, sequences: Sequence[Tokens]) -> Any:
    """Logits of both kernels held against the float64 twin on the artifact's weights: of every sequence both relative
    errors, both kernels' errors of gaps by position, and the twin's logits at its end."""
    _shared.update(spec=cpu.layout.spec, weights=plain_weights(cpu))
    # The twin is slow and of one thread. Its processes are forked before this one has anything to do with a GPU.
    with multiprocessing.get_context("fork").Pool(min(platform.cores(), len(sequences))) as pool:
        twins = pool.map(_twin, sequences, chunksize=1)
    found = [([], [], twin[-1]) for twin in twins]
    for built in (gpu, cpu):
        with built.running() as model:
            for tokens, twin, (errors, gaps, _) in zip(sequences, twins, found, strict=True):
                logits = model.run(tokens)
                errors.append(error(logits, twin))
                gaps.append(gap_errors(logits, twin))
    return found


_shared: dict[str, Any] = {}  # what forked processes find in memory


def _twin(tokens: Tokens) -> np.ndarray:
    return plain_model.logits(_shared["spec"], _shared["weights"], tokens)


def random_twin(built: Built, weights: Mapping[str, np.ndarray], prompt: Tokens, cuts: Sequence[int], new: int) -> Any:
    """A model of random weights against its float64 twin: errors of the prompt's logits, run in chunks of `cuts` tokens
    and then 16; every layer by itself; how far behind the twin's best the greedy tokens are, relative to its largest
    logit."""
    spec = built.layout.spec
    with built.running() as model:
        logits, hidden = model.run_taps(prompt, cuts, spec)
        model.truncate(0)
        made = model.generate(prompt, max_new_tokens=new)
        assert made.code == abi.OK, made.error
    twin = plain_model.logits(spec, weights, [*prompt, *made.tokens])
    rows = twin[len(prompt) - 1 : -1]
    behind = rows.max(axis=1) - rows[np.arange(new), made.tokens]
    layers = layerwise.compare(spec, weights, prompt, hidden, logits)
    return error(logits, twin[: len(prompt)]), layers, float((behind / np.abs(rows).max(axis=1)).max())


def chunkings(built: Built, prompt: Tokens, sizes: Tokens, new: int) -> Any:
    """By chunk size: the logits' errors against one token a step, and the greedy tokens after the prompt came so."""
    found, first = {}, None
    with built.running() as model:
        for size in sizes:
            logits = model.run(prompt, [size] * len(prompt))
            first = logits if first is None else first
            model.truncate(len(prompt) - 1)
            made = model.generate(prompt[-1:], max_new_tokens=new)
            assert made.code == abi.OK, made.error
            found[size] = error(logits, first), made.tokens
    return found


def digests(built: Built, prompt: Tokens, new: int, times: int) -> list[str]:
    """SHA-256 of the bits of a prompt's logits and of what is generated behind it, greedy and sampled, every time."""
    found = []
    with built.running() as model:
        for _ in range(times):
            hashed = hashlib.sha256(model.run(prompt).tobytes())
            for request in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}):
                model.truncate(0)
                hashed.update(str(model.generate(prompt, max_new_tokens=new, **request).tokens).encode())
            model.truncate(0)
            hashed.update(model.step(model.generate([1], max_new_tokens=2).tokens[:1]).tobytes())
            found.append(hashed.hexdigest())
    return found


def many(built: Built, prompts: Sequence[Tokens], count: int) -> Any:
    """`count` short generations in a row: how many gave other tokens than the first of their kind, seconds, and bytes
    by which this process grew after the first tenth."""
    wanted: dict[int, list[int]] = {}
    wrong, grown, start = 0, 0, time.monotonic()
    with built.running() as model:
        for i in range(count):
            kind = i % (3 * len(prompts))
            request = [{}, {"temperature": 0.7, "top_k": 40, "seed": 3}, {"repetition_penalty": 1.2}][kind % 3]
            model.truncate(0)
            made = model.generate(prompts[kind // 3], max_new_tokens=4 + kind % 5, **request)
            assert made.code == abi.OK, made.error
            wrong += wanted.setdefault(kind, made.tokens) != made.tokens
            if i == count // 10:
                grown = host_memory()
        return wrong, time.monotonic() - start, host_memory() - grown


def loads(folder: Path, target: str, prompt: Tokens, times: int) -> Any:
    """load() and close() again and again: tokens each time, and the free GPU memory after each."""
    tokens, free = [], [device_memory()]
    for _ in range(times):
        with loaded(folder, target) as model:
            tokens.append(list(model.generate_tokens(prompt, temperature=0.0, max_new_tokens=3, stop_tokens=())))
        free.append(device_memory())
    return tokens, free


def loaded(folder: Path, target: str, **options: Any) -> Any:
    """mkpack.load() with the kernel allowed by its digest: the suite trusts what it was given."""
    with open_artifact(folder) as artifact:
        kinds = {t: k for t, k in artifact.manifest.kernels.items() if (k.layout == "cuda") == (target == "gpu")}
        digest = artifact.manifest.entries[next(iter(kinds.values())).path].sha256
    return loader.load(folder, target=target, trust_kernel=digest, **options)


def load_error(folder: Path, target: str, **options: Any) -> str:
    """What load() says when it refuses; "" when it does not."""
    try:
        loaded(folder, target, **options).close()
    except (UserError, InternalError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def two(first: Built, second: Built, prompts: Sequence[Tokens], new: int) -> Any:
    """Tokens of two models that live in one process at the same time and take turns, then of the first alone after the
    second is gone; and of each in its own time."""

    def tokens(model: kernels.Model, prompt: Tokens) -> list[int]:
        model.truncate(0)
        made = model.generate(prompt, max_new_tokens=new)
        assert made.code == abi.OK, made.error
        return made.tokens

    alone, together = [], []
    for built, prompt in zip((first, second), prompts, strict=True):
        with built.running() as model:
            alone.append([tokens(model, prompt)] * 3)
    with first.running() as a:
        with second.running() as b:
            pairs = [(tokens(a, prompts[0]), tokens(b, prompts[1])) for _ in range(3)]
        together = [[x for x, _ in pairs], [y for _, y in pairs]]
        return alone, together, tokens(a, prompts[0]) == alone[0][0]


def ends(built: Built, prompt: Tokens, context: int) -> dict[str, Any]:
    """How generations end and what is in the cache then: facts for the test to compare."""
    facts: dict[str, Any] = {}
    with built.running(context=context) as model:
        whole = model.generate(prompt, max_new_tokens=24)
        facts["length"] = whole.tokens, whole.result.stop_reason, model.length()
        model.truncate(0)
        stop = whole.tokens[9]
        stopped = model.generate(prompt, max_new_tokens=24, stop=[stop])
        facts["stop"] = stop, stopped.tokens, stopped.result.stop_reason, model.length()
        model.truncate(len(prompt) + 3)
        facts["truncated"] = model.generate(whole.tokens[3:4], max_new_tokens=20).tokens
        model.truncate(0)
        full = model.generate(prompt, max_new_tokens=10 * context)
        facts["context"] = len(full.tokens), full.result.stop_reason, model.length(), full.tokens[:24]
        facts["beyond"] = model.try_step([1])[0], model.generate([1], max_new_tokens=1).code
        model.truncate(0)
        facts["again"] = model.generate(prompt, max_new_tokens=24).tokens
        facts["from callback"] = model.truncate(0), model.generate(prompt, lambda _: True, max_new_tokens=24).tokens
    return facts


def cancel(built: Built, prompt: Tokens, new: int, times: int) -> Any:
    """Generations that another thread cancels: (tokens made, seconds from mk_cancel to the end, reason, length of the
    cache) of each, and the tokens of an undisturbed one afterwards."""
    found = []
    with built.running() as model:
        for i in range(times):
            model.truncate(0)
            begun, asked = threading.Event(), [0.0]

            def canceller(begun: threading.Event = begun, asked: list[float] = asked, wait: float = 0.003 * i) -> None:
                begun.wait()
                time.sleep(wait)
                asked[0] = time.monotonic()
                model.lib.mk_cancel(model.handle)

            thread = threading.Thread(target=canceller)
            thread.start()
            made = model.generate(prompt, lambda _, begun=begun: begun.set(), max_new_tokens=new)
            ended = time.monotonic()
            thread.join()
            assert made.code == abi.OK, made.error
            found.append((len(made.tokens), ended - asked[0], made.result.stop_reason, model.length()))
        model.truncate(0)
        return found, model.generate(prompt, max_new_tokens=8).tokens


def beside_another(built: Built, prompt: Tokens, new: int, wait_limit: float) -> Any:
    """A generation while another process has the GPU: (code, text, tokens, seconds)."""
    start = time.monotonic()
    with built.running(wait_limit_s=wait_limit) as model:
        made = model.generate(prompt, max_new_tokens=new)
        return made.code, made.error, made.tokens, time.monotonic() - start


def small_run(built: Built, prompt: Tokens, new: int) -> Any:
    """A little of everything, for a checker that slows it down a hundredfold."""
    with built.running(wait_limit_s=1e6) as model:
        logits = model.run(prompt, [3])
        model.truncate(0)
        greedy = model.generate(prompt[:2], max_new_tokens=new)
        sampled = model.generate([1], max_new_tokens=2, temperature=0.9, top_k=5, top_p=0.9, seed=1)
        return bool(np.isfinite(logits).all()), greedy.code, sampled.code


def _main(given: Path, found: Path) -> None:
    job, arguments = pickle.loads(given.read_bytes())
    try:
        module, _, name = job.rpartition(":")
        result = True, (getattr(importlib.import_module(module), name) if module else globals()[name])(*arguments)
    except BaseException:
        result = False, traceback.format_exc()
    partial = found.with_suffix(".part")
    partial.write_bytes(pickle.dumps(result))
    os.replace(partial, found)


if __name__ == "__main__":
    # The classes in what is unpickled are those of the module, not of this program.
    sys.modules["jobs"] = sys.modules["__main__"]
    _main(*map(Path, sys.argv[1:]))
