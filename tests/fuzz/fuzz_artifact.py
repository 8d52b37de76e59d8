"""Fuzzes everything that reads a stranger's file, with atheris (pip install atheris), which follows the branches taken:

    python tests/fuzz/fuzz_artifact.py zip [libFuzzer options, such as -max_total_time=600 or a corpus folder]

Targets: zip (a zip of drawn members and lies), bytes (the file as it is), manifest (manifest.json), signature
(model.sig). Anything but a UserError, or an artifact that is not what it says, ends the run with the input in a crash-*
file. It works in fuzz-work/ and collects inputs in fuzz-corpus-TARGET/ of the current folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

with atheris.instrument_imports(include=["mkpack", "zipfile"]):
    from mkpack import artifact, container, manifest, sign, store  # noqa: F401

import hostile  # noqa: E402
from artifacts import FILES  # noqa: E402

from mkpack.errors import UserError  # noqa: E402
from mkpack.manifest import MANIFEST_NAME, Manifest  # noqa: E402

FOLDER = Path.cwd() / "fuzz-work"
NAMES = [n.encode() for n in [*FILES, MANIFEST_NAME]]
LIES = ("flags", "method", "crc", "packed", "size", "start", "attributes")


def zip_members(data: bytes) -> None:
    draw = atheris.FuzzedDataProvider(data)
    members = hostile.members()
    for _ in range(draw.ConsumeIntInRange(0, 4)):
        member = members[draw.ConsumeIntInRange(0, len(members) - 1)]
        match draw.ConsumeIntInRange(0, 4):
            case 0:
                sides = (member.local, member.central)
                for side in sides if draw.ConsumeBool() else (draw.PickValueInList(list(sides)),):
                    side[draw.PickValueInList(list(LIES))] = draw.ConsumeIntInRange(0, 2**33)
            case 1:
                member.name = draw.PickValueInList(NAMES) if draw.ConsumeBool() else draw.ConsumeBytes(16)
            case 2:
                members.insert(0, hostile.Member(draw.ConsumeBytes(16), draw.ConsumeBytes(8)))
            case 3:
                member.local["extra"] = draw.ConsumeBytes(40)
            case 4:
                member.central["extra"] = draw.ConsumeBytes(40)
    end = hostile.End(zip64=draw.ConsumeBool())
    if draw.ConsumeIntInRange(0, 3) == 0:
        end.count, end.length, end.start = (draw.ConsumeIntInRange(0, 2**33) for _ in range(3))
    content = hostile.make_zip(members, end)
    hostile.survives(FOLDER, lambda path: path.write_bytes(content))


def any_bytes(data: bytes) -> None:
    hostile.survives(FOLDER, lambda path: path.write_bytes(data))


def manifest_json(data: bytes) -> None:
    try:
        found = Manifest.parse(data, MANIFEST_NAME)
    except UserError as e:
        assert len(str(e)) < hostile.LONGEST
        return
    assert Manifest.parse(found.to_bytes(), "again") == found


def signature(data: bytes) -> None:
    path = FOLDER / "model.sig"
    path.write_bytes(data)
    for read in (sign.kind_of, sign.key_hint):
        try:
            read(path)
        except UserError as e:
            assert len(str(e)) < hostile.LONGEST


TARGETS = {"zip": zip_members, "bytes": any_bytes, "manifest": manifest_json, "signature": signature}
# What libFuzzer starts from: one good example each, written beside the work unless a corpus was named.
SEEDS = {"zip": b"", "bytes": hostile.make_zip(hostile.members()), "manifest": hostile.MANIFEST, "signature": b"{}"}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(TARGETS)} [libFuzzer options]")
    target = sys.argv.pop(1)
    if all(word.startswith("-") for word in sys.argv[1:]):
        corpus = Path.cwd() / f"fuzz-corpus-{target}"
        corpus.mkdir(exist_ok=True)
        (corpus / "seed").write_bytes(SEEDS[target])
        sys.argv.append(str(corpus))
    FOLDER.mkdir(exist_ok=True)
    atheris.Setup(sys.argv, TARGETS[target])
    atheris.Fuzz()
