"""Which form a source takes its stream for: message by message, and as many at a time as there may be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.follow import Question
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.snapshot import block_digest
from kvist.events.transports import Message, ReplayRequest, base
from kvist.events.transports.block import MessageBlock
from kvist.events.types import Batch, Cleared, Heartbeat, Stored
from kvist.indexer.source import MAX_PROBE_DOUBLINGS, PROBE_S, SILENCE_S, Source
from kvist.radix import RadixIndex

BLOCK_SIZE = 4
GARBAGE = b"\x98\xa6kvist1" + bytes(range(200, 240))


def tokens_of(number: int) -> list[int]:
    return [number] * BLOCK_SIZE


def engines(sequence: int, number: int, rank: int | None = 0) -> Message:
    """Return a message of an engine's that stores the prompt of one block of this number."""
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": tokens_of(number),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return Message(b"", sequence, msgspec.msgpack.encode([1.0, [event], rank]))


def canonical(sequence: int, *events, epoch: int = 1, rank: int = 0, block_size: int = BLOCK_SIZE) -> Message:
    """Return a canonical batch."""
    batch = Batch("itself", rank, epoch, sequence, block_size, 1.0, events)
    return Message(b"itself@0", sequence, encode_batch(batch))


def publishers(sequence: int, number: int, **options) -> Message:
    """Return a canonical batch that stores the prompt of one block of this number."""
    return canonical(sequence, Stored(block_hashes(tokens_of(number), BLOCK_SIZE).tobytes()), **options)


def garbage(sequence: int) -> Message:
    return Message(b"", sequence, GARBAGE)


class World:
    """A source, its index, and a clock."""

    def __init__(self, is_block: bool, options: str = "?replay_port=none") -> None:
        self.index = RadixIndex(seed=1)
        self.resyncing: set[WorkerRank] = set()
        self.source = Source("w", f"tcp://127.0.0.1:5557{options}", BLOCK_SIZE, self.index, self.resyncing)
        self.now_s = 100.0
        self._is_block = is_block

    def take(self, *messages: Message) -> None:
        """Receive messages at once, and answer what is asked: nothing is kept."""
        self.hear(*messages)
        self.answer(None)

    def hear(self, *messages: Message) -> None:
        """Receive messages at once."""
        received = MessageBlock.of(messages) if self._is_block else list(messages)
        for _ in self.source.receive_all(received, self.now_s):
            pass

    def answer(self, messages: list[Message] | None) -> None:
        """Answer what is asked now."""
        for question in self.source.questions(self.now_s):
            for _ in self.source.on_answer(question._replace(is_caught_up=True), messages, self.now_s):
                pass

    def reconnect(self) -> None:
        self.source.on_reconnect(self.now_s)
        self.answer(None)

    def holds(self, *numbers: int, rank: int = 0) -> bool:
        """Return whether the index has the prompts of these numbers for the rank, and nothing else."""
        held = self.index.digest(WorkerRank("w", rank))
        hashes = [int(block_hashes(tokens_of(number), BLOCK_SIZE)[0]) for number in numbers]
        digest = sum(block_digest(block_hash, Tier.GPU) for block_hash in hashes) % (1 << 64)
        return (held.num_blocks, held.digest) == (len(numbers), digest)

    @property
    def statistics(self):
        return self.source.statistics(self.now_s)


@pytest.fixture(params=["block", "list"])
def world(request):
    return World(request.param == "block")


def test_what_only_begins_like_a_canonical_batch_changes_nothing(world, caplog):
    world.take(engines(0, 1))
    world.take(engines(1, 2), garbage(2), engines(3, 4))
    world.take(garbage(4))
    world.take(engines(5, 6))
    assert world.holds(1, 2, 4, 6)
    assert world.source.states() == {0: SourceState.LIVE}
    assert world.statistics.num_malformed == 2
    assert caplog.text.count("malformed") == 2  # one line, which says what was expected


def test_garbage_before_the_first_batch_decides_nothing(world, caplog):
    world.take(garbage(0), Message(b"", 1, b""), garbage(2))
    assert world.source.states() == {}
    world.take(garbage(3), publishers(0, 1), publishers(1, 2))
    assert world.holds(1, 2)
    assert world.statistics.num_malformed == 4
    assert caplog.text.count("no batch of an engine's nor a canonical one") == 1


def test_the_version_of_a_batch_that_this_one_cannot_read_is_named(world, caplog):
    later = publishers(0, 1)
    world.take(Message(later.topic, later.sequence, later.payload.replace(b"kvist1", b"kvist2")), publishers(1, 2))
    assert "that this version reads, but kvist2: it is skipped" in caplog.text


