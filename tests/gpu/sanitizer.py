"""compute-sanitizer: where it is, and what its reports say."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


def find() -> Path | None:
    """The program: that of the Python package nvidia-cuda-sanitizer-api, which may be newer than the toolkit's, else
    the toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    places = [p for package in packages for p in sorted(package.glob("cu*/bin/compute-sanitizer"))]
    on_path = shutil.which("compute-sanitizer")
    return next((p for p in [*places, *map(Path, PLACES), *([Path(on_path)] if on_path else [])] if p.exists()), None)


@dataclass(frozen=True)
class Race:
    """Two accesses, each as "Write step_dense.cuh:85" (function and offset in a kernel without line numbers), and
    how many hazards there were."""

    first: str
    second: str
    hazards: int


@dataclass(frozen=True)
class Report:
    """summaries: of every process; complaints: other errors and warnings, such as barriers that were too many to be
    followed."""

    summaries: list[str]
    races: list[Race]
    complaints: list[str]

    @property
    def clean(self) -> bool:
        """At least one process was watched to its end, and nothing was found."""
        zero = [re.match(r"(ERROR|RACECHECK) SUMMARY: 0 (errors|hazards)", line) for line in self.summaries]
        return bool(zero) and all(zero) and not self.races and not self.complaints

    def render(self) -> str:
        """Races, most hazards first, and what else was said."""
        races = sorted(self.races, key=lambda race: -race.hazards)
        lines = [f"{race.hazards:6}  {race.first}  and  {race.second}" for race in races]
        return "\n".join([*lines, *self.complaints, *self.summaries])


def parse(output: str) -> Report:
    """Of what compute-sanitizer printed, mixed with the program's own output."""
    summaries, races, complaints, first = [], [], [], ""
    for line in output.splitlines():
        if not (said := re.match(r"=========\s*(.*)", line)):
            continue
        text = said[1].strip()
        if "SUMMARY:" in text:
            summaries.append(text)
        elif race := re.match(r"(?:Error|Warning|ERROR|WARNING|Info): Race reported between (.+)", text):
            first = _access(race[1])
        elif race := re.match(r"and (.+) \[(\d+) hazards?\]", text):
            races.append(Race(first, _access(race[1]), int(race[2])))
        elif re.match(r"(?i:error|warning)\b|Invalid|Potential|Program hit", text):
            complaints.append(text)
    return Report(summaries, races, complaints)


def _access(text: str) -> str:
    """ "Write access at F+0x10 in file.cuh:12" in short."""
    found = re.match(r"(\w+) access at (.*)", text)
    if not found:
        return text
    place = re.search(r"\bin (?:\S*/)?([\w.]+:\d+)$", found[2])
    return f"{found[1]} {place[1] if place else found[2]}"
