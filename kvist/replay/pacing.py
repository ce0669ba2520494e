"""When a recorded message is due again."""

from __future__ import annotations

from kvist.errors import InvalidValueError
from kvist.replay.format import Record


class Pace:
    """Spaces messages as they were recorded, `speed` times as fast; with speed None all are due at once.

    Between two sessions, and between two rounds, nothing was recorded: no time passes there. Due times never decrease.
    """

    def __init__(self, speed: float | None = 1.0) -> None:
        if speed is not None and not 0 < speed < float("inf"):
            raise InvalidValueError("speed", speed, "a positive number")
        self._speed = speed
        self._run: tuple[int, int] | None = None
        self._base_ns = 0
        self._base_due_s = 0.0
        self._due_s = 0.0

    def due_s(self, round_idx: int, record: Record) -> float:
        """Return how many seconds after the first message this one is due; to be called in order."""
        if self._speed is None:
            return 0.0
        run = (round_idx, record.session)
        if run != self._run:
            self._run, self._base_ns, self._base_due_s = run, record.mono_ns, self._due_s
        passed_s = (record.mono_ns - self._base_ns) * 1e-9 / self._speed
        self._due_s = max(self._due_s, self._base_due_s + passed_s)
        return self._due_s
