"""Compiled block hashes are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events import hashing as reference
from kvist.indexer.compiled.hashing import block_hashes, token_array

_names = st.none() | st.sampled_from(["", "adapter", "überlang \ud800", "x" * 300])


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    block_size=st.integers(1, 70),
    lora_name=_names,
    cache_salt=_names,
    is_eagle=st.booleans(),
)
def test_hashes_equal_the_references(
    tokens: list[int], block_size: int, lora_name: str | None, cache_salt: str | None, is_eagle: bool
) -> None:
    scope = {"lora_name": lora_name, "cache_salt": cache_salt}
    expected = reference.block_hashes(tokens, block_size, is_eagle=is_eagle, **scope)
    for given_as in (tokens, np.array(tokens, np.uint32), np.array(tokens, np.int64)):
        assert block_hashes(given_as, block_size, is_eagle=is_eagle, **scope).tolist() == expected.tolist()


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64, 128, 300])
def test_usual_block_sizes_hash_as_the_reference_does(block_size: int) -> None:
    tokens = np.random.default_rng(block_size).integers(0, 2**32, 10 * block_size + 1, np.uint32)
    for is_eagle in (False, True):
        expected = reference.block_hashes(tokens, block_size, is_eagle=is_eagle)
        assert block_hashes(tokens, block_size, is_eagle=is_eagle).tolist() == expected.tolist()


def test_a_slice_that_is_not_contiguous_is_hashed_by_its_elements() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    assert block_hashes(tokens[::2], 4).tolist() == reference.block_hashes(list(range(0, 64, 2)), 4).tolist()
    assert token_array(tokens[8:]).base is tokens


@pytest.mark.parametrize("wrong", [[-1], [2**32], [1.5], ["1"], np.array([-1]), np.array([1.0])])
def test_tokens_that_are_no_u32_are_refused(wrong: list[int]) -> None:
    with pytest.raises(InvalidValueError, match="token_ids"):
        block_hashes(wrong, 1)


def test_a_block_size_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="block_size"):
        block_hashes([1], 0)