def test_a_canonical_batch_takes_over_from_the_engine_in_the_middle_of_a_receive(world):
    world.take(engines(0, 1))
    world.take(engines(1, 2), garbage(2), publishers(0, 7), publishers(1, 8), garbage(3), publishers(2, 9))
    assert world.holds(7, 8, 9)
    assert world.source.states() == {0: SourceState.LIVE}
    assert world.statistics.num_malformed == 2
    assert world.statistics.num_batches == 5


def test_a_canonical_batch_is_found_among_many(world):
    world.take(engines(0, 1))
    world.take(*(engines(number, number) for number in range(1, 40)), publishers(0, 77), publishers(1, 78))
    assert world.holds(77, 78)
    assert world.statistics.num_malformed == 0
    assert world.statistics.num_batches == 42


def test_an_engines_batch_amid_a_canonical_stream_is_malformed(world):
    world.take(publishers(0, 1))
    for sequence in range(100):
        world.take(engines(sequence, 50 + sequence), canonical(1, Heartbeat(1, world_digest(1))))
        world.now_s += SILENCE_S / 2
    assert world.holds(1)
    assert world.statistics.num_malformed == 100


def world_digest(number: int) -> int:
    return block_digest(int(block_hashes(tokens_of(number), BLOCK_SIZE)[0]), Tier.GPU)


def test_an_engine_that_comes_after_a_reconnect_takes_over(world, caplog):
    world.take(publishers(0, 1), publishers(1, 2))
    world.reconnect()
    assert world.holds(1, 2)
    world.take(garbage(0), engines(1, 7), engines(2, 8))
    assert world.holds(7, 8)
    assert world.resyncing == set()
    world.take(engines(3, 9))
    assert world.holds(7, 8, 9)
    assert caplog.text.count("stream changed its format") == 1


def test_a_publisher_that_comes_back_after_a_reconnect_stays(world):
    world.take(publishers(0, 1))
    world.reconnect()
    world.take(garbage(0), publishers(1, 2), engines(0, 7), publishers(2, 3))
    world.take(engines(1, 8))
    assert world.holds(1, 2, 3)
    assert world.statistics.num_malformed == 3


def test_an_engine_takes_over_from_a_publisher_that_fell_silent(world):
    world.take(publishers(0, 1, rank=3))
    world.now_s += SILENCE_S
    world.take(engines(0, 7))
    assert world.holds(1, rank=3)
    world.now_s += 0.1
    world.take(engines(1, 8), engines(2, 9))
    assert world.holds(8, 9)
    assert world.holds(rank=3)


def test_garbage_after_a_reconnect_or_a_silence_leaves_a_canonical_stream_as_it_is(world):
    world.take(publishers(0, 1))
    world.reconnect()
    world.take(garbage(0), Message(b"", 1, b"\x00"))
    world.now_s += 2 * SILENCE_S
    world.take(garbage(2), Message(b"", 1, b""))
    assert world.holds(1)
    assert world.statistics.num_malformed == 4


def test_a_publisher_put_before_an_engine_and_taken_away_again_leaves_nothing_behind(world):
    for round_idx in range(3):
        world.take(engines(0, 1, rank=2), engines(1, 2, rank=3))
        assert (world.holds(1, rank=2), world.holds(2, rank=3)) == (True, True)
        world.reconnect()
        world.take(publishers(0, 5, epoch=round_idx))
        assert world.holds(5)
        assert (world.holds(rank=2), world.holds(rank=3)) == (True, True)
        world.reconnect()
    assert world.statistics.num_batches == 9
    assert world.resyncing == set()


def test_what_was_in_doubt_is_not_when_another_form_takes_over(world):
    world.take(engines(0, 1, rank=5))
    world.source.on_reconnect(world.now_s)
    assert world.resyncing == {WorkerRank("w", 5)}
    world.take(publishers(0, 1))
    assert world.resyncing == set()


def test_a_canonical_stream_of_another_block_size_is_no_reason_to_believe_an_engine(world):
    world.take(publishers(0, 1, block_size=16))
    world.take(engines(0, 7), publishers(1, 1, block_size=16), engines(1, 8))
    assert world.holds()
    assert world.statistics.failure == "block_size 16, expected 4"


def test_a_canonical_answer_to_an_engines_question_decides_too():
    world = World(True, options="")
    world.source.on_reconnect(world.now_s)
    world.answer([engines(0, 1), engines(1, 2)])
    assert world.holds(1, 2)
    world.source.on_reconnect(world.now_s)
    world.now_s += 1.0
    world.answer([publishers(0, 7), publishers(1, 8)])
    assert world.holds(7, 8)
    assert world.statistics.num_malformed == 0
    world.take(publishers(2, 9))
    assert world.holds(7, 8, 9)


