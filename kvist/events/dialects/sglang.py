"""SGLang's event batches, from the positional form of 2025 to 0.5.23.

Hashes are signed; the LoRA name and the salt stand in the event; with EAGLE, `token_ids` are overlapping pairs, and a
block's canonical hash covers one token more than the block: requests must be hashed the same way.
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
        "cache_salt",
        "session_id",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
}
"""What the fields of the positional form are called."""


def decode(payload: bytes, source: str) -> DecodedEngineBatch:
    """Return SGLang's batch as engine events; raises MalformedMessageError when the payload is no batch."""
    return decode_block_events(payload, source, FIELD_ORDER)
