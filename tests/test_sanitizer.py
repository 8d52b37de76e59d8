"""Reports of compute-sanitizer, read by tests/gpu/sanitizer.py: which races, and when a run is clean."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import sanitizer

KERNEL = "void mk::step_kernel<(int)2, (bool)0>(mk::StepParams, unsigned int)"
RACES = f"""\
========= COMPUTE-SANITIZER
a line of the program
========= Error: Race reported between Write access at {KERNEL}+0x33d0 in ring.cuh:120
=========     and Read access at {KERNEL}+0x4b50 in step_dense.cuh:84 [2048 hazards]
=========     and Read access at {KERNEL}+0x4b60 in step_dense.cuh:85 [512 hazards]
=========
========= Warning: Race reported between Read access at {KERNEL}+0x4b60
=========     and Write access at {KERNEL}+0x4b70 in step_dense.cuh:86 [1 hazard]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_races_with_both_places():
    report = sanitizer.parse(RACES)
    assert report.races == [
        sanitizer.Race("Write ring.cuh:120", "Read step_dense.cuh:84", 2048),
        sanitizer.Race("Write ring.cuh:120", "Read step_dense.cuh:85", 512),
        sanitizer.Race(f"Read {KERNEL}+0x4b60", "Write step_dense.cuh:86", 1),
    ]
    assert not report.clean
    assert report.render().splitlines() == [
        "  2048  Write ring.cuh:120  and  Read step_dense.cuh:84",
        "   512  Write ring.cuh:120  and  Read step_dense.cuh:85",
        f"     1  Read {KERNEL}+0x4b60  and  Write step_dense.cuh:86",
        "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)",
    ]


def test_clean_is_only_what_was_watched_to_its_end():
    assert sanitizer.parse(CLEAN).clean
    assert sanitizer.parse("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n").clean
    assert not sanitizer.parse("========= COMPUTE-SANITIZER\n").clean
    assert not sanitizer.parse(CLEAN + CLEAN.replace("0 hazards", "10 hazards")).clean
    overflow = "Detected overflow of tracked cuda::barrier structures. Results might be incorrect."
    for complaint in (f"Warning: {overflow}", "Error: No CUDA device", "Invalid __global__ read of size 4 bytes"):
        report = sanitizer.parse(f"========= {complaint}\n{CLEAN}")
        assert not report.clean and report.complaints == [complaint]