def test_an_idle_engine_whose_publisher_was_taken_away_is_found_by_asking():
    world = World(True, options="")
    world.take(publishers(0, 1), publishers(1, 2))
    world.source.on_reconnect(world.now_s)
    assert world.source.questions(world.now_s) == []
    world.now_s += PROBE_S
    assert world.source.questions(world.now_s) == [Question(ReplayRequest(None, (1 << 63) - 1))]
    world.answer([])  # it has nothing from there on, and is no publisher, who would tell how far it is
    assert world.source.questions(world.now_s) == [Question(ReplayRequest(None, 0))]
    world.answer([engines(0, 7), engines(1, 8)])
    assert world.holds(7, 8)
    assert world.source.states() == {0: SourceState.LIVE}
    world.now_s += PROBE_S
    assert world.source.questions(world.now_s) == []


@pytest.mark.parametrize("answers_itself", [False, True])
def test_a_publisher_that_comes_back_is_asked_in_the_words_of_engines_at_most_once(answers_itself):
    world = World(True, options="")
    world.take(publishers(0, 1))
    world.source.on_reconnect(world.now_s)
    if answers_itself:
        world.now_s += PROBE_S
        world.answer([publishers(0, 1), publishers(1, 2)])
    world.take(publishers(1, 2))
    world.now_s += PROBE_S
    assert world.source.questions(world.now_s) == []
    assert world.holds(1, 2)
    assert world.source.states() == {0: SourceState.LIVE}


def test_a_peer_that_answers_nobody_is_asked_more_and_more_rarely():
    world = World(True, options="")
    world.take(publishers(0, 1))
    world.source.on_reconnect(world.now_s)
    asked_at_s = []
    for _ in range(1000):
        world.now_s += PROBE_S / 3
        if world.source.questions(world.now_s):
            asked_at_s.append(world.now_s)
            world.answer(None)
    gaps = [later - earlier for earlier, later in pairwise(asked_at_s)]
    assert gaps[:4] == pytest.approx([PROBE_S * 2, PROBE_S * 4, PROBE_S * 8, PROBE_S * 16])
    assert max(gaps) == pytest.approx(PROBE_S * 2**MAX_PROBE_DOUBLINGS)
    assert world.holds(1)


WHO_IS_THERE = Question(base.WHO_IS_THERE)


def heartbeat(sequence: int, *numbers: int, is_complete: bool = True, **options) -> Message:
    """Return a heartbeat of who holds the prompts of these numbers."""
    hashes = [int(block_hashes(tokens_of(number), BLOCK_SIZE)[0]) for number in numbers]
    digest = sum(block_digest(block_hash, Tier.GPU) for block_hash in hashes) % (1 << 64)
    return canonical(sequence, Heartbeat(len(hashes), digest, is_complete=is_complete), **options)


@pytest.fixture
def followed():
    """A world with two ranks, followed over a connection that stands."""
    world = World(True, options="")
    world.source.subscription = SimpleNamespace(
        num_connects=1, is_caught_up=True, is_peer_gone=False, num_malformed=0, problem=None
    )
    world.source.on_reconnect(world.now_s)
    world.answer([heartbeat(0)])
    world.hear(publishers(0, 1), heartbeat(1, 1), publishers(0, 2, rank=1), heartbeat(1, 2, rank=1))
    assert world.source.questions(world.now_s) == []
    world.now_s += 0.5
    return world


def test_a_process_that_has_nothing_at_all_leaves_nothing_of_the_one_before(followed):
    followed.source.on_reconnect(followed.now_s)
    followed.now_s += PROBE_S
    followed.answer([])  # as a sidecar does whose engine was silent yet, and whoever has nothing
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.LIVE}
    followed.answer([])
    assert followed.source.states() == {0: SourceState.PARTIAL, 1: SourceState.PARTIAL}
    assert followed.holds()
    assert followed.holds(rank=1)
    assert followed.statistics.num_cleared == 2
    followed.now_s += 1000.0
    assert followed.source.questions(followed.now_s) == []
    assert followed.source.states() == {0: SourceState.PARTIAL, 1: SourceState.PARTIAL}
    followed.hear(publishers(0, 7, epoch=2))
    followed.hear(heartbeat(1, 7, epoch=2, is_complete=False))
    assert followed.source.states() == {0: SourceState.PARTIAL, 1: SourceState.PARTIAL}
    followed.hear(heartbeat(1, 7, epoch=2))
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.PARTIAL}
    assert followed.holds(7)


