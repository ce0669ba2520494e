"""One step's input to the model: every sequence's new tokens, and where each layer stores their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.errors import InvalidValueError
from kvist.kvcache import ABSENT, BlockTable, WindowPlan
from kvist.kvcache.tensors import KvTensors

IntArray = npt.NDArray[np.int64]

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one group in a step, on the host.

    Usually a page is a slot of the pool and all layers share one table: the first dimension is 1. In a step with
    scratch blocks each layer has a table of its own, over all pages of the pool.

    `block_tables`: int32 `[1 or num_layers, num_sequences, max_local_blocks]`, negative where absent; `page_offsets`:
    int32 `[num_sequences]`, the absolute ordinal of each table's first column; `slot_mapping`: int64
    `[1 or num_layers, num_tokens]`, page * block_size + offset, negative where another sequence writes the same token.
    """

    block_tables: npt.NDArray[np.int32]
    page_offsets: npt.NDArray[np.int32]
    slot_mapping: IntArray

    @property
    def is_shared(self) -> bool:
        """Return whether all layers share one table; if the group has one layer, its pages are the slots."""
        return len(self.block_tables) == 1


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step on the host; the fields are those of `ForwardBatch`, but with pages by group instead of by layer.

    The token of each of the `pending_rows` is not known yet: it is the one in `pending_places` of those drawn last.
    """

    input_ids: IntArray
    positions: IntArray
    seq_lens: npt.NDArray[np.int32]
    num_decodes: int
    prefill_start_loc: npt.NDArray[np.int32]
    logit_rows: IntArray
    groups: tuple[GroupPages, ...]
    pending_rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    pending_places: IntArray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's cache, and the pages of it that the step's sequences hold, as in its `GroupPages`.

    `cache`: `[num_pages, 2, num_kv_heads, block_size, head_dim]`; its pages need not be contiguous. Pages count from
    `page_offsets`; positions are always absolute.
    """

    cache: torch.Tensor
    block_tables: torch.Tensor
    page_offsets: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step on the device: sequences with one new token (decodes) first, then the others (prefills).

    A row is a token, in that order. `input_ids`, `positions`: int64 `[num_tokens]`, positions absolute; `seq_lens`:
    int32 `[num_sequences]`, absolute, this step's tokens included; `prefill_start_loc`: int32 `[num_prefills + 1]`,
    counted from the first prefill row; `logit_rows`: int64, the rows whose logits are needed. `layers` has the pages of
    each layer of the model.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    prefill_start_loc: torch.Tensor
    logit_rows: torch.Tensor
    layers: tuple[LayerPages, ...]


def group_pages(
    tables: Sequence[BlockTable],
    num_slots: int,
    num_layers: int,
    block_size: int,
    sequence: IntArray,
    positions: IntArray,
) -> GroupPages:
    """Return the pages of a step's sequences, which have one table each, and the slots of its tokens.

    The group's pool has `num_slots` slots of `num_layers` pages. `sequence` and `positions` are each token's sequence
    and absolute position. Raises InvalidValueError for a block that the pool does not have: kernels would read beyond
    it.
    """
    page_offsets = np.array([table.first_held for table in tables], dtype=np.int32)
    width = max(len(table.block_ids) - table.first_held for table in tables)
    slots = np.full((1, len(tables), width), ABSENT, dtype=np.int32)
    for row, table in zip(slots[0], tables, strict=True):
        row[: len(table.block_ids) - table.first_held] = np.frombuffer(table.block_ids, np.int32)[table.first_held :]
    if slots.max() >= num_slots:
        raise InvalidValueError("block_tables", int(slots.max()), f"slots of the pool, below {num_slots}")
    has_scratch = any(table.scratch is not None for table in tables)
    pages = _pages_of_layers(slots, tables, num_layers) if has_scratch else slots
    writable = pages.copy()
    for row, table in enumerate(tables):
        if table.adopted:
            writable[:, row, [ordinal - table.first_held for ordinal in table.adopted]] = ABSENT
    written = writable[:, sequence, positions // block_size - page_offsets[sequence]].astype(np.int64)
    slot_mapping = np.where(written == ABSENT, ABSENT, written * block_size + positions % block_size)
    return GroupPages(pages, page_offsets, np.ascontiguousarray(slot_mapping))  # numpy may put tokens first


def _pages_of_layers(
    slots: npt.NDArray[np.int32], tables: Sequence[BlockTable], num_layers: int
) -> npt.NDArray[np.int32]:
    """Return `[num_layers, num_sequences, width]`: each layer's page in a block's slot, and those of scratch blocks."""
    layers = np.arange(num_layers, dtype=np.int64)[:, None]
    pages = np.where(slots == ABSENT, ABSENT, slots * num_layers + layers[:, :, None]).astype(np.int32)
    for row, table in enumerate(tables):
        if table.scratch is not None:
            first = table.scratch.block_range.start - table.first_held
            pages[:, row, first : first + len(table.scratch.block_range)] = table.scratch.pages(num_layers)
    return pages


def padding_batch(num_decodes: int, num_prefill_tokens: int, table_widths: Sequence[int]) -> HostBatch:
    """Return a step of padding, which writes and attends to nothing: decodes and, unless it is empty, one prefill.

    `table_widths` has the number of columns of each group's block table.
    """
    num_seqs, num_tokens = num_decodes + (num_prefill_tokens > 0), num_decodes + num_prefill_tokens
    return HostBatch(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        seq_lens=np.zeros(num_seqs, np.int32),
        num_decodes=num_decodes,
        prefill_start_loc=np.array([0, num_prefill_tokens] if num_prefill_tokens else [0], np.int32),
        logit_rows=np.arange(num_seqs),
        groups=tuple(
            GroupPages(
                np.full((1, num_seqs, width), ABSENT, np.int32),
                np.zeros(num_seqs, np.int32),
                np.full((1, num_tokens), ABSENT, np.int64),
            )
            for width in table_widths
        ),
    )


def to_device(
    batch: HostBatch, plan: WindowPlan, tensors: KvTensors, drawn: torch.Tensor | None = None
) -> ForwardBatch:
    """Return the step as tensors on the device of the KV cache; the layers of a group share theirs if they can.

    `drawn` are the tokens that the last step draws, needed for pending ones.
    """
    arrays: list[npt.NDArray[Any]] = [batch.positions, batch.input_ids, batch.seq_lens, batch.prefill_start_loc]
    arrays += [batch.logit_rows, batch.pending_rows, batch.pending_places]
    for group in batch.groups:
        arrays += [group.block_tables, group.page_offsets, group.slot_mapping]
    copied = iter(_copy(arrays, tensors.device))
    positions, input_ids, seq_lens, prefill_start_loc, logit_rows, rows, places = islice(copied, 7)
    if drawn is not None:
        input_ids[rows] = drawn[places]
    by_group = [(next(copied).unbind(), next(copied), next(copied).unbind()) for _ in batch.groups]
    layers = []
    for layer_idx, (group_id, position) in enumerate(plan.places):
        tables, offsets, slots = by_group[group_id]
        is_shared = batch.groups[group_id].is_shared
        cache = tensors.by_slot(layer_idx) if is_shared else tensors.by_page(layer_idx)
        row = 0 if is_shared else position
        layers.append(LayerPages(cache, tables[row], offsets, slots[row]))
    return ForwardBatch(input_ids, positions, seq_lens, batch.num_decodes, prefill_start_loc, logit_rows, tuple(layers))


def _copy(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays on the device, to a GPU all in one transfer, which nobody waits for.

    The first one is at the beginning of its memory: torch compiles layers anew for another place of an input.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    on_device = pinned.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
