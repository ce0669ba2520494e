"""How many requests a worker is given at a time: what it runs, as it reports, and a small reserve.

    it has a queue of its own    the bound falls to what it runs and the reserve, by which its batch never runs dry
    it has hardly one            the bound, if reached, grows by a quarter: it may take more
    it never reports             no bound, but a fixed one

The reserve stands in the worker's own queue; all beyond it waits at the router, where it is decided late.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MIN_RESERVE = 4
RESERVE_SHARE = 8
"""The reserve is so small a part of what runs: what ends between two reports is made up for by the router at once."""

_GAUGE = re.compile(
    rb"(?m)^(?:vllm:num_requests_|sglang:num_|kvist_engine_requests_)(running|waiting|running_reqs|queue_reqs)"
    rb"(?:\{[^}\n]*\})? ([0-9.e+]+)$"
)


class Report(NamedTuple):
    """What a worker says it does: requests in its batch, and those that it lets wait."""

    num_running: int
    num_waiting: int


def read_report(page: bytes) -> Report | None:
    """Return what a metrics page of vLLM, SGLang or Kvist's engine reports, over all ranks; None for any other page."""
    counts = {True: 0.0, False: 0.0}
    matches = _GAUGE.findall(page)
    try:
        for name, value in matches:
            counts[name.startswith(b"running")] += float(value)
        return Report(int(counts[True]), int(counts[False])) if matches else None
    except (ValueError, OverflowError):
        return None


@dataclass(slots=True)
class Capacity:
    """A worker's bound, None where there is none; `paused_until_s` is set while it has asked to be spared."""

    fixed_requests: int | None = None
    learnt_requests: int | None = None
    paused_until_s: float = 0.0

    @property
    def max_requests(self) -> int | None:
        """Return how many requests the worker is given at a time."""
        return self.learnt_requests if self.fixed_requests is None else self.fixed_requests

    def learn(self, report: Report, num_in_flight: int) -> None:
        """Take a report that came while so many of the router's requests were in flight.

        Where others send to the worker too, each router takes its share of what is too much.
        """
        reserve = max(MIN_RESERVE, report.num_running // RESERVE_SHARE)
        excess = report.num_waiting - reserve
        bound = self.learnt_requests
        if excess > 0 and num_in_flight:
            share = min(1.0, num_in_flight / (report.num_running + report.num_waiting))
            self.learnt_requests = max(MIN_RESERVE, num_in_flight - int(excess * share))
        elif bound is not None and num_in_flight >= bound and report.num_waiting < reserve // 2:
            self.learnt_requests = bound + max(MIN_RESERVE, bound // 4)
