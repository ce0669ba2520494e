"""What one step hands the model: every sequence's new tokens, and where each layer keeps their keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.paging import GroupPages, IntArray


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step as it is scheduled, before anything is on a device; fields as in `ForwardBatch`, pages by group."""

    input_ids: IntArray
    positions: IntArray
    seq_lens: npt.NDArray[np.int32]
    num_decodes: int
    prefill_start_loc: npt.NDArray[np.int32]
    logit_rows: IntArray
    groups: tuple[GroupPages, ...]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's memory, and the pages of it that the step's sequences hold.

    `cache`: `[num_pages, 2, num_kv_heads, block_size, head_dim]`, whose pages may lie apart; `block_tables`: int32
    `[num_sequences, max_local_blocks]`, negative where absent, beginning at the absolute ordinal `page_offsets`, int32
    `[num_sequences]`: only page bounds are local, never positions. `slot_mapping`: int64 `[num_tokens]`,
    page * block_size + offset, negative where another sequence writes the same.
    """

    cache: torch.Tensor
    block_tables: torch.Tensor
    page_offsets: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Sequences with one new token (decodes) first, then the ragged rest (prefills); rows are tokens in that order.

    `input_ids`, `positions`: int64 `[num_tokens]`, positions absolute; `seq_lens`: int32 `[num_sequences]`, absolute,
    this step's tokens included; `prefill_start_loc`: int32 `[num_prefills + 1]`, counted from the first prefill row;
    `logit_rows`: int64, the rows whose logits are wanted. `layers` has the pages of each layer of the model.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    prefill_start_loc: torch.Tensor
    logit_rows: torch.Tensor
    layers: tuple[LayerPages, ...]
