"""What `make gpu-test-tp` does with kernels of several ranks, each function in a process of its own (jobs.run)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulator
import jobs
import kernels
import launched as launched_processes
import placed

from mkpack import abi, bench, bench_rank, layout_cuda, loader, platform
from mkpack import build as builder
from mkpack.compile import Kernel, Unit
from mkpack.generation import spread

RUNS = 20


def bits(built: jobs.Built, prompt: Sequence[int], cuts: Sequence[int], new: int, drawn: bool) -> dict[str, Any]:
    """Logits of a prompt in chunks, as bytes; `new` greedy tokens behind it, by mk_step on one rank and by mk_generate
    on several; if `drawn` also drawn ones."""
    found: dict[str, Any] = {}
    with built.running() as model:
        found["logits"] = model.run(prompt, cuts).tobytes()
        model.truncate(0)
        if len(built.blobs) == 1:
            tokens, logits = [], model.run(prompt)[-1]
            for _ in range(new):
                tokens.append(int(logits.argmax()))  # the lowest of equal ones, as the kernel takes
                logits = model.step(tokens[-1:])[0]
            found["greedy"] = tokens
        else:
            found["greedy"] = _generated(model, prompt, new)
        if drawn:
            model.truncate(0)
            found["drawn"] = _generated(model, prompt, new, temperature=0.9, top_p=0.95, seed=7)
    return found


def _generated(model: kernels.Model, prompt: Sequence[int], new: int, **request: Any) -> list[int]:
    made = model.generate(prompt, max_new_tokens=new, **request)
    assert made.code == abi.OK, made.error
    return made.tokens


def placed_bits(
    built: jobs.Built, prompt: Sequence[int], cuts: Sequence[int], new: int, devices: Sequence[int]
) -> dict[str, Any]:
    """What bits() finds, drawn tokens too, with a process for every one of `devices`; and the seconds it took."""
    with placed.running(built.kernel, built, len(devices), devices) as parts:
        start = time.monotonic()
        found: dict[str, Any] = {"logits": placed.each(parts, "call", "run", prompt, cuts)[0].tobytes()}
        for name, request in (("greedy", {}), ("drawn", {"temperature": 0.9, "top_p": 0.95, "seed": 7})):
            placed.each(parts, "call", "truncate", 0)
            answers = placed.each(parts, "call", "generate", prompt, max_new_tokens=new, **request)
            for tokens, code, error, _ in answers:
                assert code == abi.OK and tokens == answers[0][0], (code, error, answers)
            found[name] = answers[0][0]
        return {**found, "seconds": time.monotonic() - start}


def placed_killed(
    built: jobs.Built, prompt: Sequence[int], devices: Sequence[int], under_way: bool, wait_limit: float
) -> tuple[int, str, float, tuple[int, str]]:
    """The last process is killed while both generate, or before the first does so again: of what the first then says
    (code, text), seconds, and (code, text) of its next call."""
    with placed.running(built.kernel, built, len(devices), devices, wait_limit_s=wait_limit) as parts:
        assert placed.each(parts, "many", 1, prompt, max_new_tokens=2) == [(abi.OK, "")] * len(parts)
        for part in parts[: len(parts) if under_way else 1]:
            part.ask("many", 10**6, prompt, max_new_tokens=40)
        if under_way:
            time.sleep(1)
        parts[-1].end()
        start = time.monotonic()
        code, error = parts[0].answer(limit=4 * wait_limit + 20)
        seconds = time.monotonic() - start
        parts[0].ask("failed_step")
        return code, error, seconds, parts[0].answer()


def launched(artifact: Path, processes: int, emulated: int | None) -> dict[str, Any]:
    """What answers.py finds in an artifact: in this process, or in those that torchrun starts."""
    command = [sys.executable, str(Path(__file__).with_name("answers.py")), str(artifact), str(emulated or 0)]
    if processes > 1:
        # Without --standalone, which asks what this host is called: a machine without a network may not know.
        port = ["--master-port", str(launched_processes.free_port())]
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stalled(built: jobs.Built, prompt: Sequence[int], spinner: Path | None, device: int, wait_limit: float) -> Any:
    """A generation in which the SMs of `device` are taken away after its first token, for three times the limit of a
    wait; without a spinner the environment makes a rank late. (code, text, seconds, text of the next call)."""
    hold = ctypes.CDLL(str(spinner)).hold if spinner else None
    if hold:
        hold.argtypes, hold.restype = (ctypes.c_int, ctypes.c_double), ctypes.c_int
    taken: list[int] = []

    def take(_token: int) -> bool:
        if hold and not taken:
            taken.append(hold(device, 3 * wait_limit))
        return False

    with built.running(wait_limit_s=wait_limit) as model:
        start = time.monotonic()
        made = model.generate(prompt, take, max_new_tokens=32)
        seconds = time.monotonic() - start
        assert not any(taken), f"the spinner ended with CUDA error {taken[0]}"
        return made.code, made.error, seconds, (model.try_step([1])[0], model.error())


def build(recipe: Path, out: Path, kernel: Path | None, emulated: int | None, rank: int | None = None) -> None:
    """The artifact of a recipe. kernel: its GPU kernel, compiled before; else it is compiled here. emulated: blocks,
    for the emulated machine. rank: the one whose weights alone are made."""
    if emulated:
        with emulator.machine(emulated):
            builder.build(recipe, output=out, rank=rank)
        return
    if kernel:

        def ready(units: list[Unit], folder: Path, stop: object) -> dict[str, Kernel]:
            needs: dict[str, object] = {"gpu": "sm_90a", "sms": layout_cuda.GRID["sm_90a"], "system": "linux"}
            return {unit.name: Kernel(kernel, "nvcc", needs) for unit in units}

        builder.compile_kernels = ready  # type: ignore[assignment]
        platform.nvcc = lambda: platform.Compiler(("nvcc",), "13.0")  # type: ignore[assignment]
    builder.build(recipe, output=out, rank=rank)


def one_rank(artifact: Path, tp: int, context: int, emulated: int | None) -> str:
    """`mkpack bench --rank-of tp` of the rank that an artifact holds alone, as text."""
    with emulator.machine(emulated) if emulated else contextlib.nullcontext():
        if emulated:
            bench_rank.RUNS = 1
        result = bench.run(artifact, target="gpu", rank_of=tp, contexts=[context])
        return result.to_json()


def steps(artifact: Path, counts: Sequence[int], context: int, new: int, emulated: int | None) -> dict[str, Any]:
    """Of a loaded artifact: ms of a step of T tokens at a context, and of a decoded token; bytes that the ranks of one
    GPU read for each, in 1e6; the read bandwidth of one GPU in GB/s; GPUs it runs on."""
    with (
        emulator.machine(emulated) if emulated else contextlib.nullcontext(),
        loader.load(artifact, target="gpu") as model,
    ):
        manifest = model.manifest
        spec = model.spec
        gpus = _gpus(manifest.tp, layout_cuda.per_device_of(manifest))

        def megabytes(count: int, experts: float | None) -> float:
            return model.bytes_per_step(count, context, experts) * (manifest.tp // gpus) / 1e6

        bandwidth = model.read_bandwidth()
        prompt, found = spread(spec.vocab_size, context), []
        model.step(prompt, 0)
        for count in counts:
            runs = [model.time_step(spread(spec.vocab_size, count, context + i * count)) for i in range(-2, RUNS)][2:]
            experts = statistics.mean(e for _, e in runs)
            ms = statistics.median(s for s, _ in runs) * 1e3
            found.append({"T": count, "ms": ms, "experts": experts, "mb": megabytes(count, experts)})
        decoded = []
        for _ in range(3):
            with model.generate_tokens(
                prompt, reuse=True, max_new_tokens=new, temperature=0.0, stop_tokens=[]
            ) as generation:
                for _token in generation:
                    pass
            result = generation.result
            assert result
            decoded.append(result.decode_s / (result.num_new_tokens - 1) * 1e3)
        bandwidth = max(bandwidth, model.read_bandwidth())
        decode = {"T": "decoded", "ms": statistics.median(decoded), "experts": 0.0, "mb": megabytes(1, None)}
        return {"gpus": gpus, "bandwidth": bandwidth / 1e9, "steps": [*found, decode]}


def _gpus(tp: int, per_device: int) -> int:
    """On how many GPUs mk_create puts the ranks: as few to each as the visible ones allow."""
    driver = platform.cuda_driver()
    devices = len(driver.devices) if driver else 1
    return next(tp // n for n in range(1, per_device + 1) if tp % n == 0 and tp // n <= devices)