def test_a_rank_that_the_next_process_does_not_name_is_forgotten_and_the_others_are_not(followed):
    followed.source.on_reconnect(followed.now_s)
    followed.hear(publishers(0, 7, epoch=2), heartbeat(1, 7, epoch=2))
    followed.now_s += PROBE_S
    assert followed.source.questions(followed.now_s) == [WHO_IS_THERE]
    followed.answer([heartbeat(1, 7, epoch=2)])
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.PARTIAL}
    assert followed.holds(7)
    assert followed.holds(rank=1)


def test_a_rank_that_fell_silent_on_a_connection_that_stands_is_asked_about(followed):
    """As over a broker, which does not tell that a publisher died and another one came."""
    followed.now_s += SILENCE_S + 1
    followed.hear(heartbeat(1, 1))
    assert followed.source.questions(followed.now_s) == [WHO_IS_THERE]
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.RESYNCING}
    followed.answer([heartbeat(1, 1)])
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.PARTIAL}
    assert followed.source.questions(followed.now_s) == []


def test_a_rank_is_asked_about_whose_last_messages_were_unread_when_its_publisher_was_replaced():
    """No heartbeat was among them, and without one silence says nothing."""
    world = World(True, options="")
    world.source.subscription = SimpleNamespace(num_connects=1, is_caught_up=True)
    world.source.on_reconnect(world.now_s)
    world.answer([])
    world.source.on_reconnect(world.now_s)
    world.hear(publishers(0, 1, rank=1), publishers(0, 2, epoch=2), heartbeat(1, 2, epoch=2))
    world.now_s += SILENCE_S
    world.hear(heartbeat(1, 2, epoch=2))
    assert world.source.questions(world.now_s) == []
    world.now_s += 1.0
    assert world.source.questions(world.now_s) == [WHO_IS_THERE]
    world.answer([heartbeat(1, 2, epoch=2)])
    assert world.source.states() == {1: SourceState.PARTIAL, 0: SourceState.LIVE}
    assert world.holds(rank=1)


def test_a_rank_that_is_named_is_believed_to_be_there_and_asked_about_more_and_more_rarely(followed):
    followed.now_s += SILENCE_S + 1
    asked_at_s = []
    for _ in range(1000):
        followed.now_s += PROBE_S / 3
        if followed.source.questions(followed.now_s):
            asked_at_s.append(followed.now_s)
            followed.answer([heartbeat(1, 1), heartbeat(1, 2, rank=1)])
    gaps = [later - earlier for earlier, later in pairwise(asked_at_s)]
    assert gaps[:3] == pytest.approx([PROBE_S * 2, PROBE_S * 4, PROBE_S * 8])
    assert max(gaps) == pytest.approx(PROBE_S * 2**MAX_PROBE_DOUBLINGS)
    assert followed.source.states() == {0: SourceState.RESYNCING, 1: SourceState.RESYNCING}
    assert followed.holds(1)
    followed.hear(heartbeat(1, 1), heartbeat(1, 2, rank=1))
    assert followed.source.questions(followed.now_s) == []
    assert followed.source.states() == {0: SourceState.LIVE, 1: SourceState.LIVE}
    followed.now_s += SILENCE_S + 1
    assert followed.source.questions(followed.now_s) == [WHO_IS_THERE]


@pytest.mark.parametrize("answer", [None, [garbage(0)]], ids=["none", "damaged"])
def test_no_answer_and_one_that_is_damaged_say_nothing_of_who_is_there(followed, answer):
    followed.now_s += SILENCE_S + 1
    followed.answer(answer)
    assert followed.source.states() == {0: SourceState.RESYNCING, 1: SourceState.RESYNCING}
    assert followed.holds(1)


def test_nobody_is_asked_who_is_there_while_nobody_is_connected(followed):
    followed.source.subscription.is_caught_up = False
    followed.now_s += SILENCE_S + 1
    assert followed.source.questions(followed.now_s) == []


def test_an_engine_in_the_place_of_a_publisher_is_found_before_anything_is_forgotten(followed):
    followed.source.on_reconnect(followed.now_s)
    followed.now_s += PROBE_S
    followed.answer([])
    followed.answer([engines(0, 7)])
    assert followed.holds(7)
    assert followed.source.states() == {0: SourceState.LIVE}


@pytest.mark.parametrize("answer", [[], [heartbeat(5)]], ids=["nothing", "a publisher"])
def test_an_engine_that_speaks_before_a_publisher_is_asked_about_is_not_judged_by_the_answer(followed, answer):
    followed.source.on_reconnect(followed.now_s)
    followed.now_s += PROBE_S
    (question,) = followed.source.questions(followed.now_s)
    followed.hear(engines(0, 7))
    followed.answer([engines(0, 7)])
    exhaust(followed.source.on_answer(question, answer, followed.now_s))
    assert followed.holds(7)
    assert followed.source.states() == {0: SourceState.LIVE}


