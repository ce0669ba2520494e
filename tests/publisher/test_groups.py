"""What a rank's other groups hold: rules, and whole streams against an account of every group."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvist.events import FULL, EngineCleared, EngineRemoved, EngineStored, Tier, WorkerRank
from kvist.events.dialects.trtllm import TrtllmDecoder
from kvist.events.engine_events import STATE
from kvist.events.hashing import block_hashes
from kvist.events.types import GroupRule
from kvist.publisher.groups import rule_of
from kvist.publisher.stream import RankStream
from kvist.radix import RadixIndex

SOURCE = WorkerRank("w", 0)
SIZE = 4
WINDOWS = {0: FULL, 1: 9, 2: STATE, 3: 9, 4: 6, 5: 9}
SMALL, SMALL_SIZE = 5, 2
"""A group whose blocks are smaller than the published ones."""
NEEDED = {1: 2, 2: 1, 3: 2, 4: 2}


@pytest.mark.parametrize(
    ("window", "block_size", "rule"),
    [
        (1024, 16, GroupRule(64)),
        (1025, 16, GroupRule(64)),
        (1026, 16, GroupRule(65)),
        (128, 32, GroupRule(4, 2)),
        (64, 8, GroupRule(4)),
        (STATE, 64, GroupRule(1)),
        (STATE, 8, GroupRule(1)),
        (FULL, 16, GroupRule(1 << 20)),
        (1, 16, GroupRule(0)),
        (64, 24, None),
        (64, 0, None),
        (64, 16 * 257, None),
        (1 << 40, 16, GroupRule(1 << 20)),
    ],
)
def test_a_group_needs_the_blocks_of_its_window(window, block_size, rule):
    assert rule_of(window, block_size, 16) == rule


class Both:
    """A rank's streams, applied to an index, and the account of an engine that has six groups."""

    def __init__(self, rng: random.Random, *, counts_copies: bool) -> None:
        self.rng, self.index, self.counts_copies = rng, RadixIndex(), counts_copies
        self.stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
        self.stream.set_complete(counts_copies)
        self.windows = [*WINDOWS]
        self.copies: Counter[tuple[int, int]] = Counter()
        self.prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 8) * SIZE)] for _ in range(12)]

    def names(self, prompt: list[int], size: int = SIZE) -> list[int]:
        return [hash(tuple(prompt[: end + size])) % (1 << 64) for end in range(0, len(prompt), size)]

    def step(self) -> None:
        rng = self.rng
        prompt, group = rng.choice(self.prompts), rng.choice([0, 0, *self.windows])
        size = SMALL_SIZE if group == SMALL else SIZE
        names, needed = self.names(prompt, size), 4 if group == SMALL else NEEDED.get(group)
        if rng.random() < 0.02:
            self.copies.clear()
            self.stream.admit(EngineCleared())
        elif rng.random() < 0.6:
            # As an engine does: what is published is a chain from where it goes on, others skip blocks.
            start = next((idx for idx, name in enumerate(names) if not self.copies[0, name]), len(names) - 1)
            start = rng.randint(0, start)
            stored = [each for each in names[start:] if group in (0, SMALL) or rng.random() < 0.8]
            parent = names[start - 1] if start else None
            tokens = prompt[start * size :]
            event = EngineStored(stored, tokens, size, parent, window=WINDOWS[group], group=group)
            self.stream.admit(event)
            for name in stored if needed is None or self.counts_copies else stored[-needed:]:
                self.copies[group, name] = self.copies[group, name] + 1 if self.counts_copies else 1
        else:
            removed = rng.sample(names, rng.randint(1, len(names)))
            self.stream.admit(EngineRemoved(removed, group=group))
            for name in removed:
                self.copies[group, name] = max(0, self.copies[group, name] - 1) if self.counts_copies else 0

    def hit(self, prompt: list[int]) -> int:
        names = self.names(prompt)
        for end in range(len(names), 0, -1):
            needed = {group: names[max(0, end - count) : end] for group, count in NEEDED.items()} | {0: names[:end]}
            needed[SMALL] = self.names(prompt[: end * SIZE], SMALL_SIZE)[-4:]
            if all(self.copies[group, name] for group, each in needed.items() for name in each):
                return end
        return 0

    def publish(self) -> None:
        for each, source in ((self.stream, SOURCE), (self.stream.companion, SOURCE.companion)):
            for batch in each.close_batches(0.0):
                assert batch.source == source
                self.index.apply(source, batch.events)
        (heartbeat,) = self.stream.companion.heartbeat(0.0).events
        assert heartbeat.num_blocks == self.index.digest(SOURCE.companion).num_blocks
        assert heartbeat.digest == self.index.digest(SOURCE.companion).digest
        if heartbeat.rules:
            self.index.set_groups(SOURCE, heartbeat.rules)


