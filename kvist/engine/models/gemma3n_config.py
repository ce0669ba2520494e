"""What only Gemma 3n has."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import InvalidValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig:
    """Alternating updates over several residual streams, and a low-rank branch beside attention.

    Each layer computes on the stream `active_stream` alone; the others are predicted from all and corrected by what it
    found. `has_output_scale` scales the active stream before the layer's own embedding is mixed in.
    """

    num_streams: int
    active_stream: int
    has_output_scale: bool
    laurel_rank: int

    def __post_init__(self) -> None:
        """Raise InvalidValueError when no stream is the active one."""
        if not 0 <= self.active_stream < self.num_streams:
            raise InvalidValueError("altup_active_idx", self.active_stream, f"0 to {self.num_streams - 1}")
