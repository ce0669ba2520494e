"""Prompts out of request bodies, as hashes of their blocks: in compiled code, and in memory that is used again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.events.hashing import scope_seed
from kvist.indexer.compiled.hashing import hash_chain
from kvist.indexer.compiled.json_tokens import COUNT, END, INTEGERS, START, find_integers
from kvist.indexer.json_tokens import address_of

_TOKEN_BYTES = 4
_KEY = b"token_ids"
_MIN_BODY_BYTES = 64 << 10
_MAX_KEPT_BODY_BYTES = 4 << 20
"""The largest body whose memory, at most twice as much, is kept for the next one."""


class PromptReader:
    """Holds the token ids of the last body read; what it returns is good until the next one."""

    def __init__(self) -> None:
        self._key_address = address_of(_KEY)
        self._reserve_body(_MIN_BODY_BYTES)
        self._reserve_hashes(_MIN_BODY_BYTES)

    def read(self, body: bytes) -> bytes | None:
        """Take the array of token ids out of a body; return the rest of it, with `[]` in its place.

        See `kvist.indexer.json_tokens`: if the rest is valid JSON so is the body, None is for everything unusual.
        """
        if len(body) > self._body_bytes or self._body_bytes > max(len(body), _MAX_KEPT_BODY_BYTES):
            self._reserve_body(max(len(body), _MIN_BODY_BYTES))
        num_key_bytes, num_bytes = len(_KEY), len(body)
        if not find_integers(
            address_of(body), num_bytes, self._key_address, num_key_bytes, _TOKEN_BYTES, self._tokens_address
        ):
            return None
        found = self._found
        start, end, self._num_tokens = found[START >> 3], found[END >> 3], found[COUNT >> 3]
        return body[:start] + b"[]" + body[end:]

    def block_hashes(self, block_size: int, lora_name: str | None, cache_salt: str | None) -> NDArray[np.uint64]:
        """Return the canonical hash of each full block of the prompt that was read last."""
        num_blocks = self._num_tokens // block_size
        if num_blocks == 0:
            return self._hashes[:0]
        if num_blocks > len(self._hashes):
            self._reserve_hashes(num_blocks)
        stride_bytes = block_size * _TOKEN_BYTES
        seed = scope_seed(lora_name, cache_salt)
        tokens = self._tokens_address + INTEGERS
        hash_chain(tokens, num_blocks, stride_bytes, stride_bytes, seed, False, 0, self._hashes_address)
        return self._hashes[:num_blocks]

    def _reserve_body(self, body_bytes: int) -> None:
        self._body_bytes = body_bytes
        self._memory = np.empty(INTEGERS + body_bytes * 2 + 64, np.uint8)
        self._tokens_address = self._memory.ctypes.data
        self._found = self._memory[:INTEGERS].data.cast("q")

    def _reserve_hashes(self, num_blocks: int) -> None:
        self._hashes: NDArray[np.uint64] = np.empty(num_blocks, np.uint64)
        self._hashes_address = self._hashes.ctypes.data
