"""What every benchmark prints: a table, then a last line of JSON with the device, versions and commit it ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any


def best_and_spread(repetitions: Iterable[float]) -> tuple[float, float, float]:
    """Return the least, the median and the greatest of some repetitions."""
    ordered = sorted(repetitions)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]


def time_call_us(function: Callable[[], object], num_calls: int) -> tuple[float, float]:
    """Return the microseconds of one call, averaged over some in a row: on the wall, and of CPU over all threads."""
    wall, cpu = perf_counter(), process_time()
    for _ in range(num_calls):
        function()
    return (perf_counter() - wall) / num_calls * 1e6, (process_time() - cpu) / num_calls * 1e6


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def device() -> str:
    """Return the processor this runs on, and how many of them."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]} ({platform.machine()})" if names else platform.processor()


def report(name: str, markdown: str, results: dict[str, Any], packages: Sequence[str], save: bool) -> None:
    """Print the tables, then the JSON line; with `save`, also write both below benchmarks/results."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    load = round(os.getloadavg()[2], 1)
    facts = {"name": name, "date": date.today().isoformat(), "device": device(), "load_15_min": load, "commit": commit}
    line = json.dumps({**facts, "versions": versions, **results})
    markdown += f"\n\n{facts['date']}, {facts['device']}, load {load}, commit {commit}, " + ", ".join(
        f"{package} {number}" for package, number in versions.items()
    )
    print(markdown)
    print(line)
    if save:
        (here / "results" / f"{name}.md").write_text(f"{markdown}\n")
        (here / "results" / f"{name}.json").write_text(f"{line}\n")
