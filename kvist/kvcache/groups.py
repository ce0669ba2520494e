"""What a layer stores, and which layers share a block table."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import InvalidValueError
from kvist.events.windows import KnownWindow
from kvist.kvcache.dtypes import KvDtype

NUM_KV = 2  # a key and a value a token


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one attention layer stores a token, and how long it is wanted: the layers of a group agree in all of it.

    `kv_factor` is 2 for a key and a value, 1 where one vector serves as both.
    """

    window: KnownWindow
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype
    kv_factor: int = NUM_KV

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in this layer."""
        return self.kv_factor * self.num_kv_heads * self.head_dim * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True)
class SharedKv:
    """A layer that stores nothing: it reads what layer `source`, an earlier one, has written."""

    source: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that store alike and see equally far: they share one block table a sequence and one pool.

    A slot of the pool holds one block of every layer in `layer_indices`, in that order.
    """

    group_id: int
    layer: LayerKv
    layer_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a group without layers: nothing says what it stores or how far it sees."""
        if not self.layer_indices:
            raise InvalidValueError(f"layer_indices of group {self.group_id}", (), "at least one layer")

    @property
    def window(self) -> KnownWindow:
        """Return how far the group's queries see, themselves included."""
        return self.layer.window

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all layers of the group."""
        return len(self.layer_indices) * self.layer.token_bytes
