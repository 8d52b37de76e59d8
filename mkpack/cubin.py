"""What a compiled CUDA kernel takes: ptxas' words, and the code itself inside the .so, read as ELF without any tool."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mkpack.errors import InternalError

# What an SM keeps of the code it runs. A resident kernel runs all of its code once a layer: what does not fit is
# fetched again every time.
INSTRUCTION_CACHE = 128 << 10
_EM_CUDA = 190
_SHT_NOBITS = 8


@dataclass(frozen=True)
class Resources:
    """One kernel for one architecture. Bytes, except `registers`, which counts 32-bit registers a thread at launch.

    shared: what the kernel declares, and of decode_kernel what its launch asks for. code: machine code, to be held
    against INSTRUCTION_CACHE.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    code: int

    def render(self) -> str:
        return (
            f"{self.kernel} ({self.arch}): {self.registers} registers, {self.stack} B stack, "
            f"{self.spill_stores + self.spill_loads} B spilled, {self.shared} B shared memory, "
            f"{self.code / 1024:.1f} KB of code ({100 * self.code / INSTRUCTION_CACHE:.0f}% of the instruction cache)"
        )


def report(library: bytes, ptxas: str, may_spill: bool = False) -> tuple[Resources, ...]:
    """Resources of every kernel in a .so that nvcc made uncompressed, from it and from what `ptxas -v` said.

    The host side writes the shared memory that it launches decode_kernel with, uint32, into the section .mkpack.shared.

    Raises InternalError when the two do not tell of the same kernels, or when a kernel spills registers.
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
        raise InternalError(
            "a kernel that spills registers is slow, so this is not built: "
            + "; ".join(
                f"{r.kernel} for {r.arch} spills {r.spill_stores} bytes in stores and {r.spill_loads} in loads"
                for r in spilled
            )
        )
    launch = sections(library).get(".mkpack.shared", b"\0\0\0\0")
    for name, r in found.items():
        if name.startswith("decode_kernel"):
            found[name] = replace(r, shared=r.shared + struct.unpack("<I", launch)[0])
    return tuple(found[name] for name in sorted(found))


def _read_ptxas(text: str, code: dict[str, int]) -> Iterator[Resources]:
    """One entry function after the other: 'Compiling entry function', stack and spills, then 'Used n registers'."""
    entry = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        head = entry.search(part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if not (head and stack and registers):
            raise InternalError(f"cannot read what ptxas says of a kernel: {part.strip()[:400]}")
        shared = re.search(r"(\d+) bytes smem", part)
        name, arch = head.groups()
        frame, stores, loads = map(int, stack.groups())
        smem = int(shared[1]) if shared else 0
        yield Resources(_plain(name), arch, int(registers[1]), frame, stores, loads, smem, code.get(name, 0))


def _plain(mangled: str) -> str:
    """The function's own name and template booleans of a mangled name: decode_kernel<0>."""
    at = 3 if mangled.startswith("_ZN") else 2 if mangled.startswith("_Z") else None
    if at is None:
        return mangled
    name = mangled
    while length := re.match(r"\d+", mangled[at:]):
        at += len(length[0])
        name, at = mangled[at : at + int(length[0])], at + int(length[0])
    flags = re.match(r"I((?:Lb[01]E)+)E", mangled[at:])
    return f"{name}<{', '.join(re.findall(r'Lb([01])E', flags[1]))}>" if flags else name


def _code_sizes(library: bytes) -> Iterator[tuple[str, int]]:
    """(mangled name, bytes of machine code) of every kernel in the GPU binaries that a host library carries."""
    fat = sections(library).get(".nv_fatbin", b"")
    at = fat.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", fat, at + 18)[0] == _EM_CUDA:
            for name, body in sections(fat[at:]).items():
                if name.startswith(".text."):
                    yield name.removeprefix(".text."), len(body)
        at = fat.find(b"\x7fELF", at + 4)


def sections(elf: bytes) -> dict[str, bytes]:
    """Sections of a little-endian 64-bit ELF file, by name. Raises InternalError when it is none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise InternalError("the compiler's output is no 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for name, kind, _, _, offset, nbytes in headers:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        found[text] = b"" if kind == _SHT_NOBITS else elf[offset : offset + nbytes]
    return found
