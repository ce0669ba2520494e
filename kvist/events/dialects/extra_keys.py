"""vLLM's `extra_keys`: what besides tokens went into a block's hash, untagged and in a list per block.

In order: the LoRA name, `[mm_identifier, offset]` for each multimodal item, the cache salt (in the first block of a
prompt only), and the raw digest of prompt embeddings. Read from vLLM 0.33.0 `v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvist.events.dialects.batch import mm_hash_of


class ChainKeys(NamedTuple):
    """What a chain's extra keys say; blocks from `num_hashable_blocks` on have no canonical hash."""

    num_hashable_blocks: int
    cache_salt: str | None
    mm_hashes: list[list[int]] | None


def read_extra_keys(
    extra_keys: Sequence[Sequence[Any] | None], *, lora_name: str | None, cache_salt: str | None, is_root: bool
) -> ChainKeys:
    """Return the salt and the multimodal items of a chain's blocks; `is_root` says that the first starts a prompt.

    Where in its block an item starts is not part of the canonical hash.
    """
    mm_hashes: list[list[int]] = []
    num_hashable_blocks = len(extra_keys)
    for block_idx, keys in enumerate(extra_keys):
        items: list[int] = []
        rest = list(keys or ())
        if lora_name is not None and lora_name in rest:
            rest.remove(lora_name)
        for key in rest:
            meaning = _meaning(key, is_prompt_start=is_root and block_idx == 0)
            if isinstance(meaning, int):
                items.append(meaning)
            elif meaning is None or cache_salt not in (None, meaning):
                num_hashable_blocks = min(num_hashable_blocks, block_idx)
            else:
                cache_salt = meaning
        mm_hashes.append(items)
    return ChainKeys(num_hashable_blocks, cache_salt, mm_hashes if any(mm_hashes) else None)


def _meaning(key: Any, *, is_prompt_start: bool) -> int | str | None:
    """Return the number of a multimodal item, or a cache salt, or None for what cannot be hashed.

    A bare string at the start of a prompt is the salt, even one that looks like a digest. Further on it is an item if
    it looks like one, because older engines sent items without their offset.
    """
    if isinstance(key, str):
        mm_hash = None if is_prompt_start else mm_hash_of(key)
        return key if mm_hash is None else mm_hash
    if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str):
        return mm_hash_of(key[0])
    return None
