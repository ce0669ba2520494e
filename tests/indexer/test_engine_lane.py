"""The fast lane against the plain path: the same stream through both ends in equal indexes, states and counters."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import pytest
from index_invariants import check_invariants
from lives import seeds

from kvist.events import EngineCleared, EngineStored, Tier, WorkerRank
from kvist.events.dialects.block_events import FIELD_ORDERS, REPORT_SESSION
from kvist.events.hashing import block_hashes
from kvist.events.session import MAX_SEQUENCE, SourceState
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.indexer.compiled.engine_blocks import PLACE_BITS
from kvist.indexer.engine import EngineFollower, EngineProgress
from kvist.indexer.statistics import SourceCounters
from kvist.publisher.stream import RankStream
from kvist.radix import RadixIndex

LIVES = seeds(25)
BLOCK_SIZE = 2
encode = msgspec.msgpack.encode


class PlainRank:
    """Takes the events of one rank as a publisher would, and keeps account of them beside the index."""

    def __init__(self, source: WorkerRank, index: RadixIndex, **options) -> None:
        self._source, self._index, self._options = source, index, options
        self.residency = self
        self.is_offloading = False
        self._begin()

    def _begin(self) -> None:
        self.is_new, self._has_forgotten = True, False
        self._stream = RankStream(self._source, BLOCK_SIZE, epoch=0, has_all_groups=True, **self._options)

    @property
    def counts_copies(self) -> bool:
        return self._stream.is_complete

    @counts_copies.setter
    def counts_copies(self, counts_copies: bool) -> None:
        self._stream.set_complete(counts_copies)

    @property
    def is_inexact(self) -> bool:
        is_odd = self._stream.is_exact != self._stream.is_complete or not self._stream.is_expressible
        return is_odd or self._has_forgotten

    def admit(self, event) -> None:
        self.is_new = False
        self.is_offloading |= isinstance(event, EngineStored) and event.tier is not Tier.GPU
        if isinstance(event, EngineCleared):
            self._has_forgotten = event.tier is not None and self.is_offloading
        self._stream.admit(event)
        for batch in self._stream.close_batches(0.0):
            self._index.apply(self._source, batch.events)
        for batch in self._stream.companion.close_batches(0.0):
            self._index.apply(self._source.companion, batch.events)

    def clear(self) -> None:
        self._index.clear(*self._source)
        self._index.clear(*self._source.companion)
        self._begin()

    def remove_stale_names(self) -> None:
        """Have none."""


class PlainFollower(EngineFollower):
    """Has no fast lane: takes message by message."""

    def receive_all(self, messages, now_s: float):
        for message in messages:
            self.receive(message, now_s)
            yield

    def on_answer(self, question, messages, now_s: float):
        self._now_s = now_s
        for step in self._feed.judge(question, messages, now_s):
            self._feed.apply_step(step)
            yield
        self._update_resyncing()

    def _rank(self, number: int):
        if number not in self._ranks:
            options = {"has_full_reports": self._has_full_reports, "num_ahead": self._num_ahead}
            options["counts_copies"] = self._counts_copies
            self._ranks[number] = PlainRank(WorkerRank(self._worker, number), self._index, **options)
        return self._ranks[number]


class Side:
    """A follower with its index."""

    def __init__(self, is_plain: bool, engine: str, **options) -> None:
        self.index = RadixIndex(seed=1, segment_bits=1)
        self.resyncing = set()
        self.counters = SourceCounters()
        follower = PlainFollower if is_plain else EngineFollower
        shared = self.index, self.resyncing, self.counters
        self.follower = follower("w", BLOCK_SIZE, engine, *shared, **options)

    def take(self, messages: list[Message], now_s: float) -> None:
        """Take messages as they came live."""
        for _ in self.follower.receive_all(MessageBlock.of(messages), now_s):
            pass

    def settle(self, kept: list[Message], now_s: float):
        """Ask what is to be asked, and be told what the engine keeps; return the questions."""
        questions = self.follower.questions(now_s)
        for question in questions:
            answer = None if kept is None else [m for m in kept if m.sequence >= question.request.start_sequence]
            for _ in self.follower.on_answer(question, answer, now_s):
                pass
        return questions

    def held(self) -> dict[int, list[tuple[int, int]]]:
        """Return who holds each block, as (rank, tiers)."""
        held = {}
        for chunk in self.index.snapshot():
            for block_hash, member in zip(chunk.hashes.tolist(), chunk.members.tolist(), strict=True):
                held.setdefault(block_hash, []).append((chunk.ranks[member >> 4].rank, member & 15))
        return {block_hash: sorted(members) for block_hash, members in held.items()}

    def digests(self):
        """Return what each rank holds, as a heartbeat would say it."""
        return {
            source.rank: self.index.digest(source)
            for source in self.index.ranks()
            if self.index.digest(source).num_blocks
        }

    def numbers(self):
        """Return all that is counted, but what depends on the machine's clock."""
        session = self.follower.sessions[0]
        counted = {name: value for name, value in vars(session).items() if name.startswith("num_")}
        return dataclasses.replace(self.counters, lag_s=None), counted, session.expected_sequence, session.state


