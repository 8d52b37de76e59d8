"""Reports of compute-sanitizer, read by tests/gpu/sanitizer.py: which races, and when a run is clean."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import sanitizer

KERNEL = "void mk::step_kernel<(int)2, (bool)0>(mk::StepParams, unsigned int)"
# Of versions 2025.3.1 and 2026.4 on an H200, shortened. Inlined code of a kernel has an offset and no line; functions
# are named with their arguments, which hold commas and "(instance 1)". The summary counts first accesses, not pairs.
RACES = f"""\
========= COMPUTE-SANITIZER
a line of the program
========= Error: Race reported between Write access at mk::page_copy(unsigned int, const void *, unsigned long)+0x18260 in ring.cuh:91
=========     and Read access at {KERNEL}+0x1e50 [51584 hazards]
=========     and Read access at mk::step_pair(mk::StepBlock &, mk::Ring<(int)4> &)+0x11750 in step_experts.cuh:81 [3968 hazards]
========= 
========= Error: Race reported between Write access at {KERNEL}+0x1a640 in step_kernel.cuh:171
=========     and Read access at void mk::step_produce_dense<(int)1>(const mk::StepBlock &)::[lambda() (instance 1)]::operator ()() const+0x1c1c0 in step_producer.cuh:125 [32 hazards]
========= 
========= Error: Race reported between Read access at {KERNEL}+0x9480
=========     and Write access at {KERNEL}+0x9640 [544 hazards]
========= 
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""  # noqa: E501
UNABLE = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Error: couldn't find exit code.
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_races_with_both_places():
    report = sanitizer.parse(RACES)
    assert report.races == [
        sanitizer.Race("Write ring.cuh:91", f"Read {KERNEL}+0x1e50", 51584),
        sanitizer.Race("Write ring.cuh:91", "Read step_experts.cuh:81", 3968),
        sanitizer.Race("Write step_kernel.cuh:171", "Read step_producer.cuh:125", 32),
        sanitizer.Race(f"Read {KERNEL}+0x9480", f"Write {KERNEL}+0x9640", 544),
    ]
    assert not report.clean
    assert report.render().splitlines() == [
        f" 51584  Write ring.cuh:91  and  Read {KERNEL}+0x1e50",
        "  3968  Write ring.cuh:91  and  Read step_experts.cuh:81",
        f"   544  Read {KERNEL}+0x9480  and  Write {KERNEL}+0x9640",
        "    32  Write step_kernel.cuh:171  and  Read step_producer.cuh:125",
        "RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)",
    ]


def test_clean_is_only_what_was_watched_to_its_end():
    assert sanitizer.parse(CLEAN).clean
    assert sanitizer.parse("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n").clean
    assert not sanitizer.parse("========= COMPUTE-SANITIZER\n").clean
    assert not sanitizer.parse(UNABLE).clean and sanitizer.parse(UNABLE).complaints == [
        "Error: Target application terminated before first instrumented API call",
        "Error: couldn't find exit code.",
    ]
    assert not sanitizer.parse(CLEAN + CLEAN.replace("0 hazards", "10 hazards")).clean
    overflow = "Detected overflow of tracked cuda::barrier structures. Results might be incorrect."
    for complaint in (f"Warning: {overflow}", "Error: No CUDA device", "Invalid __global__ read of size 4 bytes"):
        report = sanitizer.parse(f"========= {complaint}\n{CLEAN}")
        assert not report.clean and report.complaints == [complaint]