@pytest.mark.parametrize("counts_copies", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_and_its_companion_tell_what_the_engine_will_hit(seed, counts_copies):
    both = Both(random.Random(seed), counts_copies=counts_copies)
    for group in WINDOWS:  # all turn up before anything is asked, the largest not first
        name, size = [group + 7], SMALL_SIZE if group == 0 else SIZE
        both.stream.admit(EngineStored(name, [9] * size, size, window=WINDOWS[5 - group], group=5 - group))
    for _ in range(400):
        both.step()
        if both.rng.random() < 0.2:
            both.publish()
            for prompt in both.prompts:
                match = both.index.match(block_hashes(prompt, SIZE))
                assert (match[SOURCE].gpu if SOURCE in match else 0) == both.hit(prompt)


def test_another_stream_goes_on_with_what_the_groups_hold():
    both = Both(random.Random(3), counts_copies=True)
    both.windows.remove(SMALL)  # of smaller blocks nobody else can go on
    for _ in range(200):
        both.step()
    resumed = RankStream(SOURCE, SIZE, 1, counts_copies=True, has_all_groups=True)
    resumed.resume(both.stream.state())
    assert resumed.companion.rules == both.stream.companion.rules
    assert resumed.companion.residency.digest == both.stream.companion.residency.digest
    assert resumed.companion.residency.num_blocks > 0
    both.stream = resumed
    both.index = RadixIndex()
    held = np.array([*resumed.residency.places], np.uint64)
    assert len(held)
    for _ in range(100):
        both.step()
    assert resumed.companion.group_counts() == both.stream.companion.group_counts()


@pytest.mark.parametrize(("size", "group", "window", "num_held"), [(6, 1, 64, 0), (2, 1, 6, 0)])
def test_what_does_not_fit_the_rules_is_said_to_be_incomplete_with_copies_counted_on(size, group, window, num_held):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    stream.heartbeat(0.0)
    assert stream.companion.is_complete
    stream.admit(EngineStored([1], [1, 2, 3, 4, 5, 6][:size], size, window=window, group=group))
    resumed = RankStream(SOURCE, SIZE, 1, has_all_groups=True, counts_copies=True)
    resumed.resume(stream.state())
    for each in (stream, resumed):
        each.heartbeat(0.0)
        assert each.is_complete
        assert each.residency.counts_copies
        assert not each.companion.is_complete
        assert each.companion.residency.num_blocks == num_held


@pytest.mark.parametrize("window", [9, STATE])
def test_parts_of_published_blocks_are_of_no_use_unless_there_are_states(window):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True)
    stream.admit(EngineStored([7], [1, 2], 2, window=FULL, group=0))
    assert not stream.is_expressible  # all of the engine's blocks may be as small
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    assert stream.is_expressible
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=window, group=1))
    assert stream.is_expressible == (window is not STATE)


@pytest.mark.parametrize("skipped", [[], [8]])
def test_where_a_group_of_smaller_blocks_skips_some_it_is_not_known_which_the_others_are(skipped):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    stream.admit(EngineStored([7, 1], [*skipped, 1, 2, 3, 4], 2, window=5, group=1))
    assert stream.is_expressible == (not skipped)
    assert stream.companion.residency.num_blocks == (not skipped)


def test_smaller_blocks_that_come_before_the_published_groups_are_counted_and_only_by_who_saw_them():
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
    stream.admit(EngineStored([7], [1, 2], 2, window=5, group=1))
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    assert stream.companion.residency.num_blocks == 0
    stream.admit(EngineStored([1], [3, 4], 2, 7, window=5, group=1))
    assert stream.is_expressible
    assert stream.companion.residency.num_blocks == 1
    resumed = RankStream(SOURCE, SIZE, 1, has_all_groups=True, counts_copies=True)
    resumed.resume(stream.state())
    assert not resumed.is_expressible
    assert resumed.companion.residency.num_blocks == 0
    stream.admit(EngineRemoved([7], group=1))
    assert stream.companion.residency.num_blocks == 0


