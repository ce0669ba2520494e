"""How many requests a worker is given at a time: what it runs, as it reports, and a small reserve.

    it has a queue of its own    the bound falls to what it ran of late and the reserve, so that no batch runs dry
    it has hardly one            the bound grows by a quarter, until it bounds nothing: the worker may take more
    it has nothing to do         the bound is forgotten
    it never reports             no bound, but a fixed one
    it is new among busy others  it warms up: a few requests at first, and one more for each first byte and each end

The reserve stands in the worker's own queue; all beyond it waits at the router, where it is decided late.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MIN_RESERVE = 4
RESERVE_SHARE = 8
"""The reserve is at least so small a part of what runs …"""
RESERVES_A_SECOND = 10
"""… and what ends in so small a part of a second: the router needs that long to make up for many that end at once."""
WARM_UP_REQUESTS = 4
WARM_UP_STEPS = 512
"""What a worker may have at first, and after how many first bytes and ends it is warm."""
_FAR = 4
"""A bound of so many times what is in flight bounds nothing."""
_PEAK_KEPT = 0.9
"""Of what ran at most, from report to report: requests that end together leave a batch half empty for a moment."""

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
    """A worker's bound, None where there is none; `paused_until_s` is set while it has asked to be spared.

    `warms_from` is how many steps (`LoadTracker.num_steps`) it had taken when it came, None where it is warm.
    """

    fixed_requests: int | None = None
    learnt_requests: int | None = None
    paused_until_s: float = 0.0
    warms_from: int | None = None
    _num_running: int = 0
    _peak_running: float = 0.0
    _num_ended: int = 0

    @property
    def max_requests(self) -> int | None:
        """Return how many requests the worker is given at a time."""
        return self.learnt_requests if self.fixed_requests is None else self.fixed_requests

    def bound(self, num_steps: int) -> int | None:
        """Return how many requests it is given at a time now that it has taken so many steps."""
        most = self.max_requests
        if self.warms_from is None:
            return most
        let_in = WARM_UP_REQUESTS + max(0, num_steps - self.warms_from)  # a front that died takes its count along
        return let_in if most is None else min(most, let_in)

    def learn(self, report: Report, num_in_flight: int, num_ended: int = 0) -> None:
        """Take a report that came while so many of the router's requests were in flight, and so many had ended so far.

        Where others send to the worker too, each router takes its share of what is too much.
        """
        num_more, self._num_running = report.num_running - self._num_running, report.num_running
        self._peak_running = max(report.num_running, self._peak_running * _PEAK_KEPT)
        peak, num_just_ended, self._num_ended = int(self._peak_running), num_ended - self._num_ended, num_ended
        # A batch that grows takes as many from the worker's queue until the next report.
        reserve = max(MIN_RESERVE, peak // RESERVE_SHARE, num_just_ended // RESERVES_A_SECOND, num_more)
        excess = report.num_running + report.num_waiting - peak - reserve
        bound = self.learnt_requests
        if excess > 0 and num_in_flight:
            share = min(1.0, num_in_flight / (report.num_running + report.num_waiting))
            self.learnt_requests = max(MIN_RESERVE, num_in_flight - int(excess * share))
        elif bound is not None and report.num_waiting < reserve // 2:
            grown = bound + max(MIN_RESERVE, bound // 4)
            self.learnt_requests = grown if grown < _FAR * max(MIN_RESERVE, num_in_flight) else None

    def forget(self) -> None:
        """Take an idle worker: what comes next may be of another kind."""
        self.learnt_requests, self._num_running, self._peak_running = None, 0, 0.0
