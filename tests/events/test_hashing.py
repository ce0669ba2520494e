"""Canonical hashes: golden values, their definition written out again, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvist.errors import InvalidValueError
from kvist.events.hashing import block_hashes, chain_hashes, local_block_hashes, sequence_hashes

LOCAL_1234 = 14643705804678351452
LOCAL_5678 = 16777012769546811212
SECOND_OF_1_TO_8 = 4945711292740353085


def test_local_hashes_have_the_agreed_values():
    assert local_block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4) == [LOCAL_1234, LOCAL_5678]


def test_the_sequence_hash_chains_the_local_hashes():
    assert block_hashes(range(1, 9), 4).tolist() == [LOCAL_1234, SECOND_OF_1_TO_8]


def test_equal_blocks_at_different_depths_differ():
    assert block_hashes([1, 2, 3, 4, 1, 2, 3, 4], 4).tolist() == [LOCAL_1234, 11794101342891126859]


def test_hashes_seen_as_signed_are_those_of_engines_that_sign():
    hashes = np.array(local_block_hashes(range(1, 9), 4), np.uint64)
    assert hashes.view(np.int64).tolist() == [-3803038269031200164, -1669731304162740404]


def test_eagle_hashes_one_token_more_than_the_block():
    assert local_block_hashes([1, 2, 3, 4, 5], 4, is_eagle=True) == [1914873892905420881]
    assert local_block_hashes([1, 2, 3, 4], 4, is_eagle=True) == []
    assert local_block_hashes(range(1, 10), 4, is_eagle=True) == [1914873892905420881, 1929047464662796003]


def test_images_enter_the_hash_of_their_block_in_any_order():
    expected = [3497545641356191295, LOCAL_5678]
    assert local_block_hashes(range(1, 9), 4, mm_hashes=[[7, 3], []]) == expected
    assert local_block_hashes(range(1, 9), 4, mm_hashes=[[3, 7]]) == expected


def test_adapter_salt_image_and_eagle_combine():
    hashes = local_block_hashes(range(1, 10), 4, lora_name="a", cache_salt="s", mm_hashes=[[3, 7], []], is_eagle=True)
    assert hashes == [16124861053303757025, 5942204909182120186]


def test_an_empty_adapter_or_salt_counts_as_absent():
    assert local_block_hashes([1, 2, 3, 4], 4, lora_name="", cache_salt="") == [LOCAL_1234]


def test_a_partial_block_has_no_hash():
    assert block_hashes([1, 2, 3], 4).tolist() == []
    assert block_hashes([], 4).tolist() == []
    assert block_hashes([1, 2, 3, 4, 5], 4).tolist() == [LOCAL_1234]


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
scopes = st.none() | st.text(max_size=5)
items = st.none() | st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), max_size=12)


@given(tokens, st.integers(1, 9), scopes, scopes, items, st.booleans())
def test_local_hashes_follow_their_definition(token_ids, block_size, lora_name, cache_salt, mm_hashes, is_eagle):
    seed = 1337
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(errors="surrogatepass"), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(errors="surrogatepass"), 1)
    expected = []
    for start in range(0, len(token_ids), block_size):
        block = token_ids[start : start + block_size + is_eagle]
        if len(block) < block_size + is_eagle:
            break
        block_items = (
            sorted(mm_hashes[start // block_size]) if mm_hashes and start // block_size < len(mm_hashes) else []
        )
        hashed = struct.pack(f"<{len(block)}I", *block) + struct.pack(f"<{len(block_items)}Q", *block_items)
        expected.append(xxh3_64_intdigest(hashed, seed % 2**64))
    scope = {"lora_name": lora_name, "cache_salt": cache_salt, "mm_hashes": mm_hashes, "is_eagle": is_eagle}
    assert local_block_hashes(token_ids, block_size, **scope) == expected
    assert local_block_hashes(np.array(token_ids, dtype=np.uint64), block_size, **scope) == expected


@given(tokens, st.integers(1, 5), st.integers(0, 10))
def test_a_chain_hashed_in_two_parts_is_the_same_chain(token_ids, block_size, num_first):
    local = local_block_hashes(token_ids, block_size)
    whole = sequence_hashes(local)
    first, second = local[:num_first], local[num_first:]
    parent = whole[len(first) - 1] if first else None
    assert sequence_hashes(first) + sequence_hashes(second, parent) == whole


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "7", None])
def test_a_token_id_outside_u32_is_refused_by_name(wrong):
    with pytest.raises(InvalidValueError, match="token_ids") as caught:
        local_block_hashes([1, 2, wrong, 4], 4)
    assert caught.value.value == wrong


@pytest.mark.parametrize(
    "wrong", [np.array([-1, 0]), np.array([0, 2**32]), np.array([0.5]), np.array([[1, 2]]), np.array(["a"])], ids=str
)
def test_an_array_of_anything_else_is_refused(wrong):
    with pytest.raises(InvalidValueError, match="token_ids"):
        local_block_hashes(wrong, 1)


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_an_image_hash_outside_u64_is_refused(wrong):
    with pytest.raises(InvalidValueError, match="mm_hashes"):
        local_block_hashes([1], 1, mm_hashes=[[wrong]])


@pytest.mark.parametrize("wrong", [0, -4])
def test_a_block_size_that_is_not_positive_is_refused(wrong):
    with pytest.raises(InvalidValueError, match="block_size"):
        local_block_hashes([1], wrong)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 5), st.none() | st.integers(0, 2**64 - 1))
def test_a_chain_behind_its_parent_is_hashed_like_its_blocks_and_then_their_sequence(token_ids, block_size, parent):
    local = local_block_hashes(token_ids, block_size)
    assert chain_hashes(token_ids, block_size, parent) == sequence_hashes(local, parent)