def test_an_engine_that_speaks_after_its_publisher_was_forgotten_takes_over(followed):
    followed.source.on_reconnect(followed.now_s)
    followed.now_s += PROBE_S
    followed.answer([])
    followed.answer([])
    followed.hear(engines(0, 7))
    assert followed.holds(7)
    assert followed.source.states() == {0: SourceState.LIVE}


def test_the_counts_of_before_stay_when_the_form_changes(world):
    world.take(engines(0, 1), garbage(1), engines(3, 2))
    before = world.statistics
    assert (before.num_malformed, before.num_gaps, before.num_cleared) == (1, 1, 1)
    world.take(publishers(0, 7), garbage(0))
    after = world.statistics
    assert (after.num_malformed, after.num_gaps, after.num_cleared) == (2, 1, 1)
    assert after.num_batches == before.num_batches + 1


@pytest.mark.parametrize("others", [[], ["mamba"], ["sliding_window", "mamba"]])
def test_the_block_size_is_learnt_of_the_group_with_the_largest_window(others):
    sizes: list[int] = []
    source = Source("w", "tcp://127.0.0.1:5557", None, RadixIndex(seed=1), set(), on_block_size=sizes.append)
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "lora_id": None, "medium": "GPU"}
    events = [
        stored | {"token_ids": [7] * size, "block_size": size, "kv_cache_spec_kind": kind, "group_idx": group}
        for group, (kind, size) in enumerate([*((kind, 16) for kind in others), ("full_attention", 4)])
    ]
    events[0]["kv_cache_spec_sliding_window"] = 1024
    exhaust(source.receive_all([Message(b"", 0, msgspec.msgpack.encode([1.0, events, 0]))], 100.0))
    assert sizes == [source.block_size] == [4]
    assert source.statistics(100.0).failure is None


def exhaust(work: Iterator[None]) -> None:
    for _ in work:
        pass


def test_how_far_a_stream_was_followed_is_told_amid_a_gap_but_not_amid_an_answer():
    source = Source("w", "tcp://127.0.0.1:5557", BLOCK_SIZE, RadixIndex(seed=1), set())

    def next_sequence() -> int | None:
        progress = source.progress()
        return None if progress is None else progress.ranks[0].next_sequence

    assert next_sequence() is None
    for message in publishers(0, 1), publishers(3, 4):
        exhaust(source.receive_all([message], 100.0))
    assert (next_sequence(), source.positions) == (1, ((1, 1),))
    (question,) = source.questions(101.0)
    taking = source.on_answer(question, [publishers(1, 2), publishers(2, 3)], 101.0)
    next(taking)
    assert (next_sequence(), source.is_applying_answer) == (None, True)
    exhaust(taking)
    assert (next_sequence(), source.is_applying_answer) == (4, False)


def test_a_stream_that_cannot_be_followed_any_more_amid_an_answer_holds_nothing():
    world = World(is_block=False, options="")
    world.hear(publishers(0, 1), publishers(3, 4))
    (question,) = world.source.questions(101.0)
    next(world.source.on_answer(question, [publishers(1, 2), publishers(2, 3)], 101.0))
    world.source.fail("full", 101.0)
    assert (world.source.progress(), world.source.is_applying_answer) == (None, False)
    assert (world.source.states(), world.source.was_cleared) == ({}, True)
    assert (world.holds(), world.resyncing) == (True, set())
    after = world.statistics
    assert (after.num_batches, after.num_gaps, after.failure) == (1, 1, "full")


def test_a_partial_rank_that_holds_nothing_lacks_nothing(world):
    for message in (publishers(0, 1), publishers(3, 2)):  # nobody can be asked for what is between
        world.take(message)
    assert world.source.states() == {0: SourceState.PARTIAL}
    world.take(canonical(4, Cleared()), publishers(5, 3))
    assert world.source.states() == {0: SourceState.LIVE}
    assert world.holds(3)


def test_what_is_lost_behind_a_clearing_in_one_answer_leaves_the_rank_partial():
    world = World(is_block=False, options="")
    world.take(publishers(0, 1), publishers(5, 2))
    for answer in (None, None, [canonical(1, Cleared()), publishers(2, 3)]):
        world.now_s += 5.0
        world.answer(answer)
    assert world.source.states() == {0: SourceState.PARTIAL}
    assert world.holds(2)
