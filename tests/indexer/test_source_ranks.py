"""The rank of batches that name none: what the source was added with."""

from __future__ import annotations

import msgspec
import pytest

from kvist.errors import InvalidValueError
from kvist.events import Batch, Stored, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.session import SourceState
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.indexer.source import Source
from kvist.radix import RadixIndex

BLOCK_SIZE = 2


def stored(number: int, **more):
    """Return the event of a prompt of one block."""
    event = {"type": "BlockStored", "block_hashes": [number], "token_ids": [number] * BLOCK_SIZE}
    return event | {"block_size": BLOCK_SIZE, "medium": "GPU"} | more


def batches(*rests) -> MessageBlock:
    """Return a message for each: events, and the rank if there is one."""
    payloads = [msgspec.msgpack.encode([1.0, *rest]) for rest in rests]
    return MessageBlock.of([Message(b"", sequence, payload) for sequence, payload in enumerate(payloads)])


class World:
    """A source of rank 7, and its index."""

    def __init__(self) -> None:
        self.index = RadixIndex(seed=1)
        self.source = Source("w", "tcp://127.0.0.1:5557?replay_port=none", BLOCK_SIZE, self.index, set(), rank=7)

    def take(self, messages: MessageBlock) -> None:
        for _ in self.source.receive_all(messages, 1.0):
            pass
        for question in self.source.questions(1.0):
            for _ in self.source.on_answer(question, None, 1.0):
                pass

    def held(self) -> dict[int, int]:
        """Return the number of blocks of each rank."""
        return {source.rank: self.index.digest(source).num_blocks for source in self.index.ranks()}


@pytest.fixture
def world():
    return World()


def test_batches_without_a_rank_have_the_sources_and_others_their_own(world):
    world.take(batches([[stored(1)], 7], [[stored(2)], None], [[stored(3)]], [[stored(4)], 0], [[stored(5)], None]))
    assert world.held() == {7: 4, 0: 1}
    assert world.source.states() == {7: SourceState.LIVE, 0: SourceState.LIVE}
    assert world.index.digest(WorkerRank("w", 7)).num_blocks == 4


def test_what_is_unusual_in_a_batch_without_a_rank_has_the_sources_too(world):
    first, *rest = batches(
        [[]], [[stored(1), stored(2, lora_name="sql"), stored(3)]], [[stored(4, lora_name="math")], None]
    )
    world.take(MessageBlock.of([first]))
    world.take(MessageBlock.of(rest))
    assert world.held() == {7: 4}


def test_a_batch_without_a_rank_that_clears_leaves_nothing_missing(world):
    world.take(batches([[]]))
    world.take(MessageBlock.of([Message(b"", 5, msgspec.msgpack.encode([1.0, [stored(1)]]))]))
    assert world.source.states() == {7: SourceState.PARTIAL}
    world.take(MessageBlock.of([Message(b"", 6, msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}]]))]))
    assert world.held() == {7: 0}
    assert world.source.states() == {7: SourceState.LIVE}


def canonical(*ranks: int) -> MessageBlock:
    """Return a canonical message of each rank."""
    blocks = [Stored(number.to_bytes(8, "big"), None) for number, _ in enumerate(ranks)]
    batches = [Batch("w", rank, 1, 0, BLOCK_SIZE, 1.0, (block,)) for rank, block in zip(ranks, blocks, strict=True)]
    return MessageBlock.of([Message(b"kv/w/0", 0, encode_batch(batch)) for batch in batches])


@pytest.mark.parametrize("is_canonical", [False, True], ids=["engine", "canonical"])
def test_ranks_that_a_stream_invents_are_counted_logged_once_and_skipped(world, is_canonical, caplog):
    ranks = [*range(4096)]
    told = [[[stored(rank), stored(5000 + rank)], rank] for rank in ranks]  # a batch counts once, not each event
    world.take(canonical(*ranks) if is_canonical else batches(*told))
    assert world.held() == dict.fromkeys(range(64), 1 if is_canonical else 2)
    assert set(world.source.states()) == {*range(64)}
    assert world.source.statistics(1.0).num_refused_ranks == 4096 - 64
    assert [record.message for record in caplog.records if "rank=" in record.message] == [
        "stream names a rank beyond its data-parallel size: skipped, and further ones are only counted"
        " worker=w rank=64 data_parallel_size=64"
    ]


def test_the_rank_that_a_stream_was_added_for_is_followed_however_many_ranks_there_may_be(world):
    world.source.bound.num_ranks = 2
    world.take(batches([[stored(1)], None], [[stored(2)], 1], [[stored(3)], 2], [[stored(4)], 7]))
    assert world.held() == {7: 2, 1: 1}


@pytest.mark.parametrize("rank", [-1, 4096])
async def test_a_rank_that_cannot_be_is_refused(indexer, rank):
    with pytest.raises(InvalidValueError, match="rank"):
        indexer.add_source("w", "tcp://127.0.0.1:5557", rank=rank)


def test_a_rank_that_holds_nothing_says_nothing_of_another_one_of_its_stream(world):
    first, _, *rest = batches(
        [[stored(1)], 0],
        [[stored(2)], 3],
        [[stored(3)], 0],
        [[{"type": "AllBlocksCleared"}], 0],
        [[stored(4)], 0],
        [[stored(5)], 3],
    )
    for message in (first, *rest):  # what is lost may be of a rank that was never heard
        world.take(MessageBlock.of([message]))
    states = world.source.states()
    assert states == {0: SourceState.LIVE, 3: SourceState.PARTIAL}
    lost = Message(b"", 9, rest[0].payload)
    world.take(MessageBlock.of([lost]))
    assert world.source.states() == {0: SourceState.PARTIAL, 3: SourceState.PARTIAL}


def test_who_is_not_level_with_the_connection_cannot_vouch_for_the_process(world):
    if world.source.engine is None:
        world.take(batches([[stored(1)], 0]))

    class Connection:
        num_connects = 0
        is_caught_up = True
        num_malformed = 0

    world.source.subscription = connection = Connection()
    if world.source.progress() is None:
        return  # followed without compiled code, of which nothing is told
    assert not world.source.progress().is_in_doubt
    connection.is_caught_up = False
    assert world.source.progress().is_in_doubt
    connection.is_caught_up, connection.num_connects = True, 1
    assert world.source.progress().is_in_doubt
    world.source.on_reconnect(2.0)
    assert world.source.progress().is_in_doubt  # until an answer proves it
    (question,) = world.source.questions(2.0)
    for _ in world.source.on_answer(question, None, 2.0):
        pass
    assert not world.source.progress().is_in_doubt
