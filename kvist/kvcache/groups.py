"""Which layers share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.errors import InvalidValueError
from kvist.events.windows import KnownWindow, window_size
from kvist.kvcache.stale import effective_window


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one attention layer stores: the layers of a group agree in all of it."""

    window: KnownWindow
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that store alike and see equally far: they share one block table a sequence and one pool."""

    group_id: int
    layer: LayerKv
    layer_indices: tuple[int, ...]

    @property
    def window(self) -> KnownWindow:
        """Return how far the group's queries see, themselves included."""
        return self.layer.window


def group_layers(layers: Sequence[LayerKv], max_model_len: int) -> tuple[KvGroup, ...]:
    """Return the groups, widest window first, so that group 0 is the one that prefix routing follows.

    A window that no sequence can outgrow counts as full attention, so that such layers join the full group.
    """
    members: dict[LayerKv, list[int]] = {}
    for layer_idx, layer in enumerate(layers):
        if isinstance(layer.window, int) and layer.window < 1:
            raise InvalidValueError(f"layers[{layer_idx}].window", layer.window, "at least 1 token, or FULL")
        window = effective_window(layer.window, max_model_len)
        members.setdefault(LayerKv(window, layer.num_kv_heads, layer.head_dim), []).append(layer_idx)
    if not members:
        raise InvalidValueError("layers", len(layers), "at least one attention layer")
    widest_first = sorted(members.items(), key=lambda item: (-window_size(item[0].window), item[1]))
    return tuple(KvGroup(i, layer, tuple(indices)) for i, (layer, indices) in enumerate(widest_first))
