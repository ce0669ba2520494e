"""What each layer stores, which layers share a block table, and where each layer's cache is. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL, KnownWindow, window_size
from kvist.kvcache.stale import effective_window

logger = logging.getLogger(__name__)

NUM_KV = 2  # a key and a value a token


class KvDtype(Enum):
    """A storage type of the KV cache; the value is torch's name for it, except for the two eight-bit floats."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def itemsize_bytes(self) -> int:
        return {KvDtype.FLOAT32: 4, KvDtype.FLOAT16: 2, KvDtype.BFLOAT16: 2}.get(self, 1)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one attention layer stores for a token, and for how long; equal for all layers of a group.

    `kv_factor` is 2 for a key and a value, 1 if one vector serves as both.
    """

    window: KnownWindow
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype
    kv_factor: int = NUM_KV

    @property
    def token_bytes(self) -> int:
        return self.kv_factor * self.num_kv_heads * self.head_dim * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True)
class SharedKv:
    """A layer that stores nothing: it reads the keys and values of an earlier layer, `source`."""

    source: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with equal `LayerKv`: they share one pool, and one block table for each sequence.

    A slot of the pool holds one block of every layer in `layer_indices`, in that order.
    """

    group_id: int
    layer: LayerKv
    layer_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a group without layers."""
        if not self.layer_indices:
            raise InvalidValueError(f"layer_indices of group {self.group_id}", (), "at least one layer")

    @property
    def window(self) -> KnownWindow:
        return self.layer.window

    @property
    def token_bytes(self) -> int:
        return len(self.layer_indices) * self.layer.token_bytes


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are: a group, and the position in it of the layer that writes them."""

    group_id: int
    position: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The groups of a model, widest window first, and the place of each of its layers.

    A layer without a cache of its own has its source's place. A model with full attention alone has one group.
    """

    groups: tuple[KvGroup, ...]
    places: tuple[LayerPlace, ...]

    def check_scratch(self) -> None:
        """Raise InvalidValueError if a layer would read scratch slots that no longer hold its source's keys.

        Scratch slots hold the keys of the group's last layer that wrote: when a sharing layer reads, that must be its
        source. If no layer has a window, a warning says that scratch slots change nothing.
        """
        if all(group.window is FULL for group in self.groups):
            logger.warning("scratch slots have no effect: no layer has a window that a sequence can outgrow")
        for layer_idx, place in enumerate(self.places):
            group = self.groups[place.group_id]
            source = group.layer_indices[place.position]
            later = [owner for owner in group.layer_indices if source < owner < layer_idx]
            if later and group.window is not FULL:
                expected = f"layer {later[-1]}, the last before it that writes to its group's scratch slots"
                raise InvalidValueError(f"layers[{layer_idx}].source", source, expected)


def plan_windows(layers: Sequence[LayerKv | SharedKv], max_model_len: int) -> WindowPlan:
    """Return the plan: layers with equal LayerKv form a group, and prefix routing follows group 0, the widest.

    A window that no sequence can outgrow counts as full attention, so such layers are in the full group. Raises
    InvalidValueError that names the layer, its field and the value.
    """
    members: dict[LayerKv, list[int]] = {}
    for layer_idx, layer in enumerate(layers):
        if isinstance(layer, SharedKv):
            _check_source(layers, layer_idx, layer.source)
            continue
        _check_layer(layer_idx, layer)
        stored = replace(layer, window=effective_window(layer.window, max_model_len))
        members.setdefault(stored, []).append(layer_idx)
    if not members:
        raise InvalidValueError("layers", len(layers), "at least one layer that stores keys and values")
    widest_first = sorted(members.items(), key=lambda item: (-window_size(item[0].window), item[1]))
    groups = tuple(KvGroup(i, layer, tuple(indices)) for i, (layer, indices) in enumerate(widest_first))
    owners = {
        layer_idx: LayerPlace(group.group_id, position)
        for group in groups
        for position, layer_idx in enumerate(group.layer_indices)
    }
    places = (owners[layer.source if isinstance(layer, SharedKv) else i] for i, layer in enumerate(layers))
    return WindowPlan(groups, tuple(places))


def _check_layer(layer_idx: int, layer: LayerKv) -> None:
    if layer.window is not FULL and (not isinstance(layer.window, int) or layer.window < 1):
        raise InvalidValueError(f"layers[{layer_idx}].window", layer.window, "at least 1 token, or FULL")
    for name in ("num_kv_heads", "head_dim"):
        if getattr(layer, name) < 1:
            raise InvalidValueError(f"layers[{layer_idx}].{name}", getattr(layer, name), "at least 1")
    if layer.kv_factor not in (1, NUM_KV):
        raise InvalidValueError(f"layers[{layer_idx}].kv_factor", layer.kv_factor, f"1 or {NUM_KV}")


def _check_source(layers: Sequence[LayerKv | SharedKv], layer_idx: int, source: int) -> None:
    """Raise InvalidValueError unless the source is an earlier layer with a cache of its own."""
    if not 0 <= source < layer_idx:
        raise InvalidValueError(f"layers[{layer_idx}].source", source, f"a layer before layer {layer_idx}")
    if isinstance(layers[source], SharedKv):
        raise InvalidValueError(f"layers[{layer_idx}].source", source, "a layer that stores keys and values itself")
