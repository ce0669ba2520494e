"""Which layers read the cache of another one: the last of Gemma 3n and Gemma 4 keep no keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.errors import InvalidValueError


def shared_sources(layer_types: Sequence[str], num_shared: int) -> list[int | None]:
    """Return by layer whose cache it reads: None for its own, else the last unshared layer of its type.

    The last `num_shared` layers share. Raises InvalidValueError when that leaves a type without a layer to read from.
    """
    num_owners = len(layer_types) - num_shared
    if not 0 < num_owners <= len(layer_types):
        expected = f"0 to {len(layer_types) - 1}, so that a layer of {len(layer_types)} keeps its own cache"
        raise InvalidValueError("num_kv_shared_layers", num_shared, expected)
    last_owner = {kind: layer_idx for layer_idx, kind in enumerate(layer_types[:num_owners])}
    orphaned = sorted(set(layer_types[num_owners:]) - set(last_owner))
    if orphaned:
        expected = f"few enough that a layer before the shared ones has the type {orphaned[0]}"
        raise InvalidValueError("num_kv_shared_layers", num_shared, expected)
    return [None] * num_owners + [last_owner[kind] for kind in layer_types[num_owners:]]
