"""What a compiled CUDA kernel takes: ptxas' words, and the code itself inside the .so, read as ELF without any tool."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mkpack.errors import InternalError

# What an SM keeps of the code it runs. A resident kernel runs the code of its layers once a layer: what does not fit is
# fetched again every time.
INSTRUCTION_CACHE = 128 << 10
# Functions that kernels call once a token or less, and nvcc's own for quotients out of the ordinary. Whatever else a
# kernel calls counts as part of its layers.
SELDOM = ("scan", "list_weight", "list_find", "sort_list", "sum_runs", "collect")
_SLOW_PATH = re.compile(r"\$__internal_\d+_\$__cuda_\w+_slowpath")
# The kernels of a model in the order in which model.cu writes the shared memory of their launches.
LAUNCHED = ("step_kernel", "decode_kernel")
_EM_CUDA = 190
_SHT_NOBITS = 8
_STT_FUNC = 2


@dataclass(frozen=True)
class Resources:
    """One kernel for one architecture. Bytes, except `registers`, which counts 32-bit registers a thread at launch.

    stack, spill_stores, spill_loads: sums over the kernel and everything it calls. shared: what the kernel declares and
    what its launch asks for. code: machine code, with the functions that the kernel calls. hot: the same without those
    that run once a token or less; to be held against INSTRUCTION_CACHE.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    code: int
    hot: int

    def render(self) -> str:
        text = (
            f"{self.kernel} ({self.arch}): {self.registers} registers, {self.stack} B stack, "
            f"{self.spill_stores + self.spill_loads} B spilled, {self.shared} B shared memory, "
            f"{self.code / 1024:.1f} KB of code, {self.hot / 1024:.1f} KB of it hot "
            f"({100 * self.hot / INSTRUCTION_CACHE:.0f}% of the instruction cache)"
        )
        return text + (f"; warning: {self.warning}" if self.warning else "")

    @property
    def warning(self) -> str | None:
        """What makes this kernel slower than it need be."""
        over, spilled = (self.hot - INSTRUCTION_CACHE) / 1024, self.spill_stores + self.spill_loads
        texts = [f"the code of a layer may be {over:.1f} KB more than the cache holds"] * (over > 0)
        texts += ["registers are spilled"] * (spilled > 0)
        return "; ".join(texts) or None


class Spills(InternalError):
    """A kernel lays registers aside in memory."""


