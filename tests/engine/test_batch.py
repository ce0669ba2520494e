from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from kvist.engine.batch import GroupPages, group_pages
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import (
    ABSENT,
    BlockHashChain,
    BlockTable,
    KvCacheManager,
    KvDtype,
    LayerKv,
    ScratchPolicy,
    SequenceBlocks,
    plan_windows,
)

NUM_SLOTS, NUM_LAYERS = 300, 3


def page_of(table: BlockTable, ordinal: int, layer: int, *, is_shared: bool) -> int:
    """Return where a layer finds one block: a slot where all layers share their numbers, else a page."""
    slot_id, scratch = table.block_ids[ordinal], table.scratch
    if scratch is not None and ordinal in scratch.block_range:
        slot_idx, shift = divmod(ordinal - scratch.block_range.start, NUM_LAYERS)
        return scratch.slot_ids[slot_idx] * NUM_LAYERS + (shift + layer) % NUM_LAYERS
    return slot_id if slot_id == ABSENT or is_shared else slot_id * NUM_LAYERS + layer


def make_manager(window: int, block_size: int) -> KvCacheManager:
    layer = LayerKv(window, 1, 8, KvDtype.FLOAT32)
    groups = plan_windows([layer] * NUM_LAYERS, 100_000).groups
    return KvCacheManager(groups, [NUM_SLOTS], block_size, scratch=ScratchPolicy())


def open_batch(
    manager: KvCacheManager, steps: list[tuple[int, int]], has_scratch: tuple[bool, ...] | None = None
) -> list[SequenceBlocks]:
    """Open a sequence for each (tokens before the step, tokens after it), and leave them amid that step."""
    opened = []
    for (history, num_tokens), is_allowed in zip(steps, has_scratch or (False,) * len(steps), strict=True):
        tokens = [random.randrange(1 << 30) for _ in range(num_tokens)]
        chain = BlockHashChain(manager.block_size)
        sequence = manager.open(manager.match(chain, tokens), chain, tokens, 0, is_scratch_allowed=is_allowed)
        assert sequence is not None
        assert manager.grow(sequence, tokens, history)
        manager.settle()
        opened.append((sequence, tokens))
    assert all(manager.grow(sequence, tokens, len(tokens)) for sequence, tokens in opened)
    return [sequence for sequence, _ in opened]


def pages_of(manager: KvCacheManager, sequences: list[SequenceBlocks], counts: list[int]) -> GroupPages:
    """Return the pages of a step whose last `counts` tokens of each sequence are new."""
    sequence = np.repeat(np.arange(len(sequences)), counts)
    positions = np.concatenate(
        [np.arange(each.num_tokens - count, each.num_tokens) for each, count in zip(sequences, counts, strict=True)]
    )
    tables = [each.tables[0] for each in sequences]
    return group_pages(tables, NUM_SLOTS, NUM_LAYERS, manager.block_size, sequence, positions)


@pytest.mark.parametrize(
    ("num_tokens", "offset", "num_pages", "place"),
    [(200, 4, 3, 7), (95, 0, 3, 30), (96, 1, 2, 31), (127, 1, 3, 30), (128, 2, 2, 31)],
)
def test_a_decode_holds_the_pages_of_its_window_and_writes_behind_them(
    num_tokens: int, offset: int, num_pages: int, place: int
) -> None:
    manager = make_manager(window=64, block_size=32)
    pages = pages_of(manager, open_batch(manager, [(num_tokens - 1, num_tokens)]), [1])
    assert pages.is_shared
    assert pages.page_offsets.tolist() == [offset]
    assert pages.block_tables.shape == (1, 1, num_pages)
    assert pages.slot_mapping.tolist() == [[pages.block_tables[0, 0, -1] * 32 + place]]


def test_rows_of_a_batch_are_padded_to_the_longest() -> None:
    steps = [(199, 200), (63, 64), (9, 10)]
    for window, num_pages in ((64, [3, 2, 1]), (FULL, [7, 2, 1])):
        manager = make_manager(window, block_size=32)
        pages = pages_of(manager, open_batch(manager, steps), [1, 1, 1])
        assert (pages.block_tables[0] != ABSENT).sum(axis=1).tolist() == num_pages


@pytest.mark.parametrize("seed", range(20))
def test_every_layer_finds_every_block_where_the_layout_says(seed: int) -> None:
    random.seed(seed)
    block_size = random.choice([2, 4])
    manager = make_manager(window=random.randrange(1, 20), block_size=block_size)
    num_sequences = random.randrange(1, 5)
    histories = [random.choice([0, random.randrange(40)]) for _ in range(num_sequences)]
    counts = [random.randrange(1, 40) for _ in range(num_sequences)]
    steps = [(history, history + count) for history, count in zip(histories, counts, strict=True)]
    sequences = open_batch(manager, steps, tuple(random.random() < 0.7 for _ in steps))
    pages = pages_of(manager, sequences, counts)
    has_scratch = any(sequence.tables[0].scratch is not None for sequence in sequences)
    assert pages.is_shared is not has_scratch
    token = 0
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        table = sequence.tables[0]
        for layer in range(len(pages.block_tables)):
            expected = [
                page_of(table, ordinal, layer, is_shared=pages.is_shared)
                for ordinal in range(table.first_held, len(table.block_ids))
            ]
            found = pages.block_tables[layer, row]
            assert found[: len(expected)].tolist() == expected
            assert (found[len(expected) :] == ABSENT).all()
            positions = range(sequence.num_tokens - count, sequence.num_tokens)
            assert pages.slot_mapping[layer, token : token + count].tolist() == [
                expected[position // block_size - table.first_held] * block_size + position % block_size
                for position in positions
            ]
        token += count


def test_what_another_sequence_writes_is_not_written_twice() -> None:
    manager = make_manager(window=FULL, block_size=4)
    tokens = list(range(8))
    sequences = []
    for _ in range(2):
        chain = BlockHashChain(4)
        sequence = manager.open(manager.match(chain, tokens), chain, tokens, 0)
        assert sequence is not None
        sequences.append(sequence)
    for sequence in sequences:
        assert manager.grow(sequence, tokens, 8)
    pages = pages_of(manager, sequences, [8, 8])
    assert pages.block_tables[0, 0].tolist() == pages.block_tables[0, 1].tolist()
    assert (pages.slot_mapping[0, 8:] == ABSENT).all()
    assert len(set(pages.slot_mapping[0, :8])) == 8


def test_a_block_that_the_pool_does_not_have_is_refused_before_anything_is_launched() -> None:
    table = BlockTable(array("i", [5, 300]), 0)
    with pytest.raises(InvalidValueError, match="block_tables: got 300, expected slots of the pool, below 300"):
        group_pages([table], NUM_SLOTS, NUM_LAYERS, 4, np.zeros(1, np.int64), np.array([7]))
