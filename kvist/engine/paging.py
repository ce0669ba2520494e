"""From block tables to what kernels index: the pages, offsets and write slots of one group's layers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError
from kvist.kvcache import ABSENT, BlockTable, PageIndexMode, SlotLayout, scratch_page_index, scratch_place

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupPages:
    """A group's step on the host.

    As a rule a page is a slot of the pool and all layers share one table: mode SHARED, and the first dimension is 1. In
    a step with scratch blocks each layer has a table of its own over all pages of the pool: PER_LAYER.

    `block_tables`: int32 `[1 or num_layers, num_sequences, max_local_blocks]`, negative where absent; `page_offsets`:
    int32 `[num_sequences]`, the absolute ordinal of each table's first column; `slot_mapping`: int64
    `[1 or num_layers, num_tokens]`, page * block_size + offset, negative where another sequence writes the same.
    """

    mode: PageIndexMode
    block_tables: npt.NDArray[np.int32]
    page_offsets: npt.NDArray[np.int32]
    slot_mapping: IntArray


def group_pages(
    tables: Sequence[BlockTable], pool: SlotLayout, block_size: int, sequence: IntArray, positions: IntArray
) -> GroupPages:
    """Return the pages of a step's sequences, one table each, and the slots of its tokens.

    `sequence` and `positions` say for each token whose it is and where it stands, absolutely. Raises InvalidValueError
    for a block that the pool does not have: kernels would read beyond it.
    """
    page_offsets = np.array([table.first_held for table in tables], dtype=np.int32)
    width = max(len(table.block_ids) - table.first_held for table in tables)
    slots = np.full((1, len(tables), width), ABSENT, dtype=np.int32)
    for row, table in zip(slots[0], tables, strict=True):
        row[: len(table.block_ids) - table.first_held] = np.frombuffer(table.block_ids, np.int32)[table.first_held :]
    if slots.max() >= pool.num_slots:
        raise InvalidValueError("block_tables", int(slots.max()), f"slots of the pool, below {pool.num_slots}")
    has_scratch = any(table.scratch is not None for table in tables)
    pages = _pages_of_layers(slots, tables, pool.scale) if has_scratch else slots
    writable = pages.copy()
    for row, table in enumerate(tables):
        writable[:, row, [ordinal - table.first_held for ordinal in table.adopted]] = ABSENT
    written = writable[:, sequence, positions // block_size - page_offsets[sequence]].astype(np.int64)
    slot_mapping = np.where(written == ABSENT, ABSENT, written * block_size + positions % block_size)
    mode = PageIndexMode.PER_LAYER if has_scratch else PageIndexMode.SHARED
    return GroupPages(mode, pages, page_offsets, np.ascontiguousarray(slot_mapping))  # numpy may put tokens first


def _pages_of_layers(
    slots: npt.NDArray[np.int32], tables: Sequence[BlockTable], num_layers: int
) -> npt.NDArray[np.int32]:
    """Return `[num_layers, num_sequences, width]`: each layer's page in a block's slot, and those of scratch blocks."""
    layers = np.arange(num_layers, dtype=np.int64)[:, None]
    pages = np.where(slots == ABSENT, ABSENT, slots * num_layers + layers[:, :, None]).astype(np.int32)
    for row, table in enumerate(tables):
        if table.scratch is not None:
            first = table.scratch.block_range.start - table.first_held
            slot_idxs, shifts = scratch_place(np.arange(table.scratch.block_range.num_blocks), num_layers)
            slot_ids = np.array(table.scratch.slot_ids)[slot_idxs]
            pages[:, row, first : first + len(shifts)] = scratch_page_index(slot_ids, shifts, layers, num_layers)
    return pages
