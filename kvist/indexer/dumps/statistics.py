"""How keeping an index on disk goes: a frozen value, as `/health` and as Prometheus tell it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class StateStatistics:
    """What became of what was loaded, in streams, and how saving goes. None for what has not happened yet."""

    is_loaded: bool
    num_loaded: int
    num_proven: int
    """They go on from where they were; `num_cleared` did not, or it could not be proven."""
    num_cleared: int
    num_waiting: int
    """They are not followed yet; `num_dropped` no longer, or were not for too long."""
    num_dropped: int
    num_saves: int
    num_failures: int
    failure: str | None
    """Why the last save failed, if it did."""
    size_bytes: int | None
    age_s: float | None

    @property
    def is_proven(self) -> bool:
        """Return whether nothing of what was loaded is still to be proven."""
        return self.is_loaded and self.num_proven + self.num_cleared + self.num_dropped == self.num_loaded

    def described(self) -> dict[str, object]:
        """Return what `/health` says of it."""
        return {
            "is_proven": self.is_proven,
            "streams": {
                "loaded": self.num_loaded,
                "proven": self.num_proven,
                "cleared": self.num_cleared,
                "waiting": self.num_waiting,
                "dropped": self.num_dropped,
            },
            "saves": self.num_saves,
            "save_failures": self.num_failures,
            "last_save_failure": self.failure,
            "last_save_age_s": None if self.age_s is None else round(self.age_s, 3),
            "bytes": self.size_bytes,
        }

    def metrics(self) -> Iterator[Metric]:
        """Yield the same for Prometheus."""
        streams = GaugeMetricFamily(
            "kvist_state_streams", "Streams loaded from disk by what became of them", labels=["fate"]
        )
        for fate in ("loaded", "proven", "cleared", "waiting", "dropped"):
            streams.add_metric([fate], getattr(self, f"num_{fate}"))
        yield streams
        yield CounterMetricFamily("kvist_state_saves", "Times that the index was saved", self.num_saves)
        yield CounterMetricFamily("kvist_state_save_failures", "Saves that failed", self.num_failures)
        if self.age_s is not None:
            yield GaugeMetricFamily("kvist_state_age_seconds", "Since the last save", self.age_s)
        if self.size_bytes is not None:
            yield GaugeMetricFamily("kvist_state_bytes", "Size of the last save", self.size_bytes)
