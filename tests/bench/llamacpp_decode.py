"""The peer on a CPU: decode and prefill of llama.cpp on a GGUF file, ms a token, medians of 5.

usage: llamacpp_decode.py MODEL.gguf [THREADS]; needs llama-cpp-python, which mkpack itself never does.
"""

from __future__ import annotations

import statistics
import sys
import time

from llama_cpp import Llama

PROMPT = (
    "The mill has one wheel, and the wheel turns one stone; the river asks a single question at every stone, and by "
    "the time the road crosses it for the first time somebody has given the water a name."
)
NEW_TOKENS = 128


def main() -> None:
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    model = Llama(sys.argv[1], n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
    prompt = model.tokenize(PROMPT.encode())

    def run() -> tuple[float, float]:
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        middle = time.perf_counter()
        for _ in range(NEW_TOKENS):
            model.eval([model.sample(temp=0.0)])
        end = time.perf_counter()
        return (middle - start) / len(prompt) * 1e3, (end - middle) / NEW_TOKENS * 1e3

    run()
    prefill, decode = zip(*(run() for _ in range(5)), strict=True)
    print(f"{len(prompt)} tokens: prefill {statistics.median(prefill):.2f}, decode {statistics.median(decode):.2f}")


if __name__ == "__main__":
    main()
