from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import ABSENT, num_stale_blocks
from kvist.transfer.heads import WHOLE, Part, heads_of
from kvist.transfer.memory import BlockCountMismatchError, incoming_pieces, outgoing_fragments
from kvist.transfer.messages import GroupShape, Hello, PoolPlace, ReceiveRequest

B, W = 4, 9
SHAPES = (GroupShape(None, 1, 2, "float32", 2, (0,)), GroupShape(W, 1, 2, "float32", 2, (1, 2)))


def hello_of(
    shapes: tuple[GroupShape, ...], bases: tuple[int, ...], num_slots: int, part: Part = WHOLE, block_size: int = B
) -> Hello:
    pools = tuple(
        PoolPlace(base, shape.slot_bytes(block_size, part), num_slots)
        for base, shape in zip(bases, shapes, strict=True)
    )
    return Hello("worker", "tiny", block_size, 7, shapes, part.num_ranks, part.rank, "any", b"", pools)


OURS, THEIRS = hello_of(SHAPES, (10_000, 90_000), 50), hello_of(SHAPES, (500_000, 700_000), 40)


def request(num_tokens: int, lists: tuple[tuple[int, ...], ...], peer: Hello = THEIRS) -> ReceiveRequest:
    return ReceiveRequest(2, 1, peer, WHOLE, "held", num_tokens, lists)


@dataclass
class Rank:
    """A rank's pools as plain bytes, one behind the other, and how often each byte was written."""

    hello: Hello
    memory: np.ndarray
    num_writes: np.ndarray

    def view(self, group_id: int) -> np.ndarray:
        """Return a pool as `[slots, planes, heads, bytes of a head]`."""
        shape, pool = self.hello.groups[group_id], self.hello.pools[group_id]
        piece = self.memory[pool.base_address :][: pool.num_slots * pool.slot_bytes]
        return piece.reshape(pool.num_slots, shape.num_planes, -1, shape.head_bytes(self.hello.block_size))


def make_rank(shapes: tuple[GroupShape, ...], part: Part, block_size: int, num_slots: int) -> Rank:
    bases, end = [], 0
    for shape in shapes:
        bases.append(end)
        end += num_slots * shape.slot_bytes(block_size, part)
    hello = hello_of(shapes, tuple(bases), num_slots, part, block_size)
    return Rank(hello, np.zeros(end, np.uint8), np.zeros(end, np.int64))


def make_case(rng: random.Random) -> tuple[tuple[GroupShape, ...], int, int]:
    """Return groups, and numbers of ranks that can split all of them."""
    while True:
        shapes = tuple(
            GroupShape(
                rng.choice((None, None, rng.randint(1, 40))),
                rng.choice((1, 2, 3, 4, 6, 8)),
                rng.randint(1, 3),
                rng.choice(("float32", "bfloat16", "fp8_e4m3")),
                rng.randint(1, 2),
                tuple(range(rng.randint(1, 3))),
            )
            for _ in range(rng.randint(1, 3))
        )
        sizes = rng.randint(1, 8), rng.randint(1, 8)
        if all(n % s.num_kv_heads == 0 or s.num_kv_heads % n == 0 for n in sizes for s in shapes):
            return shapes, *sizes


