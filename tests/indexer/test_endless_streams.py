"""What a stream that stores for ever costs beside the index, which evicts: names of blocks that went are forgotten."""

from __future__ import annotations

import msgspec
import pytest
from index_invariants import check_invariants

from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.indexer.source import Source
from kvist.radix import RadixIndex

MAX_BLOCKS = 2048
BLOCKS_A_MESSAGE = 64


class Endless:
    """An engine's stream whose every block is new, into an index with a cap."""

    def __init__(self, **more: object) -> None:
        self.index = RadixIndex(max_blocks=MAX_BLOCKS, seed=1)
        self.source = Source("w", "tcp://127.0.0.1:5557?replay_port=none", 1, self.index, set())
        self._more = more
        self.num_messages = 0

    def store(self, num_messages: int) -> None:
        for _ in range(num_messages):
            numbers = [self.num_messages * BLOCKS_A_MESSAGE + idx + 1 for idx in range(BLOCKS_A_MESSAGE)]
            event = {"type": "BlockStored", "block_hashes": numbers, "token_ids": numbers, "block_size": 1}
            payload = msgspec.msgpack.encode([1.0, [event | {"medium": "GPU"} | self._more], 0])
            for _ in self.source.receive_all(MessageBlock.of([Message(b"", self.num_messages, payload)]), 1.0):
                pass
            self.source.questions(1.0)
            self.num_messages += 1

    @property
    def num_names(self) -> int:
        """How many engine hashes are known, what is counted of them, and how many blocks have a scope."""
        (rank,) = self.source.engine._lane.ranks.values()
        residency = rank.residency
        return len(residency.names) + len(residency.counts) + len(residency._scopes)


@pytest.mark.parametrize("more", [{}, {"lora_name": "sql"}, {"extra_keys": [["salt"]] * BLOCKS_A_MESSAGE}])
def test_what_an_endless_stream_names_is_bounded_by_the_cap_and_its_last_blocks_can_still_be_removed(more):
    stream = Endless(**more)
    stream.store(400)  # twelve times the cap
    assert stream.index.statistics().num_blocks <= MAX_BLOCKS
    assert stream.num_names < 8 * MAX_BLOCKS
    assert stream.source.states() == {0: SourceState.PARTIAL}
    check_invariants(stream.index)
    held = stream.index.digest(WorkerRank("w", 0)).num_blocks
    last = stream.num_messages * BLOCKS_A_MESSAGE
    removed = {"type": "BlockRemoved", "block_hashes": [last, last - 1], "medium": "GPU"}
    payload = msgspec.msgpack.encode([1.0, [removed], 0])
    for _ in stream.source.receive_all(MessageBlock.of([Message(b"", stream.num_messages, payload)]), 1.0):
        pass
    assert stream.index.digest(WorkerRank("w", 0)).num_blocks == held - 2