def test_blocks_of_other_groups_are_counted_up_to_a_bound_and_the_rank_says_where_it_is_reached(monkeypatch):
    monkeypatch.setattr("kvist.publisher.stream.MAX_COUNTED", 8)
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
    for name in range(100):
        assert stream.is_expressible == (name <= 8)
        for group, window in ((0, FULL), (1, 8)):
            stream.admit(EngineStored([name], [name] * SIZE, SIZE, window=window, group=group))
    assert len(stream.companion.group_counts()) == stream.companion.residency.num_blocks == 8
    stream.admit(EngineRemoved([0], group=1))
    assert not stream.is_expressible
    stream.admit(EngineCleared())
    assert stream.is_expressible


@pytest.mark.parametrize("tier", [None, Tier.GPU])
def test_a_group_that_was_published_before_the_rank_was_cleared_is_still_needed_for_a_hit(tier):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True)
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=8, group=1))
    stream.admit(EngineCleared(tier=tier))
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    assert stream.companion.rules == (GroupRule(0), GroupRule(2))


def test_a_tier_beside_the_gpu_does_not_count_for_the_groups():
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True)
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=0))
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=8, group=1, tier=Tier.HOST))
    assert stream.companion.residency.num_blocks == 0
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=8, group=1))
    assert stream.companion.residency.num_blocks == 1


def test_groups_that_are_known_by_their_windows_alone_are_told_apart_as_tensorrt_llm_reports_them():
    def event(event_id: int, window: int, data: dict[str, object]) -> dict[str, object]:
        return {"event_id": event_id, "window_size": window, "data": data}

    def stored(*names: int, parent: int | None = None) -> dict[str, object]:
        blocks = [
            {"block_hash": name, "cache_level": 0, "tokens": [{"token_id": name * 10 + idx} for idx in range(SIZE)]}
            for name in names
        ]
        return {"type": "stored", "parent_hash": parent, "blocks": blocks}

    stream, index = RankStream(SOURCE, SIZE, 0, has_all_groups=True), RadixIndex()
    events = [
        event(0, 4096, stored(1, 2, 3)),
        event(1, 8, stored(1, 2, 3)),
        event(2, 8, {"type": "removed", "block_hashes": [3]}),
    ]
    hashes = block_hashes([name * 10 + idx for name in (1, 2, 3) for idx in range(SIZE)], SIZE)
    for num_told, num_hit in ((1, 3), (2, 3), (3, 2)):
        for each in TrtllmDecoder(SIZE).decode(events[num_told - 1 : num_told]).events:
            stream.admit(each)
        for source, each in ((SOURCE, stream), (SOURCE.companion, stream.companion)):
            for batch in each.close_batches(0.0):
                index.apply(source, batch.events)
        if stream.companion.rules:
            index.set_groups(SOURCE, stream.companion.rules)
        assert index.match(hashes)[SOURCE].gpu == num_hit


@pytest.mark.parametrize(
    ("window", "size", "rule", "num_held"), [(STATE, SIZE, GroupRule(1), 1), (9, 2 * SIZE, GroupRule(1, 2), 0)]
)
def test_a_group_that_shows_before_the_published_one_is_followed_by_its_own_rule(window, size, rule, num_held):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True)
    tokens = list(range(2 * SIZE))
    stream.admit(EngineStored([2], tokens[-size:], size, None, window=window, group=0))
    stream.admit(EngineStored([1, 2], tokens, SIZE, window=FULL, group=1))
    assert stream.companion.residency.num_blocks == num_held
    stream.admit(EngineStored([2], tokens[-size:], size, None, window=window, group=0))
    assert stream.companion.rules == (GroupRule(0), rule)
    assert stream.companion.residency.num_blocks == 1


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_report_needs_none_of_a_group_that_looks_back_on_nothing(num_ahead):
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True, counts_copies=True, num_ahead=num_ahead)
    for is_report in (False, True):
        stream.admit(EngineStored([1, 2], list(range(8)), SIZE, window=FULL, group=0, is_report=is_report))
        stream.admit(EngineStored([2], [4, 5, 6, 7], SIZE, 1, window=1, group=1, is_report=is_report))
    assert stream.residency.num_blocks == 2
    stream.admit(EngineRemoved([1, 2], group=0))
    assert stream.residency.num_blocks == 0


def test_what_leaves_a_group_before_the_published_one_shows_is_gone():
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True)
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=STATE, group=0))
    stream.admit(EngineRemoved([1], group=0))
    stream.admit(EngineStored([1], [1, 2, 3, 4], SIZE, window=FULL, group=1))
    assert stream.companion.rules == (GroupRule(0), GroupRule(1))
    assert stream.companion.residency.num_blocks == 0