@pytest.mark.parametrize("seed", range(150))
def test_every_byte_of_every_missing_block_arrives_once_and_nothing_else_is_written(seed: int) -> None:
    rng, bytes_rng = random.Random(seed), np.random.default_rng(seed)
    shapes, num_senders, num_receivers = make_case(rng)
    block_size, num_tokens = rng.choice((1, 2, 4)), rng.randint(1, 40)
    total = -(-num_tokens // block_size)
    num_cached = rng.randint(0, num_tokens // block_size)
    firsts = [num_stale_blocks(num_tokens, FULL if s.window is None else s.window, block_size) for s in shapes]
    tables = [[ABSENT] * first + rng.sample(range(total + 4), total - first) for first in firsts]
    lists = tuple(tuple(rng.sample(range(total + 2), total - max(first, num_cached))) for first in firsts)
    wholes = [
        bytes_rng.integers(1, 256, (total, s.num_planes, s.num_kv_heads, s.head_bytes(block_size)), np.uint8)
        for s in shapes
    ]
    senders = [make_rank(shapes, Part(rank, num_senders), block_size, total + 4) for rank in range(num_senders)]
    for sender in senders:
        for group_id, (shape, table, whole) in enumerate(zip(shapes, tables, wholes, strict=True)):
            heads = heads_of(shape.num_kv_heads, sender.hello.part)
            for ordinal, block_id in enumerate(table):
                if block_id != ABSENT:
                    sender.view(group_id)[block_id] = whole[ordinal][:, heads]
    for rank in range(num_receivers):
        target, scattered = (make_rank(shapes, Part(rank, num_receivers), block_size, total + 2) for _ in range(2))
        parts = [incoming_pieces(target.hello, lists, sender.hello.part) for sender in senders]
        slots = zip(lists, target.hello.pools, strict=True)
        assert sum(pieces[:, 1].sum() for pieces in parts) == sum(len(ids) * pool.slot_bytes for ids, pool in slots)
        for sender, pieces in zip(senders, parts, strict=True):
            asked = request(num_tokens, lists, target.hello)
            fragments = outgoing_fragments(sender.hello, tables, num_tokens, asked, 0)
            assert (fragments[:, 2].sum(), len(fragments) > len(pieces)) == (pieces[:, 1].sum(), False)
            room = b"".join(sender.memory[local : local + size].tobytes() for local, _, size in fragments.tolist())
            assert len(room) == pieces[:, 1].sum()
            for (address, size), end in zip(pieces.tolist(), np.cumsum(pieces[:, 1]), strict=True):
                scattered.memory[address : address + size] = np.frombuffer(room[end - size : end], np.uint8)
            num_filled = rng.randint(0, total)
            filled = [table[: max(num_filled, first)] for table, first in zip(tables, firsts, strict=True)]
            slices = outgoing_fragments(sender.hello, filled, num_tokens, asked, 0).tolist()
            slices += outgoing_fragments(sender.hello, tables, num_tokens, asked, num_filled).tolist()
            for local, remote, size in slices:
                target.memory[remote : remote + size] = sender.memory[local : local + size]
                target.num_writes[remote : remote + size] += 1
        expected = make_rank(shapes, target.hello.part, block_size, total + 2)
        for group_id, (shape, ids, whole) in enumerate(zip(shapes, lists, wholes, strict=True)):
            heads = heads_of(shape.num_kv_heads, target.hello.part)
            for ordinal, block_id in enumerate(ids, total - len(ids)):
                expected.view(group_id)[block_id] = whole[ordinal][:, heads]
        np.testing.assert_array_equal(target.memory, expected.memory)
        np.testing.assert_array_equal(scattered.memory, expected.memory)
        np.testing.assert_array_equal(target.num_writes, expected.memory > 0)


def test_blocks_that_are_neighbours_on_both_sides_are_one_piece() -> None:
    fragments = outgoing_fragments(
        OURS, [[3, 4, 5, 9], [ABSENT, 7, 8, 2]], 16, request(16, ((20, 21, 22, 23), (5, 6))), 0
    )
    expected = [[10_192, 501_280, 192], [10_576, 501_472, 64], [91_024, 700_640, 128], [90_256, 700_768, 128]]
    np.testing.assert_array_equal(fragments, expected)


def test_ranks_with_the_same_heads_exchange_whole_slots_and_others_a_piece_of_each_plane() -> None:
    shapes = (GroupShape(None, 4, 2, "float32", 2, (0, 1)),)  # 32 bytes a head
    whole = [[1000, 0, 256]]
    by_plane = [[1000 + 32 * plane, 64 + 128 * plane, 32] for plane in range(4)]
    cases = [
        (Part(1, 2), Part(1, 2), whole, [[], [[0, 256]]]),
        (
            Part(2, 4),
            Part(0, 1),
            by_plane,
            [[[plane * 128 + 32 * head, 32] for plane in range(4)] for head in range(4)],
        ),
    ]
    for sender, receiver, expected, pieces in cases:
        source, target = (hello_of(shapes, (base,), 1, part) for base, part in ((1000, sender), (0, receiver)))
        assert outgoing_fragments(source, [[0]], B, request(B, ((0,),), target), 0).tolist() == expected
        senders = (Part(rank, sender.num_ranks) for rank in range(sender.num_ranks))
        told = [incoming_pieces(target, ((0,),), each).tolist() for each in senders]
        assert told == pieces


def test_as_many_ranks_as_cannot_split_the_heads_are_refused() -> None:
    shapes = (GroupShape(None, 6, 2, "float32", 2, (0,)),)
    with pytest.raises(InvalidValueError, match="tensor_parallel_size: got 4"):
        incoming_pieces(hello_of(shapes, (0,), 9), ((1,),), Part(0, 4))


def test_nothing_to_send_is_no_piece() -> None:
    assert outgoing_fragments(OURS, [[3, 4], [5, 6]], 8, request(8, ((), ())), 0).shape == (0, 3)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(12, ((1, 2, 3), (4, 5))), "asked for 12 tokens, have 16"),
        (request(16, ((1, 2, 3, 4),)), "expected 2 groups"),
        (request(16, ((1, 2, 3, 4, 5), (6,))), "5 blocks"),
    ],
)
def test_a_peer_that_has_counted_differently_is_refused(asked: ReceiveRequest, reason: str) -> None:
    with pytest.raises(BlockCountMismatchError, match=reason):
        outgoing_fragments(OURS, [[3, 4, 5, 9], [ABSENT, ABSENT, 8, 2]], 16, asked, 0)


def test_a_block_that_the_peer_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="block_id"):
        outgoing_fragments(OURS, [[3, 4], [5, 6]], 8, request(8, ((1, 40), (2, 3))), 0)
