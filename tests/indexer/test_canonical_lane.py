"""Whether messages are taken in bulk or one by one comes to the same: indexes, sessions, states and counters.

Streams of three ranks, with everything that goes wrong, go down both paths at once.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from index_invariants import check_invariants

from kvist.events import Batch, Heartbeat, Removed, Stored, WorkerRank
from kvist.events.codec import decode_batch, encode_batch
from kvist.events.follow import Question
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.block import MessageBlock
from kvist.indexer import canonical
from kvist.indexer.canonical import CanonicalFollower
from kvist.indexer.compiled.canonical import MAX_HASHES, MAX_OPERATIONS
from kvist.indexer.statistics import SourceCounters
from kvist.radix import RadixIndex

_WORKER, _BLOCK_SIZE, _NUM_RANKS = "worker", 16, 3
_SESSION_COUNTERS = ("gaps", "duplicates", "replays", "recovered", "lost", "diverged", "epochs", "stale")


class _PlainFollower(CanonicalFollower):
    """Has no fast lane: takes message by message."""

    def receive_all(self, block: MessageBlock, now_s: float) -> Iterator[None]:
        for message in block:
            self.receive(message, now_s)
            yield


class _Path:
    """A follower with all it keeps."""

    def __init__(self, *, is_fast: bool, max_blocks: int | None = None) -> None:
        self.index = RadixIndex(seed=3, segment_bits=2, max_blocks=max_blocks)
        self.counters = SourceCounters()
        self.resyncing: set[WorkerRank] = set()
        follower = CanonicalFollower if is_fast else _PlainFollower
        self.follower = follower(_WORKER, _BLOCK_SIZE, self.index, self.resyncing, self.counters)

    def observed(self) -> dict[str, Any]:
        """Return everything that the two paths must agree on."""
        return {
            "counters": dataclasses.asdict(self.counters),
            "resyncing": self.resyncing,
            "states": self.follower.states(),
            "digests": {rank: self.index.digest(WorkerRank(_WORKER, rank)) for rank in range(_NUM_RANKS)},
            "num_blocks": self.index.statistics().num_blocks,
            "topics": self.questions(),
            "sessions": {
                number: [rank.session.epoch, rank.session.expected_sequence, rank.session.is_in_step]
                + [getattr(rank.session, f"num_{name}") for name in _SESSION_COUNTERS]
                for number, rank in self.follower._ranks.items()
            },
        }

    def questions(self, now_s: float = 1e9) -> list[Question]:
        """Return what would be asked in the far future, of sessions whose jitter may differ."""
        return [
            Question(ReplayRequest(rank.topic, rank.session.question(now_s) or 0, rank.session.epoch), number)
            for number, rank in self.follower._ranks.items()
            if rank.session.question(now_s) is not None
        ]


class _Rank:
    """Publishes one rank's batches, and keeps them for replay."""

    def __init__(self, rank: int, rng: random.Random) -> None:
        self.rank = rank
        self.rng = rng
        self.epoch = 1
        self.kept: list[bytes] = []
        self.hashes: list[int] = []

    def batch(self) -> bytes:
        """Return the next batch's bytes, encoded at random."""
        events = [self._event() for _ in range(self.rng.choice([0, 1, 1, 2, 3, 20]))]
        content = _array(len(events)) + b"".join(events)
        payload = _batch(self.rng, self.rank, self.epoch, len(self.kept), content)
        self.kept.append(payload)
        return payload

    def _event(self) -> bytes:
        rng, tier = self.rng, self.rng.choice([0, 0, 0, 1, 3])
        kind = rng.random()
        if kind < 0.65:
            return self._stored(tier)
        if kind < 0.991:
            removed = rng.sample(self.hashes, min(len(self.hashes), rng.randint(0, 4))) + [7] * (rng.random() < 0.1)
            return _event(rng, b"removed", _bin(rng, removed), _uint(rng, tier))
        if kind < 0.994:
            return _array(1) + _text(b"cleared")
        if kind < 0.997:
            return _array(2) + _text(b"novelty") + _uint(rng, 5)
        return _event(rng, b"removed", _bin(rng, [1]), _uint(rng, 9))

    def _stored(self, tier: int) -> bytes:
        rng = self.rng
        num_hashes = rng.choice([0, 1, 2, 8, 8, 8]) if rng.random() > 0.004 else rng.choice([2000, MAX_HASHES + 1])
        hashes = [rng.getrandbits(64) for _ in range(num_hashes)]
        if hashes and rng.random() < 0.05:
            hashes.append(hashes[-1])  # no chain
        parent = b"\xc0"
        if self.hashes and rng.random() < 0.5:
            parent = _uint(rng, rng.choice([*self.hashes[-20:], 99]))
        self.hashes = (self.hashes + hashes)[-2000:]
        return _event(rng, b"stored", _bin(rng, hashes), parent, _uint(rng, tier))

    def heartbeat(self, digest: tuple[int, int]) -> bytes:
        """Return a heartbeat that says this is held."""
        batch = Batch("w", self.rank, self.epoch, len(self.kept), _BLOCK_SIZE, 7.0, (Heartbeat(*digest),))
        return encode_batch(batch)

    def restart(self) -> None:
        """Begin anew, as a new process does."""
        self.epoch += 1
        self.kept, self.hashes = [], []


