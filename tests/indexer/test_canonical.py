"""What becomes of a rank's canonical batches beyond what `test_indexer` and `test_recovery` show over a wire."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvist.events import FULL, Batch, EngineRemoved, EngineStored, Heartbeat, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch, encode_batch
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.snapshot import block_digest
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.events.types import GroupRule
from kvist.indexer.canonical import CanonicalFollower
from kvist.indexer.statistics import SourceCounters
from kvist.publisher.stream import RankStream, message_of, with_companions
from kvist.radix import RadixIndex

_BLOCK_SIZE = 16


def _follower(max_blocks: int | None = None) -> tuple[CanonicalFollower, RadixIndex]:
    index = RadixIndex(seed=3, segment_bits=2, max_blocks=max_blocks)
    return CanonicalFollower("worker", _BLOCK_SIZE, index, set(), SourceCounters()), index


def _message(rank: int, sequence: int, *events: Stored | Heartbeat, size: int = _BLOCK_SIZE, epoch: int = 1) -> Message:
    return Message(b"kv", sequence, encode_batch(Batch("w", rank, epoch, sequence, size, 1.0, events)))


def _feed(follower: CanonicalFollower, messages: Sequence[Message], now_s: float) -> None:
    for _ in follower.receive_all(MessageBlock.of(messages), now_s):
        pass


def test_an_answer_with_blocks_of_another_size_drops_the_rank_and_no_more() -> None:
    follower, index = _follower()
    wanted, other = (
        [_message(rank, idx, Stored(struct.pack("<Q", idx + 1)), size=size) for idx in range(3) for rank in (0, 1)]
        for size in (_BLOCK_SIZE, 2 * _BLOCK_SIZE)
    )
    _feed(follower, [*wanted[:2], *wanted[4:]], 1.0)
    questions = follower.questions(100.0)
    assert [question.rank for question in questions] == [0, 1]
    for question in questions:  # the first answer is about both ranks
        for _ in follower.on_answer(question, other, 100.0):
            pass
    assert follower.states() == {}
    assert index.statistics().num_held == 0
    _feed(follower, wanted, 101.0)
    assert index.statistics().num_held == 6


def test_a_heartbeat_says_how_late_a_stream_is_where_the_last_batch_was_replayed() -> None:
    counters, now_s = SourceCounters(), time.time()
    follower = CanonicalFollower("worker", _BLOCK_SIZE, RadixIndex(), set(), counters)
    for sequence, event, at_s in ((0, Stored(struct.pack("<Q", 7)), now_s - 3600), (1, Heartbeat(1, 0), now_s)):
        batch = Batch("w", 0, 1, sequence, _BLOCK_SIZE, at_s, (event,))
        _feed(follower, [Message(b"kv", sequence, encode_batch(batch))], 1.0)
    assert counters.lag_s is not None
    assert counters.lag_s < 3000


def test_an_epoch_may_be_any_number_of_64_bits() -> None:
    follower, index = _follower()
    messages = [_message(0, idx, Stored(struct.pack("<Q", idx + 1)), epoch=2**63 + 5) for idx in range(3)]
    _feed(follower, messages, 1.0)
    assert index.statistics().num_held == 3


def test_a_capped_index_keeps_to_its_cap_and_is_not_cleared_for_what_it_evicted() -> None:
    follower, index = _follower(max_blocks=2000)
    rng, held, sequence = random.Random(1), set[int](), 0
    for _ in range(60):
        for _ in range(20):
            chain = rng.sample(range(1, 1 << 60), 8)
            held.update(chain)
            _feed(follower, [_message(0, sequence, Stored(struct.pack("<8Q", *chain)))], 1.0)
            sequence += 1
        digest = sum(block_digest(block_hash, Tier.GPU) for block_hash in held) % (1 << 64)
        _feed(follower, [_message(0, sequence, Heartbeat(len(held), digest, True))], 1.0)
        assert index.statistics().num_blocks <= 2000
        is_short = index.evicted_from(WorkerRank("worker", 0))
        assert follower.states() == {0: SourceState.PARTIAL if is_short else SourceState.LIVE}
        assert follower.ranks_counting_copies() == {0}
        assert not follower.questions(1.0)
        progress = follower.progress()
        assert progress is not None
        assert progress.ranks[0].is_complete == (not is_short)
    assert index.statistics().num_evicted > 0
    assert follower.sessions[0].num_diverged == 0
    assert index.statistics().num_blocks > 1500
    _feed(follower, [_message(0, 0, epoch=2)], 2.0)
    assert follower.states() == {0: SourceState.LIVE}


class HybridEngine:
    """A rank with full attention and sliding windows, what its publisher sends of it, and what it would hit."""

    PROMPT = range(4 * _BLOCK_SIZE)
    WINDOWS = (FULL, 2 * _BLOCK_SIZE + 1)

    def __init__(self, rng: random.Random, epoch: int) -> None:
        self.rng, self.has_full_first = rng, rng.random() < 0.7
        self.stream = RankStream(WorkerRank("w", 0), _BLOCK_SIZE, epoch, has_all_groups=True)
        self.held: tuple[set[int], set[int]] = set(), set()
        self.shown = set[int]()
        self.kept: list[Message] = []

    def step(self) -> None:
        """Store or remove a block in one of the groups; the first is published, the other only until it shows."""
        group = self.rng.choice([0, 0, 1]) if self.shown or not self.has_full_first else 0
        number = self.rng.randrange(4)
        if self.rng.random() < 0.7 and (group or not number or number - 1 in self.held[0]):
            tokens = self.PROMPT[number * _BLOCK_SIZE : (number + 1) * _BLOCK_SIZE]
            names, place = ([number + 1], tokens), {"group": group, "window": self.WINDOWS[group]}
            self.stream.admit(EngineStored(*names, _BLOCK_SIZE, number or None, **place))
            self.held[group].add(number)
            self.shown.add(group)
        elif number in self.held[group]:
            self.stream.admit(EngineRemoved([number + 1], group=group))
            self.held[group].discard(number)

    def publish(self, *, has_heartbeats: bool) -> list[Message]:
        streams = with_companions({0: self.stream}).values()
        batches = [message_of(batch) for each in streams for batch in each.close_batches(1.0)]
        self.kept += batches
        return batches + [message_of(each.heartbeat(1.0)) for each in streams if has_heartbeats]

    def answer(self, rank: int, start_sequence: int) -> list[Message]:
        batches = ((decode_batch(message.payload, "w").batch, message) for message in self.kept)
        return [message for batch, message in batches if batch.rank == rank and batch.sequence >= start_sequence]

    def hit(self) -> int:
        """Return the most blocks of the prompt of which all are held, and the last two of the sliding group.

        A group that has never stored anything is unknown to all.
        """

        def is_hit(end: int) -> bool:
            needed = {*range(end)}, {*range(max(0, end - 2), end)}
            return all(needed[group] <= self.held[group] for group in self.shown)

        return next(filter(is_hit, range(4, 0, -1)), 0) if self.shown else 0


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_is_longer_than_the_engines_hit_however_late_the_rules_of_its_groups_come(seed: int) -> None:
    rng, resyncing, index, hashes = random.Random(seed), set[WorkerRank](), RadixIndex(), block_hashes(range(64), 16)
    source, num_answers, old_hit = WorkerRank("worker", 0), 0, 0
    follower = CanonicalFollower("worker", _BLOCK_SIZE, index, resyncing, SourceCounters())

    def answer() -> int | None:
        assert (source in resyncing) == (follower.states().get(0) is SourceState.RESYNCING)
        matched = index.match(hashes)
        return None if source in resyncing else matched[source].gpu if source in matched else 0

    for epoch in range(1, 9):
        engine, now_s = HybridEngine(rng, epoch), epoch * 100.0
        for _ in range(rng.randrange(6)):  # of which nobody heard
            engine.step()
            engine.publish(has_heartbeats=True)
        for step in range(12):
            before = engine.hit()
            engine.step()
            is_last = step == 11
            for message in engine.publish(has_heartbeats=is_last or rng.random() < 0.3):
                _feed(follower, [message], now_s)
                if decode_batch(message.payload, "w").batch.rank == 0:
                    old_hit = 0
                longest = max(old_hit, before, engine.hit())
                assert (answer() or 0) <= longest
                for question in follower.questions(now_s + 5) if is_last or rng.random() < 0.5 else ():
                    told = engine.answer(question.rank, question.request.start_sequence)
                    for _ in follower.on_answer(question, told, now_s):
                        pass
                    assert (answer() or 0) <= longest
            num_answers += answer() is not None
        for _ in range(3):
            _feed(follower, engine.publish(has_heartbeats=True), now_s)
            for question in follower.questions(now_s + 5):
                told = engine.answer(question.rank, question.request.start_sequence)
                for _ in follower.on_answer(question, told, now_s):
                    pass
        # Blocks of the other group that came before it have no known place.
        assert answer() == engine.hit() or (answer() < engine.hit() and not engine.has_full_first)
        assert follower.states() == {0: SourceState.LIVE}
        old_hit = engine.hit()
    assert num_answers > 20


def test_a_rank_counts_once_its_companion_has_said_what_hits_need() -> None:
    """Also if its publisher is of a version whose batches do not say that there is a companion."""
    follower, index = _follower()
    companion, block = WorkerRank("w", 0).companion.rank, struct.pack("<Q", 7)
    holding = Heartbeat(1, block_digest(7, Tier.GPU))
    _feed(follower, [_message(0, 0, Stored(block)), _message(0, 1, holding)], 1.0)
    assert follower.states() == {0: SourceState.LIVE}
    _feed(follower, [_message(companion, 0, Stored(struct.pack("<Q", 8)))], 1.0)
    assert follower.states() == {0: SourceState.RESYNCING}
    assert not index.match(np.array([8], np.uint64))
    rules = Heartbeat(1, block_digest(8, Tier.GPU), rules=(GroupRule(0), GroupRule(1)))
    _feed(follower, [_message(companion, 1, rules)], 1.0)
    assert follower.states() == {0: SourceState.LIVE}
    assert not index.match(np.array([7], np.uint64))
    progress = follower.progress()
    assert progress is not None
    later, _ = _follower()
    later.resume(progress)
    _feed(later, [_message(0, 1, Stored(block)), _message(companion, 1, Stored(block))], 2.0)
    assert later.states() == {0: SourceState.RESYNCING}


def test_where_hits_need_no_other_groups_any_more_they_are_what_the_rank_holds() -> None:
    companion, hashes = WorkerRank("w", 0).companion.rank, np.array([7], np.uint64)
    rules = Heartbeat(0, 0, rules=(GroupRule(0), GroupRule(1)))
    stored = [_message(0, 0, Stored(struct.pack("<Q", 7))), _message(companion, 0, rules)]
    beats = [_message(rank, 0, Heartbeat(0, 0), epoch=2) for rank in (0, companion)]
    again = _message(0, 0, Stored(struct.pack("<Q", 7)), epoch=2)
    for how in ("no rules", "another publisher", "not among the peer's ranks"):
        follower, index = _follower()
        _feed(follower, stored, 1.0)
        assert not index.match(hashes)
        if how == "no rules":
            _feed(follower, [*beats, again], 2.0)
        elif how == "another publisher":
            _feed(follower, [again], 2.0)
        else:
            follower.on_peer_ranks([_message(0, 1, Heartbeat(1, block_digest(7, Tier.GPU)))], 2.0, 2.0)
        assert index.match(hashes)[WorkerRank("worker", 0)].gpu == 1
        assert follower.states() == {0: SourceState.LIVE}
