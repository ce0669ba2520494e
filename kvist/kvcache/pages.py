"""From a block to the page where a layer keeps its keys and values.

A pool is an array of pages, `scale` a slot. Ordinary blocks lie across their slot, one layer beside the other; scratch
blocks lie along it, each shifted by as many pages as a layer has, round the slot's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Index = TypeVar("Index", int, npt.NDArray[np.int64])


class PageIndexMode(Enum):
    """Where page 0 is: PER_LAYER at the pool's start, SHARED at the layer's first page, so that all layers agree."""

    PER_LAYER = "per_layer"
    SHARED = "shared"


def scratch_place(scratch_idx: Index, scale: int, buffers_per_layer: int = 1) -> tuple[Index, Index]:
    """Return, for the scratch block with this index (0 is the first), which slot it is in and its shift there."""
    num_per_slot = scale // buffers_per_layer
    return scratch_idx // num_per_slot, scratch_idx % num_per_slot * buffers_per_layer


def scratch_page_index(slot_id: Index, shift: Index, offset: Index, scale: int) -> Index:
    """Return the page of a layer's scratch block, `offset` being the layer's page in ordinary slots.

    Blocks with different shifts have different pages in one layer, whichever layer it is.
    """
    return slot_id * scale + (shift + offset) % scale


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A pool of `num_slots` slots with `scale` pages each, one a layer."""

    num_slots: int
    scale: int
