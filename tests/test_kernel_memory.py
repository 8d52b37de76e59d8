"""A kernel allocates when it is created, never while it runs: counted by a program with a malloc of its own."""

from __future__ import annotations

import subprocess

import kernels
import pytest
from kernels import Kernels, Weights, precision

from mkpack import compile, platform
from mkpack.layout import Layout
from mkpack.manifest import Limits

if not kernels.TARGETS:
    pytest.skip("this machine runs no CPU target", allow_module_level=True)

COUNTER = r"""
#include <dlfcn.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "abi.h"
static std::atomic<bool> counting{false};
static std::atomic<long> count{0};
extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_realloc(void*, size_t);
extern "C" void* __libc_memalign(size_t, size_t);
static void note() { if (counting) count++; }
extern "C" {
void* malloc(size_t n) { note(); return __libc_malloc(n); }
void* realloc(void* p, size_t n) { note(); return __libc_realloc(p, n); }
void* aligned_alloc(size_t a, size_t n) { note(); return __libc_memalign(a, n); }
}
static int32_t on_token(void*, int32_t) { counting = true; return 0; }
template <class F> static F* get(void* lib, const char* name) { return reinterpret_cast<F*>(dlsym(lib, name)); }
int main(int, char** argv) {
  FILE* file = fopen(argv[2], "rb");
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  void* blob = aligned_alloc(4096, size);
  if (fread(blob, 1, size, file) != static_cast<size_t>(size)) return 3;
  void* lib = dlopen(argv[1], RTLD_NOW);
  if (!lib) return 4;
  const auto step = get<decltype(mk_step)>(lib, "mk_step");
  const auto truncate = get<decltype(mk_truncate)>(lib, "mk_truncate");
  const auto generate = get<decltype(mk_generate)>(lib, "mk_generate");
  mk_model* model = nullptr;
  const void* blobs[] = {blob};
  const mk_options options{blobs, static_cast<uint64_t>(size), 1, 3, 0, 0, 60.0};
  counting = true;
  if (get<decltype(mk_create)>(lib, "mk_create")(&options, &model)) return 5;
  counting = false;
  printf("%d", count.exchange(0) > 0);  // it does count
  counting = true;
  static float logits[1 << 16];
  int32_t prompt[40];
  for (int i = 0; i < 40; i++) prompt[i] = i * 7 % 67;
  for (int i = 0; i < 200; i++) {
    if (i % 40 == 0) truncate(model, 0);
    if (step(model, prompt + i % 16, 1 + i % 3, logits, 1)) return 6;
  }
  counting = false;
  printf(" %ld", count.exchange(0));
  const mk_request kinds[] = {{0, 1, 0, 1, 0, 20, 1, nullptr, 0, 0}, {0, 1, 0, 1.5f, 0, 20, 1, nullptr, 0, 0},
                              {1.3f, 1, 0, 1, 0, 20, 1, nullptr, 0, 0},
                              {1.3f, .9f, .01f, 1.2f, 20, 20, 1, nullptr, 0, 0}};
  for (const auto& request : kinds) {
    truncate(model, 0);
    mk_result result;
    if (generate(model, prompt, 40, &request, on_token, nullptr, &result)) return 7;  // counts from the first token on
    counting = false;
    printf(" %ld", count.exchange(0));
  }
  get<decltype(mk_destroy)>(lib, "mk_destroy")(model);
}
"""


def test_steps_and_tokens_do_not_allocate(tmp_path_factory, tmp_path):
    """A program whose own malloc counts: 200 steps, then generations of every kind of sampling."""
    layout, limits = (
        Layout(kernels.tiny_spec(), precision("bf16", experts="nvfp4")),
        Limits(context=96, tokens_per_step=16),
    )
    kernel = Kernels.of_session(tmp_path_factory).path(layout, limits)
    Weights.random(layout, seed=11).blobs(tmp_path)
    compiler = platform.compiler()
    assert compiler is not None
    (tmp_path / "count.cpp").write_text(COUNTER)
    program = tmp_path / "count"
    command = [*compiler.command, "-std=c++20", "-O1", "-rdynamic", f"-I{compile.sources()}", "count.cpp"]
    subprocess.run([*command, "-o", str(program), "-ldl"], cwd=tmp_path, check=True)
    done = subprocess.run([program, kernel, tmp_path / "rank-0.bin"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 0 0 0 0 0"
