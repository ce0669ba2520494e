"""How many blocks each pool gets of the memory, and how many blocks one sequence can need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL
from kvist.kvcache.plan import KvGroup
from kvist.kvcache.stale import num_blocks_for

BudgetPolicy = Literal["uniform", "bounded"]

# A cached prompt is found only while both its full-attention blocks and its last window are cached. Most prompts are
# far shorter than a model's longest: sized for the longest, the windows run out while most full blocks are unused.
_BALANCED_WINDOWS = 16

_MAX_UTILISATION_TO_RESUME = 0.97


def block_bytes(group: KvGroup, block_size: int) -> int:
    """Return the bytes of one slot: a block of every layer of the group."""
    return group.token_bytes * block_size


def peak_num_blocks(group: KvGroup, block_size: int, max_model_len: int, max_step_tokens: int) -> int:
    """Return the most blocks one sequence ever holds in the group.

    A windowed sequence holds what the oldest query of a step sees, and the step's own tokens. Both ends may lie within
    a block, which makes one more.
    """
    whole = num_blocks_for(max_model_len, block_size)
    if group.window is FULL:
        return whole
    return min(whole, num_blocks_for(group.window - 1 + max_step_tokens, block_size) + 1)


def split_memory(
    groups: Sequence[KvGroup],
    block_size: int,
    memory_bytes: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
    policy: BudgetPolicy,
) -> tuple[int, ...]:
    """Return each group's number of blocks, together at most `memory_bytes`.

    `bounded` gives windowed groups what sequences can hold at once, and the rest to the full ones. `uniform` gives
    every group the same number, as if none had a window. Raises InvalidValueError with the bytes needed if one sequence
    of `max_model_len` tokens does not fit.
    """
    peaks = [peak_num_blocks(group, block_size, max_model_len, max_step_tokens) for group in groups]
    sizes = [block_bytes(group, block_size) for group in groups]
    bounded_bytes = _product(peaks, sizes)
    if policy == "uniform":
        uniform_bytes = num_blocks_for(max_model_len, block_size) * sum(sizes)
        hint = f"; policy bounded needs {_in_words(bounded_bytes)}" if bounded_bytes < uniform_bytes else ""
        _check_memory(memory_bytes, uniform_bytes, max_model_len, hint)
        return _uniform(groups, block_size, memory_bytes, max_model_len, max_num_seqs)
    _check_memory(memory_bytes, bounded_bytes, max_model_len)
    return _bounded(groups, block_size, memory_bytes, peaks, max_num_seqs)


def check_sequence_fits(
    groups: Sequence[KvGroup], num_blocks: Sequence[int], block_size: int, max_model_len: int, max_step_tokens: int
) -> None:
    """Raise InvalidValueError unless a sequence of `max_model_len` fits every pool, so that preemption ends."""
    for group, have in zip(groups, num_blocks, strict=True):
        need = peak_num_blocks(group, block_size, max_model_len, max_step_tokens)
        if have < need:
            raise InvalidValueError(
                f"num_blocks of group {group.group_id}",
                have,
                f"at least {need}: one sequence of max_model_len={max_model_len} with blocks of {block_size} tokens",
            )


def can_resume(num_used: int, num_new: int, num_blocks: int) -> bool:
    """Return whether a pool can take a preempted sequence back and leave room for the others to grow."""
    return num_used + num_new <= _MAX_UTILISATION_TO_RESUME * num_blocks


def _uniform(
    groups: Sequence[KvGroup], block_size: int, memory_bytes: int, max_model_len: int, max_num_seqs: int
) -> tuple[int, ...]:
    """Return equal numbers: each group gets full-length room for the sequences that fit, less two."""
    bytes_each = sum(block_bytes(group, block_size) for group in groups)
    num_sequences = max(1, memory_bytes * block_size // bytes_each // max_model_len - 2)
    num_tokens = max(min(num_sequences, max_num_seqs) * max_model_len, max_num_seqs * block_size)
    return (min(num_blocks_for(num_tokens, block_size), memory_bytes // bytes_each),) * len(groups)


def _bounded(
    groups: Sequence[KvGroup], block_size: int, memory_bytes: int, peaks: Sequence[int], max_num_seqs: int
) -> tuple[int, ...]:
    """Return numbers of blocks with which all pools become full at the same time.

    Windowed groups get the peak of one sequence, since only one step is computed at a time, and a unit, which is a
    window, for each further sequence. That also counts finished sequences, whose last window stays in the cache:
    without it their blocks in the full groups could not be reused. The number of units is that of the sequences that
    the full groups can hold if each is `_BALANCED_WINDOWS` windows long, or the longest possible if that is less. If
    that is fewer than `max_num_seqs`, there are units for that many, up to a third of the memory.
    """
    sizes = [block_bytes(group, block_size) for group in groups]
    units = [
        0 if group.window is FULL else min(peak, num_blocks_for(group.window, block_size) + 1)
        for group, peak in zip(groups, peaks, strict=True)
    ]
    unit_bytes = _product(units, sizes)
    full_bytes = sum(peak * size for unit, peak, size in zip(units, peaks, sizes, strict=True) if not unit)
    longest = _BALANCED_WINDOWS * max(units) or max(peaks)
    typical_bytes = sum(
        min(peak, longest) * size for unit, peak, size in zip(units, peaks, sizes, strict=True) if not unit
    )
    peak_bytes = _product(peaks, sizes) - full_bytes
    work_bytes = peak_bytes - unit_bytes
    balanced = work_bytes + (memory_bytes - work_bytes) * unit_bytes // (unit_bytes + typical_bytes)
    wanted = max(peak_bytes, balanced, min(work_bytes + max_num_seqs * unit_bytes, memory_bytes // 3))
    extra = min(wanted, memory_bytes - full_bytes) - peak_bytes
    counts = [unit and peak + extra * unit // unit_bytes for unit, peak in zip(units, peaks, strict=True)]
    full_size = sum(size for unit, size in zip(units, sizes, strict=True) if not unit)
    left = memory_bytes - _product(counts, sizes)
    return tuple(count or left // full_size for count in counts)


def _check_memory(memory_bytes: int, needed_bytes: int, max_model_len: int, hint: str = "") -> None:
    if memory_bytes < needed_bytes:
        expected = f"at least {_in_words(needed_bytes)}: one sequence of max_model_len={max_model_len}{hint}"
        raise InvalidValueError("memory_bytes", memory_bytes, expected)


def _in_words(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({-(-size_bytes // 2**20)} MiB)"


def _product(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
