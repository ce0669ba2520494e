from __future__ import annotations

import hashlib

from kvist.kvcache.sequences import BlockHashChain, event_hash, root_digest


def test_a_digest_covers_the_parent_and_the_tokens_as_little_endian_words() -> None:
    chain = BlockHashChain(2)
    chain.extend([1, 2, 3, 256, 9])
    first = hashlib.sha256(root_digest(None, None) + b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(first + b"\3\0\0\0\0\1\0\0").digest()
    assert chain.digests == [first, second]


def test_extending_step_by_step_equals_hashing_at_once() -> None:
    tokens = list(range(100))
    stepwise, at_once = BlockHashChain(8), BlockHashChain(8)
    for end in range(101):
        stepwise.extend(tokens[:end])
    at_once.extend(tokens)
    assert stepwise.digests == at_once.digests
    assert len(at_once.digests) == 12


def test_adapter_and_salt_part_the_cache_and_cannot_be_swapped() -> None:
    scopes = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"), ("ab", ""), ("", "ab")]
    assert len({root_digest(*scope) for scope in scopes}) == len(scopes)


def test_events_use_the_low_64_bits() -> None:
    assert event_hash(b"\xff" * 24 + b"\0" * 7 + b"\5") == 5
