"""NCCL's all-gather on so many GPUs, one process each: python nccl.py GPUS BYTES ..., each of all ranks together.

Prints a line a size: bytes, us. Needs torch with NCCL. Many all-gathers are one CUDA graph, as an engine would run
them."""

from __future__ import annotations

import os
import socket
import statistics
import sys

CAPTURED, REPLAYS = 50, 10


def measure(rank: int, gpus: int, port: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    for size in sizes:
        part = torch.ones(size // gpus // 4, dtype=torch.int32, device="cuda")
        whole = torch.empty(part.numel() * gpus, dtype=torch.int32, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):  # connections are made by the first
                dist.all_gather_into_tensor(whole, part)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CAPTURED):
                    dist.all_gather_into_tensor(whole, part)
        times = []
        for i in range(REPLAYS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i:
                times.append(start.elapsed_time(end) * 1e3 / CAPTURED)
        if rank == 0:
            print(size, f"{statistics.median(times):.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    import torch.multiprocessing as mp

    gpus, sizes = int(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(measure, (gpus, port, sizes), nprocs=gpus)


if __name__ == "__main__":
    main()