def report(library: bytes, ptxas: str, registers: int = 0, may_spill: bool = False) -> tuple[Resources, ...]:
    """Resources of every kernel in a .so that nvcc made uncompressed, from it and from what `ptxas -v` said.

    The host side writes the shared memory that it launches the kernels of LAUNCHED with, a uint32 each, into the
    section .mkpack.shared. registers: a thread of them must have at launch, because their warps deal them out again.

    Raises Spills when a kernel spills, InternalError when the two do not tell of the same kernels, or when one of
    LAUNCHED has other registers than it deals out.
    """
    code = dict(_code_sizes(library))
    found = {r.kernel: r for r in _read_ptxas(ptxas, code)}
    if not found or found.keys() != {_plain(name) for name in code}:
        raise InternalError(
            f"ptxas tells of the kernels {', '.join(sorted(found)) or 'none'}, but the compiled file holds "
            f"{', '.join(sorted(map(_plain, code))) or 'none'}; this CUDA release writes something else than expected"
        )
    spilled = [r for r in found.values() if r.spill_stores or r.spill_loads]
    if spilled and not may_spill:
        raise Spills(
            "a kernel that spills registers is slow, so this is not built: "
            + "; ".join(
                f"{r.kernel} for {r.arch} spills {r.spill_stores} bytes in stores and {r.spill_loads} in loads"
                for r in spilled
            )
        )
    words = sections(library).get(".mkpack.shared", b"")
    launch = dict(zip(LAUNCHED, struct.unpack(f"<{len(words) // 4}I", words), strict=False))
    for name, r in found.items():
        if (kernel := name.partition("<")[0]) not in LAUNCHED:
            continue
        if kernel not in launch:
            raise InternalError(f"the compiled file does not tell the shared memory that {kernel} is launched with")
        if -(-r.registers // 8) * 8 < registers:  # they are given out by eights
            raise InternalError(
                f"{name} for {r.arch} takes {r.registers} registers a thread, and its warps deal out {registers}: "
                "one that asks for more than there are would wait for ever"
            )
        found[name] = replace(r, shared=r.shared + launch[kernel])
    return tuple(found[name] for name in sorted(found))


def _read_ptxas(text: str, code: dict[str, tuple[int, int]]) -> Iterator[Resources]:
    """One entry function after the other: 'Compiling entry function', stack and spills, 'Used n registers', then stack
    and spills of every function that it calls. code: bytes of each, all and hot."""
    entry = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
    frame = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        head = entry.search(part)
        registers = re.search(r"Used (\d+) registers", part)
        frames = [tuple(map(int, found)) for found in frame.findall(part)]
        if not (head and frames and registers):
            raise InternalError(f"cannot read what ptxas says of a kernel: {part.strip()[:400]}")
        shared = re.search(r"(\d+) bytes smem", part)
        name, arch = head.groups()
        stack, stores, loads = map(sum, zip(*frames, strict=True))
        smem = int(shared[1]) if shared else 0
        yield Resources(_plain(name), arch, int(registers[1]), stack, stores, loads, smem, *code.get(name, (0, 0)))


def _plain(mangled: str) -> str:
    """The function's own name and template numbers of a mangled name: decode_kernel<0, 1>."""
    at = 3 if mangled.startswith("_ZN") else 2 if mangled.startswith("_Z") else None
    if at is None:
        return mangled
    name = mangled
    while length := re.match(r"\d+", mangled[at:]):
        at += len(length[0])
        name, at = mangled[at : at + int(length[0])], at + int(length[0])
    numbers = re.match(r"I((?:L[bi]\d+E)+)E", mangled[at:])
    if numbers is None:
        return name
    return f"{name}<{', '.join(re.findall('L[bi]([0-9]+)E', numbers[1]))}>"


def _code_sizes(library: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """(mangled name, bytes of machine code, all and hot) of every kernel in the GPU binaries that a host library
    carries."""
    fat = sections(library).get(".nv_fatbin", b"")
    at = fat.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", fat, at + 18)[0] == _EM_CUDA:
            elf = fat[at:]
            kernels = {n: len(body) for n, body in sections(elf).items() if n.startswith(".text.")}
            seldom = dict.fromkeys(kernels, 0)
            for section, function, size in _functions(elf):
                if section in seldom and _is_seldom(function, section.removeprefix(".text.")):
                    seldom[section] += size
            for name, size in kernels.items():
                yield name.removeprefix(".text."), (size, size - seldom[name])
        at = fat.find(b"\x7fELF", at + 4)


def _is_seldom(symbol: str, kernel: str) -> bool:
    """Of a symbol in a kernel's code. ptxas calls the functions that a kernel calls $kernel$function."""
    function = symbol.removeprefix(f"${kernel}$")
    return function != symbol and _plain(function).partition("<")[0] in SELDOM or bool(_SLOW_PATH.fullmatch(symbol))


def _functions(elf: bytes) -> Iterator[tuple[str, str, int]]:
    """(section, name, bytes) of every function in the symbol table."""
    table = list(_sections(elf))
    found = dict(table)
    symbols, names = found.get(".symtab", b""), found.get(".strtab", b"")
    for at in range(0, len(symbols) - 23, 24):
        name, info, _, section, _, size = struct.unpack_from("<IBBHQQ", symbols, at)
        if info & 15 == _STT_FUNC and section < len(table):
            yield table[section][0], names[name : names.index(b"\0", name)].decode(), size


def sections(elf: bytes) -> dict[str, bytes]:
    """Sections of a little-endian 64-bit ELF file, by name. Raises InternalError when it is none."""
    return dict(_sections(elf))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise InternalError("the compiler's output is no 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, nbytes in headers:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        yield text, b"" if kind == _SHT_NOBITS else elf[offset : offset + nbytes]
