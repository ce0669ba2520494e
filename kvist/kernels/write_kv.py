"""Store the keys and values of a step into the slots of a paged cache."""

from __future__ import annotations

import torch

from kvist.kernels._checks import CACHE_DTYPES, check_kv_cache, check_rows, check_tensor


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Every token with a slot stands in the cache, cast to its dtype; a negative slot writes nothing.

    `key`, `value`: `[num_tokens, num_kv_heads, head_dim]`; `kv_cache` as in `kvist.kernels`, changed in place;
    `slot_mapping`: int64 `[num_tokens]`, `block_idx * block_size + offset`, no slot twice. Raises ValueError.
    """
    check_kv_cache(kv_cache)
    num_tokens, num_kv_heads, head_dim = key.shape[0], kv_cache.shape[2], kv_cache.shape[4]
    for name, tensor in (("key", key), ("value", value)):
        check_tensor(name, tensor, (num_tokens, num_kv_heads, head_dim), CACHE_DTYPES, kv_cache)
        check_rows(name, tensor)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), kv_cache)
    check_rows("slot_mapping", slot_mapping)
    write_kv_reference(key, value, kv_cache, slot_mapping)


def write_kv_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`write_kv` in torch: two indexed assignments."""
    block_size = kv_cache.shape[3]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, 0, :, offsets] = key[written].to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = value[written].to(kv_cache.dtype)
