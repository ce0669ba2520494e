"""Which KV heads a rank has, and which of them a sender's rank writes for a receiver's: each head once.

Heads are split as the engine splits weights: into equal ranges by rank, and where ranks are more than heads, neighbours
have copies of the same one (docs/disaggregation.md, Which heads, has examples).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvist.errors import InvalidValueError


class Part(NamedTuple):
    """A rank, and of how many: one of the equal parts that a model is split into."""

    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks}"


WHOLE: Final = Part()


def num_copies(num_heads: int, num_ranks: int) -> int:
    """Return on how many ranks each head is; raises InvalidValueError for ranks that cannot share the heads evenly."""
    if num_heads % num_ranks and num_ranks % num_heads:
        raise InvalidValueError("tensor_parallel_size", num_ranks, f"a divisor or a multiple of {num_heads} KV heads")
    return max(1, num_ranks // num_heads)


def heads_of(num_heads: int, part: Part) -> range:
    """Return the heads of a rank: as many on each, one at least. Raises InvalidValueError as `num_copies`."""
    place = part.rank // num_copies(num_heads, part.num_ranks)
    width = max(1, num_heads // part.num_ranks)
    return range(place * width, (place + 1) * width)


def written_heads(num_heads: int, sender: Part, receiver: Part) -> range:
    """Return what a rank with heads writes for one that wants its own, or nothing: those with copies take turns."""
    copies = num_copies(num_heads, sender.num_ranks)
    ours, theirs = heads_of(num_heads, sender), heads_of(num_heads, receiver)
    if sender.rank % copies != receiver.rank % copies:
        return range(0)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