def _array(num_items: int) -> bytes:
    return bytes([0x90 + num_items]) if num_items < 16 else b"\xdc" + struct.pack(">H", num_items)


def _text(text: bytes) -> bytes:
    return bytes([0xA0 + len(text)]) + text


def _uint(rng: random.Random, number: int) -> bytes:
    """Encode as short as possible, most of the time."""
    lengths = {8: "B", 16: "H", 32: "I", 64: "Q"}
    forms = [(0x80, bytes([number & 0x7F]))]
    for kind, (num_bits, code) in enumerate(lengths.items()):
        if number < 1 << num_bits:
            forms.append((1 << num_bits, struct.pack(f">B{code}", 0xCC + kind, number)))
        if number < 1 << num_bits - 1:
            forms.append((1 << num_bits - 1, struct.pack(f">B{code}", 0xD0 + kind, number)))
    fitting = [form for end, form in forms if number < end]
    return fitting[0] if rng.random() < 0.97 else rng.choice(fitting)


def _bin(rng: random.Random, hashes: list[int]) -> bytes:
    content = struct.pack(f"<{len(hashes)}Q", *hashes)
    forms = [struct.pack(">BH", 0xC5, len(content) & 0xFFFF), struct.pack(">BI", 0xC6, len(content))]
    if len(content) < 256:
        forms.insert(0, bytes([0xC4, len(content)]))
    header = forms[0] if rng.random() < 0.9 and len(content) < 1 << 16 else forms[-1]
    return header + content


def _event(rng: random.Random, tag: bytes, *fields: bytes) -> bytes:
    """Encode an event, now and then with a field more, or without those that have defaults."""
    chosen = list(fields)
    if rng.random() < 0.03:
        chosen.append(rng.choice([b"\xc0", b"\x81\xa1a\x91\x01", b"\xa3new", b"\xc4\x02\xff\xff"]))
    elif rng.random() < 0.05:
        chosen = chosen[: rng.randint(1, len(chosen))]
    return _array(1 + len(chosen)) + _text(tag) + b"".join(chosen)


def _batch(rng: random.Random, rank: int, epoch: int, sequence: int, events: bytes) -> bytes:
    name = rng.choice([b"worker-0"] * 40 + [b"w" * 31, "wörker".encode()])
    if rng.random() < 0.002:
        name = rng.choice([b"", b"w\xff"])
    block_size = _BLOCK_SIZE if rng.random() < 0.998 else 32
    timestamp = struct.pack(">Bd", 0xCB, rng.choice([1.5, 2.5, -1.0] * 200 + [float("nan"), float("inf")]))
    if rng.random() < 0.005:
        timestamp = rng.choice([struct.pack(">Bf", 0xCA, 1.0), b"\x05", b"\xc0"])
    more = rng.choice([[]] * 30 + [[b"\xc0"], [b"\x93\x01\x02\x03", b"\xa1x"]])
    fields = [_text(b"kvist1"), _text(name), *(_uint(rng, n) for n in (rank, epoch, sequence, block_size))]
    fields += [timestamp, events, *more]
    return _array(len(fields)) + b"".join(fields)


