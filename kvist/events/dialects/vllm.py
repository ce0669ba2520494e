"""vLLM's event batches, from the positional form of 2025 to 0.33.0.

Hybrid models send each cache group under its index: the store says the kind and the window, the removal only the
group. Where blocks were skipped the tokens cover the whole span, and the normaliser leaves the event out. The partial
entries of a hybrid cache have a smaller `block_size`, and offloaded blocks may come without tokens: both are the
normaliser's too. Tokens that speculative decoding hashes beyond a block (`lookahead_token_ids`) are left aside, so
that a router need not know about the draft model: two blocks that differ only there count as one.
"""

from __future__ import annotations

from kvist.events.dialects.batch import DecodedEngineBatch
from kvist.events.dialects.block_events import decode_block_events

FIELD_ORDER = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
}
"""What the fields of the positional form are called."""


def decode(payload: bytes, source: str) -> DecodedEngineBatch:
    """Return vLLM's batch as engine events; raises MalformedMessageError when the payload is no batch."""
    return decode_block_events(payload, source, FIELD_ORDER)
