"""A quantity over time in bounded memory: spans that double whenever there would be too many."""

from __future__ import annotations

from typing import NamedTuple

MAX_SPANS = 512
MIN_SPAN_S = 0.01


class Span(NamedTuple):
    """A stretch of time: when it began, events a second in it, and how many blocks were live at its end."""

    start_s: float
    events_per_s: float
    num_live: int


class Timeline:
    """Counts events and live blocks in at most `MAX_SPANS` spans of one length, whatever the time it covers."""

    def __init__(self) -> None:
        self.span_s = MIN_SPAN_S
        self._num_events: list[int] = []
        self._num_live: list[int | None] = []

    def add(self, time_s: float, num_events: int, num_live: int) -> None:
        """Count events at a time, after which so many blocks are live."""
        idx = max(0, int(time_s / self.span_s))
        while idx >= MAX_SPANS:
            self._double()
            idx = int(time_s / self.span_s)
        while len(self._num_events) <= idx:
            self._num_events.append(0)
            self._num_live.append(None)
        self._num_events[idx] += num_events
        self._num_live[idx] = num_live

    def spans(self) -> list[Span]:
        """Return all spans, in order."""
        spans: list[Span] = []
        num_live = 0
        for idx, (num_events, live) in enumerate(zip(self._num_events, self._num_live, strict=True)):
            num_live = num_live if live is None else live
            spans.append(Span(idx * self.span_s, num_events / self.span_s, num_live))
        return spans

    def _double(self) -> None:
        self.span_s *= 2
        if len(self._num_events) % 2:
            self._num_events.append(0)
            self._num_live.append(None)
        self._num_events = [sum(pair) for pair in zip(self._num_events[::2], self._num_events[1::2], strict=True)]
        pairs = zip(self._num_live[::2], self._num_live[1::2], strict=True)
        self._num_live = [first if second is None else second for first, second in pairs]