def _corrupted(rng: random.Random, payload: bytes) -> bytes:
    content = bytearray(payload)
    for _ in range(rng.randint(1, 2)):
        position = rng.randrange(min(len(content), rng.choice([20, 80, 10_000])))
        content[position] = rng.choice([0, 1, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC4, 0xCF, 0xDD, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        del content[rng.randrange(1, len(content)) :]
    return bytes(content) + rng.choice([b"", b"", b"", b"\x00"])


def _messages(rng: random.Random, ranks: list[_Rank], index: RadixIndex) -> Iterator[Message]:
    """Yield what arrives: batches of all ranks, in runs, with whatever may happen to them."""
    while True:
        rank = rng.choice(ranks)
        for _ in range(rng.choice([1, 2, 10, 40])):
            topic = rng.choice([b"kv/worker-0/%d" % rank.rank] * 9 + [b""])
            sequence = len(rank.kept)
            chance = rng.random()
            if chance < 0.02:
                held = index.digest(WorkerRank(_WORKER, rank.rank))
                digest = (held.num_blocks, held.digest) if rng.random() < 0.8 else (1, 1)
                yield Message(topic, sequence, rank.heartbeat(digest))
                continue
            if chance < 0.022:
                rank.restart()
            payload = rank.batch()
            if chance > 0.998:
                continue
            yield Message(topic, sequence, _corrupted(rng, payload) if chance > 0.99 else payload)
            if chance > 0.98:
                yield Message(topic, sequence, payload)


def _feed(path: _Path, messages: Sequence[Message], now_s: float) -> None:
    for _ in path.follower.receive_all(MessageBlock.of(messages), now_s):
        assert path.index.statistics().num_held >= 0


def _block(batches: Sequence[Batch]) -> MessageBlock:
    return MessageBlock.of([Message(b"kv/w/0", batch.sequence, encode_batch(batch)) for batch in batches])


def _answer(path: _Path, ranks: list[_Rank], forgotten: int, now_s: float) -> None:
    """Answer all questions from what the ranks keep, but for some of the oldest; a rank may be a corrupted number."""
    for question in path.questions():
        asked = ranks[question.rank].kept if question.rank < _NUM_RANKS else []
        kept = list(enumerate(asked))[max(question.request.start_sequence, forgotten) :]
        messages = [Message(b"", sequence, payload) for sequence, payload in kept]
        for _ in path.follower.on_answer(question, messages, now_s):
            pass


@pytest.fixture(autouse=True)
def stopped_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lags equal, however long either path takes."""
    monkeypatch.setattr(canonical.time, "time", lambda: 100.0)


@pytest.mark.parametrize("seed", range(12))
def test_both_paths_come_to_the_same(seed: int) -> None:
    rng = random.Random(seed)
    fast, slow = _Path(is_fast=True), _Path(is_fast=False)
    ranks = [_Rank(rank, rng) for rank in range(_NUM_RANKS)]
    stream, now_s = _messages(rng, ranks, slow.index), 0.0
    for _ in range(40):
        messages = [next(stream) for _ in range(rng.choice([1, 5, 30, 100]))]
        now_s += rng.choice([0.0, 0.1, 5.0])
        _feed(fast, messages, now_s)
        _feed(slow, messages, now_s)
        if rng.random() < 0.9:
            forgotten = rng.choice([0] * 9 + [3])
            _answer(fast, ranks, forgotten, now_s)
            _answer(slow, ranks, forgotten, now_s)
        assert fast.observed() == slow.observed()
    check_invariants(fast.index)
    assert slow.counters.num_batches > 200


def test_ordinary_messages_cost_no_python_each(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(canonical, "decode_batch", lambda *args: decoded.append(args) or decode_batch(*args))
    path = _Path(is_fast=True)
    stored = [Stored(struct.pack("<4Q", *range(10 * sequence, 10 * sequence + 4))) for sequence in range(1, 600)]
    batches = [Batch("w", 0, 1, sequence, _BLOCK_SIZE, 1.0, (event,)) for sequence, event in enumerate(stored)]
    batches.append(Batch("w", 0, 1, len(batches), _BLOCK_SIZE, 1.0, (Removed(stored[0].hashes),)))
    _feed(path, _block(batches), 1.0)
    assert len(decoded) == 1  # the first, which begins the session
    assert path.counters.num_batches == 600
    assert path.index.statistics().num_held == 599 * 4 - 4


def test_others_have_their_turn_while_a_long_block_is_taken() -> None:
    path = _Path(is_fast=True)
    num_messages, num_hashes = 40, MAX_HASHES // 4
    batches = [
        Batch("w", 0, 1, idx, _BLOCK_SIZE, 1.0, (Stored(random.Random(idx).randbytes(num_hashes * 8)),))
        for idx in range(num_messages)
    ]
    turns = [path.index.statistics().num_held for _ in path.follower.receive_all(_block(batches), 1.0)]
    assert turns[-1] == num_messages * num_hashes
    assert all(after - before <= 2 * MAX_HASHES for before, after in pairwise(turns))


def test_a_message_of_more_operations_than_compiled_code_has_room_for_is_applied_whole() -> None:
    path = _Path(is_fast=True)
    events = tuple(Stored(struct.pack("<Q", 1000 + idx)) for idx in range(MAX_OPERATIONS + 1))
    batches = [
        Batch("w", 0, 1, 0, _BLOCK_SIZE, 1.0, (Stored(struct.pack("<Q", 1)),)),
        Batch("w", 0, 1, 1, _BLOCK_SIZE, 1.0, events),
        Batch("w", 0, 1, 2, _BLOCK_SIZE, 1.0, (Stored(struct.pack("<Q", 2)),)),
    ]
    _feed(path, _block(batches), 1.0)
    assert path.index.statistics().num_held == MAX_OPERATIONS + 3
    assert path.counters.num_events == MAX_OPERATIONS + 3