class Engine:
    """Makes up messages: prompts over so few tokens that they meet again and again, under hashes that mostly agree."""

    def __init__(self, seed: int, engine: str, form: str) -> None:
        self.rng = random.Random(seed)
        self.engine, self.form = engine, form
        self.sequence = 0
        self.kept: list[Message] = []
        self.oddity = self.rng.choice([0.0, 0.02, 0.1])
        self.has_groups = engine == "vllm" and self.rng.random() < 0.5
        self.has_lookahead = self.rng.random() < 0.3
        self.num_ranks = self.rng.choice([1, 1, 3])
        self.chains: list[tuple[tuple[int, ...], list[int]]] = [((), [])]  # tokens of whole blocks, hashes

    def message(self) -> Message:
        """Return the next message."""
        rng = self.rng
        events = [self.event() for _ in range(rng.choice([0, 1, 1, 1, 2, 5]))]
        rank = rng.randrange(self.num_ranks)
        batch = [self.sequence + 0.5, events, rng.choice([rank, rank, rank, None])]
        if self.num_ranks == 1 and rng.random() < 0.2:
            batch.pop()
        payload = encode(batch)
        if rng.random() < self.oddity:
            payload = rng.choice([b"", b"\xc1", payload + b"\0", payload[:-1], encode([float("nan"), events, 0])])
        message = Message(b"", self.sequence, payload)
        self.sequence += 1
        self.kept = [*self.kept[-20:], message]
        return message

    def restart(self) -> None:
        """Begin anew, with nothing."""
        self.sequence, self.kept, self.chains = 0, [], [((), [])]

    def event(self):
        """Return one event, in one of its forms."""
        rng = self.rng
        choice = rng.random()
        if choice < 0.1:
            event = self.reported()
        elif choice < 0.6:
            event = self.stored()
        elif choice < 0.99:
            event = self.removed()
        else:
            event = {"type": "AllBlocksCleared"}
        if rng.random() < self.oddity:
            event = self.odd(event)
        if self.form == "array" and isinstance(event, dict) and "type" in event and rng.random() < 0.95:
            order = FIELD_ORDERS[self.engine].get(event["type"], ())
            if rng.random() < 0.5:  # as older versions had it
                order = order[: 6 if event["type"] == "BlockStored" else 2]
            return [event["type"], *(event.get(name) for name in order)]
        if isinstance(event, dict) and rng.random() < 0.3:
            items = [*event.items(), ("session_id", rng.choice([None, "s", REPORT_SESSION, ["x", {"y": 1.5}]]))]
            rng.shuffle(items)
            event = dict(items)
        return event

    def stored(self):
        """Return a chain stored below a known one, mostly."""
        rng = self.rng
        tokens, hashes = rng.choice(self.chains[-8:] if rng.random() < 0.7 else self.chains)
        start = rng.randrange(len(hashes) + 1) if hashes and rng.random() < 0.5 else len(hashes)
        num_blocks = 300 if rng.random() < 0.01 else rng.randint(1, 4)
        chain_tokens, chain_hashes = list(tokens[: start * BLOCK_SIZE]), list(hashes[:start])
        for idx in range(start, start + num_blocks):
            if idx < len(hashes) and rng.random() < 0.5:
                block = tokens[idx * BLOCK_SIZE : (idx + 1) * BLOCK_SIZE]
            else:
                block = [rng.choice([1, 70_000]), rng.randrange(3)]
            chain_tokens += block
            chain_hashes.append(self.hash_of(tuple(chain_tokens)))
        self.chains.append((tuple(chain_tokens), chain_hashes))
        event = {
            "type": "BlockStored",
            "block_hashes": [self.wire_hash(each) for each in chain_hashes[start:]],
            "parent_block_hash": self.wire_hash(chain_hashes[start - 1]) if start else None,
            "token_ids": chain_tokens[start * BLOCK_SIZE :],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": rng.choice(["GPU", "GPU", "GPU", None, "CPU", "DISK"]),
            "lora_name": rng.choice([None, ""]),
        }
        if rng.random() < 0.2:
            event["extra_keys"] = rng.choice([None, [None] * num_blocks, [[]] * num_blocks])
        if self.has_lookahead:
            event["lookahead_token_ids"] = [[rng.choice([1, 70_000])] for _ in range(num_blocks)]
        if self.has_groups:
            event |= rng.choice(
                [
                    {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
                    {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
                    {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5},
                    {"group_idx": 2, "kv_cache_spec_kind": "mamba"},
                    {"group_idx": 3, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5},
                    {"group_idx": 4, "kv_cache_spec_sliding_window": 9, "block_size": 2 * BLOCK_SIZE},
                ]
            )
        return event

    def reported(self):
        """Return a chain reported anew from its root, of which all may be held."""
        tokens, hashes = self.rng.choice(self.chains[-8:])
        fields = {"parent_block_hash": None, "token_ids": list(tokens), "block_size": BLOCK_SIZE, "medium": "GPU"}
        event = {"type": "BlockStored", "block_hashes": hashes, "session_id": REPORT_SESSION, **fields}
        return event | ({"group_idx": 0, "kv_cache_spec_kind": "full_attention"} if self.has_groups else {})

    def removed(self):
        """Return a removal of what was stored some time, mostly."""
        rng = self.rng
        _, hashes = rng.choice(self.chains)
        chosen = rng.sample(hashes, min(len(hashes), rng.choice([1, 1, 1, 3]))) or [rng.randrange(1 << 64)]
        event = {"type": "BlockRemoved", "block_hashes": [self.wire_hash(each) for each in chosen]}
        event["medium"] = rng.choice(["GPU", "GPU", "GPU", None, "CPU", "DISK"])
        if self.has_groups:
            event["group_idx"] = rng.choice([0, 0, 0, 1, 2, 3, 4, None])
        return event

    def hash_of(self, tokens: tuple[int, ...]) -> int:
        """Return what the engine calls a block: now and then not what it called it before, or another's name."""
        if self.rng.random() < self.oddity / 4:
            return hash((tokens, 1)) % (1 << 64)
        if self.rng.random() < self.oddity / 4 and len(self.chains) > 1:
            return self.rng.choice(self.rng.choice(self.chains)[1] or [7])
        return hash(tokens) % (1 << 64)

    def wire_hash(self, engine_hash: int):
        """Return one of the forms that engines give a hash."""
        choice = self.rng.random()
        if choice < 0.1:
            return b"\xaa" * self.rng.choice([0, 24]) + engine_hash.to_bytes(8, "big")
        return engine_hash - (1 << 64) if choice < 0.3 and engine_hash >> 63 else engine_hash

    def odd(self, event):
        """Return something that an engine rarely says, or never."""
        rng = self.rng
        hashes = event.get("block_hashes", [])
        oddities = [
            event | {"medium": "TAPE"},
            event | {"medium": "gpu"},
            event | {"locality": "REMOTE"},
            event | {"locality": "LOCAL"},
            event | {"block_hashes": None},
            event | {"block_hashes": [*hashes, *hashes[:1]]},
            event | {"block_hashes": hashes[:1] * 2},
            {"type": "Unheard"},
            ["BlockRemoved"],
            5,
            {},
        ]
        if event["type"] == "BlockStored":
            tokens = event["token_ids"]
            oddities += [
                event | {"lora_name": "sql"},
                event | {"lora_id": 3},
                event | {"lora_id": 0},
                event | {"cache_salt": "salt"},
                event | {"cache_salt": ""},
                event | {"parent_block_hash": rng.randrange(1 << 64)},
                event | {"block_size": BLOCK_SIZE + 1},
                event | {"block_size": 1, "block_hashes": hashes[:1], "token_ids": tokens[:1]},
                event | {"block_size": "x"},
                event | {"token_ids": tokens[:-1]},
                event | {"token_ids": [[1, 2], *itertools.pairwise(tokens)]},
                event | {"token_ids": [*tokens[:-1], 1 << 32]},
                event | {"token_ids": [*tokens[:-1], -1]},
                event | {"block_hashes": [None, *hashes[1:]]},
                event | {"block_hashes": [*hashes[:-1], None]},
                event | {"extra_keys": [["salty"]] + [None] * (len(hashes) - 1)},
                event | {"extra_keys": [None] * (len(hashes) - 1) + [[["a" * 64, 3]]]},
                event | {"kv_cache_spec_sliding_window": -1},
                event | {"kv_cache_spec_kind": "novel"},
                event | {"group_idx": 1 << 30},
            ]
        return rng.choice(oddities)


def assert_equal(lane: Side, plain: Side) -> None:
    assert lane.numbers() == plain.numbers()
    assert lane.follower.states() == plain.follower.states()
    assert lane.resyncing == plain.resyncing
    assert lane.digests() == plain.digests()
    assert lane.held() == plain.held()


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("seed", LIVES)
def test_a_stream_leaves_the_same_behind_by_either_way(seed, dialect, form):
    engine, rng = Engine(seed, dialect, form), random.Random(seed)
    options = {"has_full_reports": rng.random() < 0.2, "num_ahead": rng.choice([0, 0, 1])}
    lane, plain = Side(False, dialect, **options), Side(True, dialect, **options)
    now_s = 0.0
    for side in (lane, plain):
        side.follower.on_reconnect(now_s)
    for _ in range(12):
        messages = [engine.message() for _ in range(rng.randint(1, 12))]
        fate = rng.random()
        if fate < 0.1:
            del messages[rng.randrange(len(messages))]
        elif fate < 0.2:
            messages.append(messages[rng.randrange(len(messages))])
        elif fate < 0.25:
            engine.restart()
            messages += [engine.message() for _ in range(3)]
        for side in (lane, plain):
            if messages:
                side.take(messages, now_s)
        if fate > 0.95:
            for side in (lane, plain):
                side.follower.on_reconnect(now_s)
        now_s += 1.0
        kept = rng.choice([None, engine.kept, engine.kept, engine.kept])
        assert lane.settle(kept, now_s) == plain.settle(kept, now_s)
        assert_equal(lane, plain)
    check_invariants(lane.index)


def stored(hashes, tokens, parent=None, **fields):
    """Return the event of a chain, as an engine sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK_SIZE,
        "medium": "GPU",
        **fields,
    }


def removed(*hashes, **fields):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


class Pair:
    """Both ways beside each other; after each message what they left behind is compared."""

    def __init__(self) -> None:
        self.lane, self.plain = Side(False, "vllm"), Side(True, "vllm")
        self.sequence = 0
        self.take([])

    def take(self, *batches) -> int:
        """Take one message a batch of events; return how often others had a turn."""
        messages = []
        for events in batches:
            messages.append(Message(b"", self.sequence, encode([1.5, events, 0])))
            self.sequence += 1
        for _ in self.plain.follower.receive_all(MessageBlock.of(messages), 0.0):
            pass
        num_turns = sum(1 for _ in self.lane.follower.receive_all(MessageBlock.of(messages), 0.0))
        assert_equal(self.lane, self.plain)
        return num_turns

    def num_names(self) -> int:
        """Return how many engine hashes are known of the rank, once nothing is counted but copies of those."""
        residency = self.lane.follower._ranks[0].residency
        assert residency.are_names_complete
        return len(residency.names)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_many_messages_are_taken_in_parts_and_others_get_a_turn_between(pair, monkeypatch):
    max_bytes, num_blocks = 1 << 12, 5000
    monkeypatch.setattr("kvist.indexer.engine._MAX_BYTES", max_bytes)
    hashes, tokens = range(1, num_blocks + 1), range(num_blocks * BLOCK_SIZE)
    pair.take([stored([9_000_001], [1, 1])], [stored([9_000_002], [1, 2])])
    chain = [[stored([hash_], tokens[2 * hash_ - 2 : 2 * hash_], parent=hash_ - 1 or None)] for hash_ in hashes]
    assert pair.take(*chain) >= num_blocks * 50 // max_bytes
    assert pair.take(*([removed(hash_)] for hash_ in hashes)) > 10
    pair.take([stored(hashes, tokens), removed(*hashes[::2])])
    assert pair.num_names() == 2 + num_blocks // 2
    pair.take([stored(hashes[:3000], tokens[:6000])])
    assert pair.num_names() == 2 + 1500 + num_blocks // 2


def test_a_message_that_is_larger_than_the_scratch_memory_is_applied_all_the_same(monkeypatch):
    monkeypatch.setattr("kvist.indexer.engine._SCRATCH_BYTES", 1 << 10)
    pair, hashes, tokens = Pair(), range(1, 501), range(500 * BLOCK_SIZE)
    pair.take([stored([9001], [1, 1])], [stored(hashes, tokens)], [removed(*hashes[::2])], [removed(9001)])
    assert pair.num_names() == 250


def test_what_turns_out_irregular_in_the_middle_of_a_long_event_is_done_once(pair):
    num_blocks = 1000
    hashes, tokens = list(range(1, num_blocks + 1)), list(range(num_blocks * BLOCK_SIZE))
    pair.take([stored([5001], [7, 7])], [stored([5002], [7, 8])], [stored([700], [8, 8])])
    pair.take([stored(hashes, tokens)])  # the 700th hash is another block's until then
    pair.take([removed(*hashes[690:710])])
    pair.take([stored([*hashes[:500], hashes[3], *hashes[501:]], tokens)])


def test_a_block_is_held_until_the_last_of_its_copies_is_removed(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([1, 2], [1, 2, 3, 4])], [stored([1], [1, 2])], [removed(2)])
    assert len(pair.lane.held()) == 2
    pair.take([removed(1), removed(1), removed(2)])
    assert len(pair.lane.held()) == 1
    pair.take([removed(1), removed(1)], [stored([1], [1, 2])], [removed(1)])
    assert pair.lane.held() == {}


def test_copies_in_the_middle_of_a_long_event_are_counted_and_what_was_done_before_is_not(pair):
    num_blocks = 1000
    hashes, tokens = list(range(1, num_blocks + 1)), list(range(num_blocks * BLOCK_SIZE))
    pair.take([], [stored(hashes[:1], tokens[:2])], [removed(1)], [stored(hashes[:700], tokens[:1400])])
    pair.take([removed(*hashes[:600])], [stored(hashes, tokens)], [removed(*hashes)])
    assert len(pair.lane.held()) == 100
    pair.take([removed(*hashes)])
    assert pair.lane.held() == {}


def test_a_removal_that_is_left_to_python_in_its_middle_takes_one_copy_of_each(pair):
    pair.take([stored([1, 2, 3], [1, 2, 3, 4, 5, 6])], [stored([4], [1, 2], lora_name="sql")])
    pair.take([stored([1, 2, 3], [1, 2, 3, 4, 5, 6])], [removed(1, 2, 4, 3), stored([3], [5, 6], parent=2)])
    assert len(pair.lane.held()) == 3
    pair.take([removed(1, 2, 3)])
    assert len(pair.lane.held()) == 1


def test_copies_are_not_counted_of_a_rank_that_lacks_something_until_it_is_cleared(pair):
    pair.take([stored([1], [1, 2])], [stored([1], [1, 2])])
    pair.sequence += 5
    pair.take([stored([1], [1, 2])], [stored([1], [1, 2])])
    for side in (pair.lane, pair.plain):
        for now_s in (1.0, 5.0, 30.0, 90.0):
            side.settle(None, now_s)
        assert side.follower.states() == {0: SourceState.PARTIAL}
    pair.take([stored([1], [1, 2])], [removed(1)])
    assert pair.lane.held() == {}
    pair.take([{"type": "AllBlocksCleared"}], [stored([1], [1, 2])], [stored([1], [1, 2])], [removed(1)])
    assert len(pair.lane.held()) == 1


def test_copies_that_come_with_a_clearing_in_one_message_are_counted_whoever_reads_it(pair):
    pair.take([stored([1], [1, 2])])
    pair.sequence += 5
    pair.take([stored([1], [1, 2])])
    payload = encode([1, [{"type": "AllBlocksCleared"}, *[stored([1], [1, 2])] * 2], 0])  # with a time of an odd type
    for side in (pair.lane, pair.plain):
        for now_s in (1.0, 5.0, 30.0, 90.0):
            side.settle(None, now_s)
        side.take([Message(b"", pair.sequence, payload)], 91.0)
    pair.sequence += 1
    pair.take([removed(1)])
    assert len(pair.lane.held()) == 1


def test_a_group_of_smaller_blocks_holds_a_published_one_while_it_holds_all_within_it(pair):
    of = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    pair.take([stored([1], [1, 2], **of)], [stored([1], [1, 2], **of)])
    assert pair.lane.follower.states() == {0: SourceState.LIVE}
    for _ in range(2):
        pair.take([stored([7, 1], [1, 2], **sliding | {"block_size": 1})])
    pair.take([removed(1, group_idx=0)], [removed(1, group_idx=1)])
    for num_held in (1, 1, 0):
        for side in (pair.lane, pair.plain):
            assert side.follower.states() == {0: SourceState.LIVE}
        found = pair.lane.index.match(block_hashes([1, 2], BLOCK_SIZE))
        assert (found[WorkerRank("w", 0)].gpu if found else 0) == num_held
        pair.take([removed(7, group_idx=1)])
    progress = pair.lane.follower.progress()
    assert not progress.is_complete
    assert not progress.ranks[0].copies


def test_a_group_whose_blocks_turn_out_larger_is_followed_as_such_or_else_the_rank_is_partial(pair):
    of = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    chain = [1, 2, 3], range(6)
    larger, odd = (sliding | {"block_size": size} for size in (2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1))
    for num_hit, sizes in ((3, sliding), (2, larger)):
        for _ in range(2):  # the lane knows the group only by the second
            pair.take([stored(*chain, **of)], [stored(*chain, **sliding)])
        pair.take([stored([2], range(4), **sizes)])
        assert pair.lane.index.match(block_hashes([*range(6)], BLOCK_SIZE))[WorkerRank("w", 0)].gpu == num_hit
    assert pair.lane.follower.states() == {0: SourceState.LIVE}
    pair.take([stored([2], range(4), **larger)], [stored([2], range(5), **odd)])
    assert pair.lane.follower.states() == {0: SourceState.PARTIAL}


def test_blocks_beside_the_gpu_are_forgotten_with_a_reset_of_it_and_the_rank_is_partial(pair):
    cleared, offloaded = {"type": "AllBlocksCleared"}, stored([1, 2], [1, 2, 3, 4], medium="CPU")
    pair.take([stored([1, 2], [1, 2, 3, 4])], [cleared])
    assert pair.lane.follower.states() == {0: SourceState.LIVE}
    pair.take([stored([1, 2], [1, 2, 3, 4]), stored([1], [1, 2])], [offloaded], [cleared])
    assert pair.lane.follower.states() == {0: SourceState.PARTIAL}
    progress = msgspec.msgpack.decode(encode(pair.lane.follower.progress()), type=EngineProgress)
    assert (progress.is_complete, progress.ranks[0].is_complete) == (False, False)
    pair.take([stored([3], [5, 6])], [removed(2, medium="CPU")], [offloaded])
    assert pair.lane.follower.states() == {0: SourceState.PARTIAL}
    assert pair.lane.index.digest(WorkerRank("w", 0)).num_blocks == 3


def test_copies_go_on_to_be_counted_where_another_follower_resumes(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([1, 2], [1, 2, 3, 4])], [stored([2], [3, 4], parent=1)])
    former, later = pair.lane, Side(False, "vllm")
    progress = former.follower.progress()
    for chunk in former.index.snapshot():
        later.index.restore(chunk)
    later.follower.resume(msgspec.msgpack.decode(encode(progress), type=EngineProgress), 0.0)
    for rank, names in former.follower.dump_names():
        later.follower.load_names(rank, names)
    residency = later.follower._ranks[0].residency
    assert [residency.counts.get(name) >> PLACE_BITS for name in (1, 2, 3)] == [1, 2, 0]
    residency.counts_copies = True
    num_held = []
    for _ in range(4):
        residency.release([1, 2], Tier.GPU)
        num_held.append(later.index.digest(WorkerRank("w", 0)).num_blocks)
    assert num_held == [2, 1, 0, 0]


def test_two_hashes_of_one_block_hold_it_until_both_are_removed(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([11, 12], [1, 2, 3, 4])])
    assert not pair.lane.follower._ranks[0].residency.are_names_complete
    pair.take([removed(1)], [stored([3], [5, 6], parent=12)], [removed(12)], [removed(2)], [removed(11)])
    pair.take([stored([1, 2], [1, 2, 3, 4])], [removed(1, 2, 3)])
    assert pair.num_names() == 0
    assert pair.lane.held() == {}


def test_a_block_of_an_adapter_is_followed_by_blocks_of_the_same_adapter(pair):
    pair.take([stored([1], [1, 2], lora_name="sql")], [stored([2], [3, 4], parent=1)], [stored([3], [1, 2])])
    pair.take([stored([4], [3, 4], parent=3)], [stored([4], [3, 4], parent=3)], [removed(1, 2)], [removed(3)])
    assert len(pair.lane.held()) == 1


def test_blocks_offloaded_by_hash_alone_are_held_in_both_tiers(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([1, 2], [], medium="CPU")], [removed(2)])
    pair.take([stored([5], [5, 6], parent=2)], [removed(2, medium="CPU")], [stored([6], [6, 6], parent=2)])
    assert pair.num_names() == 3


def test_an_open_snapshot_does_not_show_what_the_lane_does(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([3], [5, 6])], [stored([4], [5, 7])])
    held = set(pair.lane.held())
    snapshot = pair.lane.index.snapshot()
    events = [stored([10 + n], [n, n]) for n in range(300)] + [removed(1), removed(2)]
    messages = [Message(b"", pair.sequence, encode([1.5, events, 0]))]
    for _ in pair.lane.follower.receive_all(MessageBlock.of(messages), 0.0):
        pass
    assert {block_hash for chunk in snapshot for block_hash in chunk.hashes.tolist()} == held


def test_an_index_that_evicts_goes_on_beside_the_lane():
    index = RadixIndex(seed=1, max_blocks=2000)
    follower = EngineFollower("w", BLOCK_SIZE, "vllm", index, set(), SourceCounters())
    rng, sequence = random.Random(1), 0
    for _ in range(60):
        messages = []
        for _ in range(20):
            first = rng.randrange(20_000)
            tokens = [token for n in range(8) for token in (first, n)]
            events = [stored([first * 8 + n for n in range(8)], tokens), removed(rng.randrange(160_000))]
            messages.append(Message(b"", sequence, encode([1.5, events, 0])))
            sequence += 1
        for _ in follower.receive_all(MessageBlock.of(messages), 0.0):
            pass
        index.sweep()
        is_short = index.statistics().num_evicted > 0
        assert follower.states() == {0: SourceState.PARTIAL if is_short else SourceState.LIVE}
    check_invariants(index)
    assert index.statistics().num_blocks < 3000
    follower.clear()
    assert follower.states() == {0: SourceState.LIVE}


@pytest.mark.parametrize("has_evicted", [False, True])
def test_copies_are_counted_until_the_index_evicts_for_then_the_engine_is_asked_to_report_anew(has_evicted):
    index = RadixIndex(seed=1, max_blocks=1000)
    follower = EngineFollower("w", BLOCK_SIZE, "vllm", index, set(), SourceCounters())
    events = [stored([number], [number, number]) for number in range(3000 if has_evicted else 500)]
    copied = stored([9000], [9000, 9000])
    for sequence, batch in enumerate([events, [], [copied], [copied], [removed(9000)]]):
        for _ in follower.receive_all(MessageBlock.of([Message(b"", sequence, encode([1.5, batch, 0]))]), 0.0):
            pass
        index.sweep()
    assert (index.statistics().num_evicted > 0) == has_evicted
    assert bool(index.match(block_hashes([9000, 9000], BLOCK_SIZE))) == (not has_evicted)


def test_a_message_with_several_malformed_events_counts_once_live_or_replayed(pair):
    events = [5, stored([1], [1, 2]), "x", stored([2], [3, 4]), {"type": 7}]
    pair.take([stored([8], [8, 8])], [stored([9], [9, 9])], events)
    assert pair.lane.numbers()[0].num_malformed == 1
    kept = [Message(b"", pair.sequence + number, encode([2.5, events, 0])) for number in range(3)]
    kept.insert(0, Message(b"", pair.sequence - 1, encode([1.5, events, 0])))
    for side in (pair.lane, pair.plain):
        side.take(kept[-1:], 0.0)
        assert side.settle(kept, 1.0)
    assert_equal(pair.lane, pair.plain)
    assert pair.lane.numbers()[0].num_malformed == 4


def test_a_stream_that_has_used_up_its_numbers_is_taken_as_far_as_they_go(pair):
    for side in (pair.lane, pair.plain):
        feed = side.follower._feed
        feed.session.resume(feed.restarts.epoch, MAX_SEQUENCE, is_complete=True)
    pair.sequence = MAX_SEQUENCE
    pair.take([stored([1], [1, 2])])
    assert len(pair.lane.held()) == 1
    for sequence in (0, MAX_SEQUENCE, MAX_SEQUENCE + 1, 2 * MAX_SEQUENCE):
        pair.sequence = sequence
        pair.take([stored([2], [1, 3])])


def test_what_is_loaded_from_the_host_again_is_no_report_of_what_the_gpu_holds(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([1, 2], [1, 2, 3, 4], medium="CPU")], [removed(2)])
    pair.take([stored([1, 2], [1, 2, 3, 4], session_id=REPORT_SESSION)], [removed(1)], [removed(1, medium="CPU")])
    assert len(pair.lane.held()) == 2


def test_what_sliding_groups_hold_is_known_from_an_engines_first_prompt_on():
    side, tokens = Side(False, "vllm"), [*range(8)]
    sliding = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    full = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    # vLLM names the full group last, and all tokens where a sliding group skips the first blocks.
    events = [stored([3, 4], tokens, group_idx=group, **sliding) for group in (0, 1)]
    payload = encode([1.5, [*events, stored([1, 2, 3, 4], tokens, **full)], 0])
    hashes = block_hashes([*tokens, 8, 8], BLOCK_SIZE)
    for _ in range(2):
        side.take([Message(b"", 0, payload)], 0.0)
        assert side.index.match(hashes, 4).depths.tolist() == [[4, 4, 4, 4]]
        assert side.index.match(hashes, 3).depths.tolist() == []  # up to there they do not hold what a hit needs
        side.follower.clear()  # as when the engine starts again
        side.follower._feed.session.resume(side.follower._feed.restarts.epoch, 0, is_complete=True)


def test_a_report_with_a_block_that_cannot_be_hashed_is_no_copy_of_those_before_it(pair):
    pair.take([stored([1, 2], [1, 2, 3, 4])], [stored([1, 2, None], [1, 2, 3, 4, 5, 6], session_id=REPORT_SESSION)])
    pair.take([removed(1, 2)])
    assert pair.lane.held() == {}
