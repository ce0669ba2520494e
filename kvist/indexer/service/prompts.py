"""Prompts out of request bodies, as hashes of their blocks: in compiled code, and in memory that is used again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.events.hashing import scope_seed
from kvist.indexer.compiled.hashing import hash_chain
from kvist.indexer.compiled.json_tokens import find_u32s

_TOKEN_BYTES = 4
_KEY = np.frombuffer(b"token_ids", np.uint8)
_MIN_BODY_BYTES = 64 << 10
_MAX_KEPT_BODY_BYTES = 4 << 20
"""The largest body whose memory, at most twice as much, is kept for the next one."""


class PromptReader:
    """Holds the token ids of the last body read; what it returns is good until the next one."""

    def __init__(self) -> None:
        self._reserve_body(_MIN_BODY_BYTES)
        self._reserve_hashes(_MIN_BODY_BYTES)

    def read(self, body: bytes) -> bytes | None:
        """Take the array of token ids out of a body; return the rest of it, with `[]` in its place.

        See `kvist.indexer.json_tokens`: if the rest is valid JSON so is the body, None is for everything unusual.
        """
        if len(body) > self._body_bytes or self._body_bytes > max(len(body), _MAX_KEPT_BODY_BYTES):
            self._reserve_body(max(len(body), _MIN_BODY_BYTES))
        self._num_tokens, start, end = find_u32s(np.frombuffer(body, np.uint8), _KEY, self._tokens)
        return body[:start] + b"[]" + body[end:] if end else None

    def block_hashes(self, block_size: int, lora_name: str | None, cache_salt: str | None) -> NDArray[np.uint64]:
        """Return the canonical hash of each full block of the prompt that was read last."""
        num_blocks = self._num_tokens // block_size
        if num_blocks > len(self._hashes):
            self._reserve_hashes(num_blocks)
        hashes, block_bytes = self._hashes[:num_blocks], block_size * _TOKEN_BYTES
        hash_chain(self._token_bytes, block_bytes, block_bytes, np.uint64(scope_seed(lora_name, cache_salt)), hashes)
        return hashes

    def _reserve_body(self, body_bytes: int) -> None:
        self._body_bytes = body_bytes
        self._tokens = np.empty(body_bytes // 2, np.uint32)
        self._token_bytes = self._tokens.view(np.uint8)
        self._num_tokens = 0

    def _reserve_hashes(self, num_blocks: int) -> None:
        self._hashes: NDArray[np.uint64] = np.empty(num_blocks, np.uint64)
