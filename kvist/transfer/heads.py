"""Calculates which KV heads a rank has, and which of them a sender's rank writes to a receiver's, each head once.

Heads are split as the engine splits weights: into equal ranges by rank. Where there are more ranks than heads,
neighbours have copies of the same one (docs/disaggregation.md, Which heads, has examples).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvist.errors import InvalidValueError


class Part(NamedTuple):
    """One rank of a model that is split over `num_ranks`."""

    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks}"


WHOLE: Final = Part()


def num_copies(num_heads: int, num_ranks: int) -> int:
    """Return the number of ranks that have each head; raises InvalidValueError if heads cannot be split evenly."""
    if num_heads % num_ranks and num_ranks % num_heads:
        raise InvalidValueError("tensor_parallel_size", num_ranks, f"a divisor or a multiple of {num_heads} KV heads")
    return max(1, num_ranks // num_heads)


def heads_of(num_heads: int, part: Part) -> range:
    """Return a rank's heads: equally many on each, at least one. Raises InvalidValueError as `num_copies` does."""
    place = part.rank // num_copies(num_heads, part.num_ranks)
    width = max(1, num_heads // part.num_ranks)
    return range(place * width, (place + 1) * width)


def written_heads(num_heads: int, sender: Part, receiver: Part) -> range:
    """Return the heads that a sender's rank writes to a receiver's; ranks with copies share the receivers."""
    copies = num_copies(num_heads, sender.num_ranks)
    ours, theirs = heads_of(num_heads, sender), heads_of(num_heads, receiver)
    if sender.rank % copies != receiver.rank % copies:
        return range(0)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
