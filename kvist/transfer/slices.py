"""Which block of the sender belongs into which block of the receiver.

A slice's token range is always of the logical prompt. What the receiver has cached, and what has slid out of a window,
shortens the lists of blocks instead, each group's by itself. Locally a list is *positional*: a block table by ordinal,
with holes. On the wire it is a *suffix*: it ends at the end of the slice, so that both sides can tell where it starts
from how long it is. With B = 16, a prompt of 100 tokens and W = 40, blocks 0 to 2 are stale:

    ordinal            0   1   2   3   4   5   6
    sender's table     -   -   -  13  14  15  16     suffix [13, 14, 15, 16], from token 48
    receiver's table   -   -   -   -  24  25  26     suffix [24, 25, 26], from token 64: block 3 is cached
    pairs                             14→24  15→25  16→26

Sequences have one beam: there is no search over several in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvist.errors import InvalidValueError, KvistError
from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache.sequences import ABSENT
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks


class BlockCountMismatchError(KvistError):
    """The blocks of sender and receiver do not match: the two have counted a prompt differently, nothing is sent."""

    def __init__(self, group_id: int, reason: str) -> None:
        super().__init__(f"block count mismatch in group {group_id}: {reason}")
        self.group_id = group_id
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, end) of a prompt; empty when they are equal."""

    start: int
    end: int

    def __post_init__(self) -> None:
        """Raise InvalidValueError unless 0 <= start <= end."""
        if not 0 <= self.start <= self.end:
            raise InvalidValueError("token_range", (self.start, self.end), "0 <= start <= end")


@dataclass(frozen=True, slots=True)
class KvSlice:
    """A range of a prompt and the blocks that hold it: a list a group, each a suffix that ends at the range's end."""

    token_range: TokenRange
    block_ids_per_group: tuple[tuple[int, ...], ...]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """What decides where one group's lists start.

    `prompt_len` never counts speculative or generated tokens. It may be None only where nothing slides out.
    """

    group_id: int
    window: KnownWindow
    block_size: int
    prompt_len: int | None

    def __post_init__(self) -> None:
        """Raise InvalidValueError, naming the group, for a window whose stale blocks no prompt length tells."""
        if self.prompt_len is None and self.window is not FULL:
            raise InvalidValueError(f"prompt_len of group {self.group_id}", None, f"a length, for W = {self.window}")

    def effective_cached_tokens(self, num_tokens: int) -> int:
        """Return from which token on anything has to be there, if the first `num_tokens` already are.

        The one place where a start is moved behind the stale blocks. They are those of the *prompt's* end, wherever the
        slice ends: only what the query behind the prompt sees is kept. Not rounded to blocks.
        """
        if self.prompt_len is None:
            return num_tokens
        return max(num_tokens, num_stale_blocks(self.prompt_len, self.window, self.block_size) * self.block_size)


class Suffix(NamedTuple):
    """Blocks that end where their slice does, and the token that the first of them begins with."""

    start_token: int
    block_ids: tuple[int, ...]


class BlockPairs(NamedTuple):
    """Equally many blocks of either side, first to first, and the token that the first pair begins with."""

    start_token: int
    source_ids: tuple[int, ...]
    destination_ids: tuple[int, ...]


def raw_cached_tokens(num_hit_tokens: int | None, num_groups: int, block_size: int) -> tuple[int, ...]:
    """Return how many tokens each group has cached, in whole blocks: zeros without reuse (None), also under a window.

    Raw: nothing is known of windows here. `SliceGroup.effective_cached_tokens` is where they come in.
    """
    num_tokens = 0 if num_hit_tokens is None else num_hit_tokens // block_size * block_size
    return (num_tokens,) * num_groups


def positional_block_ids(
    table: Sequence[int], slice_end: int, block_size: int, num_cached_tokens: int = 0
) -> tuple[int, ...]:
    """Return the blocks of a table by ordinal that a slice needs, holes left out: a suffix that ends at `slice_end`.

    Stale blocks are holes already; speculative and spare ones lie behind the end, and cached ones before the start.
    """
    wanted = table[num_cached_tokens // block_size : num_blocks_for(slice_end, block_size)]
    return tuple(block_id for block_id in wanted if block_id != ABSENT)


def slice_of_tables(
    tables: Sequence[Sequence[int]],
    token_range: TokenRange,
    block_size: int,
    cached_tokens: Sequence[int],
    *,
    is_last: bool = True,
) -> KvSlice:
    """Return the slice that covers a range of the prompt, from a table and a count of cached tokens a group."""
    block_ids = (
        positional_block_ids(table, token_range.end, block_size, max(num_cached, token_range.start))
        for table, num_cached in zip(tables, cached_tokens, strict=True)
    )
    return KvSlice(token_range, tuple(block_ids), is_last)


def suffix(group: SliceGroup, block_ids: Sequence[int], slice_end: int, num_cached_tokens: int = 0) -> Suffix:
    """Return a list that ends at `slice_end` without what is stale or cached at its head, and where it then starts.

    Moving the start drops the blocks before it; a start moved alone would pair what is left with the wrong blocks. A
    block of which only a part is cached stays. Raises BlockCountMismatchError for more blocks than the slice has.
    """
    total = num_blocks_for(slice_end, group.block_size)
    if len(block_ids) > total:
        raise BlockCountMismatchError(group.group_id, f"{len(block_ids)} blocks, but {slice_end} tokens fill {total}")
    first_held = total - len(block_ids)
    raw_start = max(first_held, num_cached_tokens // group.block_size) * group.block_size
    start_token = group.effective_cached_tokens(raw_start)
    return Suffix(start_token, tuple(block_ids[start_token // group.block_size - first_held :]))


def align(source: Suffix, destination: Suffix, block_size: int) -> BlockPairs:
    """Return the blocks of both lists that begin with the same tokens; the later start counts. O(n)."""
    start_token = max(source.start_token, destination.start_token)
    source_ids = source.block_ids[(start_token - source.start_token) // block_size :]
    destination_ids = destination.block_ids[(start_token - destination.start_token) // block_size :]
    num_pairs = min(len(source_ids), len(destination_ids))
    return BlockPairs(start_token, source_ids[:num_pairs], destination_ids[:num_pairs])


def pair_blocks(
    group: SliceGroup,
    source_ids: Sequence[int],
    destination_ids: Sequence[int],
    slice_end: int,
    destination_start_token: int | None = None,
) -> BlockPairs:
    """Return what to copy where, for every block that the receiver will read; both lists end at `slice_end`.

    The receiver may ask for stale blocks, which are trimmed, and for less than the sender has, down to nothing. Raises
    BlockCountMismatchError if it needs a block that the sender does not have: it would decode from whatever is there.
    """
    source = suffix(group, source_ids, slice_end)
    destination = suffix(group, destination_ids, slice_end, destination_start_token or 0)
    if destination.block_ids and source.start_token > destination.start_token:
        raise BlockCountMismatchError(
            group.group_id,
            f"the destination needs {len(destination.block_ids)} blocks, the source has {len(source.block_ids)}",
        )
    return align(source, destination, group.block_size)
