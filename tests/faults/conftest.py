"""What the fault histories amount to, in one line at the end."""

from __future__ import annotations

import statistics

import pytest
from fault_harness.fleet import Tally

_tallies: dict[str, Tally] = {}


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """What a test plays is added to this; the summary tells of it."""
    return _tallies.setdefault(request.node.name.partition("[")[0], Tally())


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range | None:
    """The seeds to play, None for those of the test."""
    said = request.config.getoption("--fault-seed")
    if said is None:
        return None
    first, _, end = said.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, played in _tallies.items():
        if played.num_histories:
            terminalreporter.write_line(f"{name}: {_described(played)}")


def _described(played: Tally) -> str:
    kinds = sorted(played.faults.items(), key=lambda item: -item[1])
    faults = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
    exact = ""
    if played.until_exact_s:
        median_s, longest_s = statistics.median(played.until_exact_s), max(played.until_exact_s)
        exact = f", exact {median_s:.1f} s after the last fault (median), {longest_s:.1f} s (longest)"
    return (
        f"{played.num_histories:,} histories, {played.num_blocks:,} blocks, "
        f"{played.num_ranks:,} ranks of which {played.num_partial:,} end partial, "
        f"{played.num_checks:,} looks at the index, "
        f"{sum(played.faults.values()):,} faults ({faults}){exact}"
    )
