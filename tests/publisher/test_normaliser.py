"""The normaliser: canonical hashes, chains that end before doubt, and residency as a set."""

from __future__ import annotations

import logging
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL, EngineCleared, EngineCreated, EngineRemoved, EngineStored
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.events.types import Cleared, Removed, Stored, Tier
from kvist.publisher.filter import WindowFilter
from kvist.publisher.normaliser import Normaliser

B = 4
TOKENS = list(range(1, 17))
C1, C2, C3, C4 = block_hashes(TOKENS, B).tolist()


def held(normaliser: Normaliser) -> tuple[int, int]:
    """Return how much is held, and its digest."""
    return normaliser._residency.num_blocks, normaliser._residency.digest


def pack(*hashes: int) -> bytes:
    return b"".join(h.to_bytes(8, "little") for h in hashes)


def store(*engine_hashes, first=0, parent=None, **fields) -> EngineStored:
    """Store blocks of TOKENS, from block `first` on."""
    tokens = fields.pop("token_ids", TOKENS[first * B : (first + len(engine_hashes)) * B])
    fields.setdefault("block_size", B)
    return EngineStored(engine_hashes, tokens, parent_block_hash=parent, **fields)


def remove(*engine_hashes, tier: Tier | None = Tier.GPU) -> EngineRemoved:
    return EngineRemoved(engine_hashes, tier=tier)


def normalise_all(normaliser, *events):
    return [canonical for event in events for canonical in normaliser.normalise(event)]


@pytest.fixture
def normaliser() -> Normaliser:
    return Normaliser(B)


def test_a_chain_is_published_under_its_canonical_hashes(normaliser):
    assert normaliser.normalise(store(101, 102, 103)) == (Stored(pack(C1, C2, C3)),)


def test_a_chain_continues_behind_its_parent(normaliser):
    events = normalise_all(normaliser, store(101, 102), store(103, 104, first=2, parent=102))
    assert events == [Stored(pack(C1, C2)), Stored(pack(C3, C4), parent=C2)]


def test_removed_blocks_are_published_in_one_event(normaliser):
    normaliser.normalise(store(101, 102, 103))
    assert normaliser.normalise(remove(103, 101)) == (Removed(pack(C3, C1)),)
    assert held(normaliser) == (1, block_digest(C2, Tier.GPU))


def test_cleared_forgets_everything(normaliser):
    normaliser.normalise(store(101))
    assert normaliser.normalise(EngineCleared()) == (Cleared(),)
    assert held(normaliser) == (0, 0)
    assert normaliser.normalise(store(102, first=1, parent=101)) == ()


def test_hashes_may_be_bytes_and_tokens_an_array(normaliser):
    event = EngineStored([b"a" * 32, b"b" * 32], np.array(TOKENS[:8]), B)
    assert normaliser.normalise(event) == (Stored(pack(C1, C2)),)
    assert normaliser.normalise(remove(b"a" * 32)) == (Removed(pack(C1)),)


# A chain ends before the first block in doubt.


def test_a_partial_block_ends_the_chain_and_its_removal_is_not_published(normaliser):
    event = store(1, 2, 3, token_ids=TOKENS[:11], block_lengths=[4, 4, 3])
    assert normaliser.normalise(event) == (Stored(pack(C1, C2)),)
    assert normaliser.normalise(remove(3, 2)) == (Removed(pack(C2)),)
    assert normaliser.normalise(remove(3)) == ()


def test_a_store_of_one_partial_block_publishes_nothing(normaliser):
    assert normaliser.normalise(store(1, token_ids=[1, 2], block_lengths=[2])) == ()
    assert normaliser.normalise(remove(1)) == ()


def test_blocks_behind_a_partial_one_are_not_published(normaliser):
    event = store(1, 2, 3, token_ids=TOKENS[:11], block_lengths=[4, 3, 4])
    assert normaliser.normalise(event) == (Stored(pack(C1)),)


def test_a_partial_block_that_is_stored_full_later_can_be_removed(normaliser):
    normaliser.normalise(store(1, token_ids=[1, 2], block_lengths=[2]))
    assert normalise_all(normaliser, store(1), remove(1)) == [Stored(pack(C1)), Removed(pack(C1))]


def test_a_hole_ends_the_chain(normaliser):
    assert normaliser.normalise(store(1, None, 3)) == (Stored(pack(C1)),)
    assert normaliser.normalise(store(None, 2)) == ()


def test_a_block_longer_than_the_block_size_ends_the_chain_and_is_warned_of_once(normaliser, caplog):
    event = store(1, 2, 3, token_ids=TOKENS[:13], block_lengths=[4, 5, 4])
    assert normaliser.normalise(event) == (Stored(pack(C1)),)
    assert normaliser.normalise(event) == ()
    assert caplog.text.count("too long rank=0 length=5 block_size=4") == 1


def test_tokens_of_blocks_that_were_skipped_are_not_guessed_at(normaliser):
    assert normaliser.normalise(store(1, 3, token_ids=TOKENS[:12])) == ()
    assert normaliser.normalise(store(1, 2, token_ids=TOKENS[:8], block_lengths=[4])) == ()


@pytest.mark.parametrize("engine_block_size", [2, 8])
def test_another_block_size_than_configured_is_warned_of_once(normaliser, caplog, logged, engine_block_size):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            event = store(1, token_ids=TOKENS[:engine_block_size], block_size=engine_block_size)
            assert normaliser.normalise(event) == ()
    assert len(logged("kvist.publisher.normaliser")) == 1
    assert normaliser.normalise(store(1)) == (Stored(pack(C1)),)


def test_an_unknown_parent_drops_the_event_and_changes_nothing(normaliser):
    normaliser.normalise(store(101, 102))
    before = held(normaliser)
    assert normaliser.normalise(store(103, first=2, parent=777)) == ()
    assert held(normaliser) == before


def test_a_parent_that_was_removed_is_unknown(normaliser):
    normaliser.normalise(store(101))
    normaliser.normalise(remove(101))
    assert normaliser.normalise(store(102, first=1, parent=101)) == ()


def test_a_block_that_is_its_own_parent_is_refused(normaliser):
    normaliser.normalise(store(101, 102))
    assert normaliser.normalise(store(102, first=2, parent=102)) == ()


def test_a_chain_ends_before_a_hash_that_repeats(normaliser):
    assert normaliser.normalise(store(1, 1, 2)) == (Stored(pack(C1)),)
    assert normaliser.normalise(store(2, 3, 2, first=1, parent=1)) == (Stored(pack(C2, C3), parent=C1),)


def test_unknown_removals_change_nothing_and_the_others_go_on(normaliser):
    normaliser.normalise(store(101, 102))
    assert normaliser.normalise(remove(999, 101)) == (Removed(pack(C1)),)


def test_removing_a_suffix_again_changes_nothing(normaliser):
    normaliser.normalise(store(1, 2, 3))
    assert normaliser.normalise(remove(3, 2)) == (Removed(pack(C3, C2)),)
    assert normaliser.normalise(remove(3, 2)) == ()


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_tokens_outside_u32_never_raise(normaliser, wrong):
    assert normaliser.normalise(store(1, token_ids=[1, 2, wrong, 4])) == ()


def test_a_chain_of_a_hundred_thousand_blocks_needs_no_recursion():
    normaliser = Normaliser(1)
    n = 100_000
    (event,) = normaliser.normalise(EngineStored(range(n), range(n), 1))
    assert len(event.hashes) == 8 * n
    (event,) = normaliser.normalise(EngineRemoved(range(n - 1, -1, -1)))
    assert len(event.hashes) == 8 * n
    assert held(normaliser) == (0, 0)


# What separates blocks besides tokens.


def test_adapter_and_salt_separate_blocks_and_hold_for_the_whole_chain(normaliser):
    scope = {"lora_name": "sql", "cache_salt": "tenant"}
    expected = block_hashes(TOKENS, B, **scope).tolist()
    events = normalise_all(normaliser, store(1, 2, **scope), store(3, first=2, parent=2), store(4, first=3, parent=3))
    assert b"".join(event.hashes for event in events) == pack(*expected)


def test_a_salt_is_inherited_from_a_parent_that_moved_to_another_tier(normaliser):
    normalise_all(normaliser, store(1, cache_salt="tenant"), store(1, cache_salt="tenant", tier=Tier.HOST), remove(1))
    c1, c2 = block_hashes(TOKENS[:8], B, cache_salt="tenant").tolist()
    assert normaliser.normalise(store(2, first=1, parent=1)) == (Stored(pack(c2), parent=c1),)


def test_an_adapter_number_is_named_by_the_mapping():
    normaliser = Normaliser(B, lora_names={7: "sql"})
    expected = block_hashes(TOKENS[:B], B, lora_name="sql").tolist()
    assert normaliser.normalise(store(1, lora_id=7)) == (Stored(pack(*expected)),)


def test_an_adapter_without_a_name_is_left_out(normaliser):
    assert normaliser.normalise(store(1, lora_id=7)) == ()


def test_adapter_number_zero_is_the_base_model(normaliser):
    assert normaliser.normalise(store(1, lora_id=0)) == (Stored(pack(C1)),)


def test_images_and_eagle_pairs_enter_the_hash(normaliser):
    expected = block_hashes(TOKENS[:9], B, mm_hashes=[[], [5]], is_eagle=True).tolist()
    event = store(1, 2, token_ids=TOKENS[:9], mm_hashes=[[], [5]], is_eagle=True)
    assert normaliser.normalise(event) == (Stored(pack(*expected)),)


# Residency is a set.


def test_copies_of_a_block_are_not_counted(normaliser):
    assert normaliser.normalise(store(1)) == (Stored(pack(C1)),)
    assert normaliser.normalise(store(1)) == ()
    assert normaliser.normalise(remove(1)) == (Removed(pack(C1)),)
    assert normaliser.normalise(remove(1)) == ()
    assert normaliser.normalise(store(1)) == (Stored(pack(C1)),)


def test_a_store_is_published_from_its_first_new_block_to_its_last(normaliser):
    normaliser.normalise(store(1, 2, 3, 4))
    normaliser.normalise(remove(2))
    assert normaliser.normalise(store(1, 2, 3, 4)) == (Stored(pack(C2), parent=C1),)
    normaliser.normalise(remove(1, 3))
    assert normaliser.normalise(store(1, 2, 3, 4)) == (Stored(pack(C1, C2, C3)),)


def test_a_block_with_two_engine_hashes_is_held_until_both_are_removed(normaliser):
    assert normalise_all(normaliser, store(1), store(2), store(3)) == [Stored(pack(C1))]
    assert held(normaliser)[0] == 1
    assert normalise_all(normaliser, remove(1), remove(3)) == []
    assert normaliser.normalise(remove(2)) == (Removed(pack(C1)),)


def test_an_engine_hash_that_is_reused_names_its_new_block(normaliser):
    other = block_hashes([9, 9, 9, 9], B).tolist()
    normaliser.normalise(store(1))
    assert normaliser.normalise(store(1, token_ids=[9, 9, 9, 9])) == (Removed(pack(C1)), Stored(pack(*other)))
    assert held(normaliser) == (1, block_digest(other[0], Tier.GPU))


def test_a_block_may_be_in_two_tiers_and_its_hash_lives_until_neither_holds_it(normaliser):
    host = normaliser.normalise(store(1, tier=Tier.HOST))
    assert host == (Stored(pack(C1), tier=Tier.HOST),)
    assert normalise_all(normaliser, store(1), remove(1)) == [Stored(pack(C1)), Removed(pack(C1))]
    assert normaliser.normalise(store(2, first=1, parent=1)) == (Stored(pack(C2), parent=C1),)
    assert normaliser.normalise(remove(1, tier=Tier.HOST)) == (Removed(pack(C1), tier=Tier.HOST),)
    assert normaliser.normalise(store(3, first=1, parent=1)) == ()


def test_a_removal_from_every_tier_names_each_that_held_the_block(normaliser):
    normalise_all(normaliser, store(1, 2), store(1, tier=Tier.DISK))
    assert normaliser.normalise(remove(1, 2, 3, tier=None)) == (
        Removed(pack(C1, C2), tier=Tier.GPU),
        Removed(pack(C1), tier=Tier.DISK),
    )


def test_a_store_without_tokens_places_blocks_that_another_tier_holds(normaliser):
    normaliser.normalise(store(1, 2, lora_name="sql"))
    c1, c2 = block_hashes(TOKENS[:8], B, lora_name="sql").tolist()
    offload = EngineStored([2, 5], [], 0, tier=Tier.HOST)
    assert normaliser.normalise(offload) == (Stored(pack(c2), parent=c1, tier=Tier.HOST),)
    normaliser.normalise(remove(1))
    assert normaliser.normalise(EngineStored([2], [], 0, tier=Tier.DISK)) == ()


def test_memory_is_that_of_the_blocks_held(normaliser):
    for round_idx in range(3):
        normaliser.normalise(store(*range(4), cache_salt=f"tenant-{round_idx}"))
        normaliser.normalise(store(*range(4), tier=Tier.HOST))
        normaliser.normalise(store(*range(10, 14), tier=Tier.HOST))
        normaliser.normalise(remove(*range(14), tier=None))
    residency = normaliser._residency
    held = [*residency._block_of, residency.places, residency._num_aliases, residency.scopes]
    assert not any(held)


def test_a_block_size_that_is_not_positive_is_refused():
    with pytest.raises(InvalidValueError, match="block_size"):
        Normaliser(0)


# Filter and normaliser together, against a model of the engine.


class ModelEngine:
    """An engine with a full and a sliding group, whose events go to ours, and which knows what the full one holds."""

    def __init__(self) -> None:
        self.filter = WindowFilter()
        self.normaliser = Normaliser(2, lora_names={1: "sql"})
        self.index: set[tuple[int, Tier]] = set()
        self.held: dict[tuple[int, Tier], int] = {}
        for window, group in ((512, 1), (FULL, 0)):
            self.report(EngineCreated(window, group))

    def report(self, event) -> None:
        for passed in self.filter.admit(event):
            for canonical in self.normaliser.normalise(passed):
                self.apply(canonical)

    def apply(self, canonical) -> None:
        if isinstance(canonical, Cleared):
            self.index.clear()
            return
        blocks = {(block_hash, canonical.tier) for block_hash in array("Q", canonical.hashes)}
        assert blocks
        if isinstance(canonical, Stored):
            parents = {block_hash for block_hash, _ in self.index}
            assert canonical.parent is None or canonical.parent in parents
            self.index |= blocks
        else:
            assert blocks <= self.index
            self.index -= blocks

    def store(self, tokens, num_cached, lora_id, tier, has_copy, variant) -> None:
        """Store a prompt's blocks behind the first `num_cached` or as many as are held; a partial last one too.

        `variant` is something that the engine hashes and we do not.
        """
        names = [hash((variant, lora_id, *tokens[: 2 * i + 2])) for i in range((len(tokens) + 1) // 2)]
        num_held = next((i for i, name in enumerate(names) if not self.is_held(name)), len(names))
        first = min(num_cached, num_held, len(names))
        for group, window in ((1, 512), (0, FULL)):
            event = EngineStored(
                names[first:],
                tokens[2 * first :],
                2,
                parent_block_hash=names[first - 1] if first else None,
                block_lengths=[len(tokens[i : i + 2]) for i in range(2 * first, len(tokens), 2)],
                window=window,
                group=group,
                tier=tier,
                lora_id=lora_id,
            )
            for _ in range(1 + has_copy):
                self.report(event)
        canonical = block_hashes(tokens, 2, lora_name="sql" if lora_id else None).tolist()
        self.held.update({(names[i], tier): canonical[i] for i in range(first, len(canonical))})

    def is_held(self, name: int) -> bool:
        return any((name, tier) in self.held for tier in Tier)

    def remove(self, pick: int) -> None:
        if self.held:
            name, tier = sorted(self.held)[pick % len(self.held)]
            for group in (1, 0):
                self.report(EngineRemoved([name], group=group, tier=tier))
            del self.held[name, tier]

    def clear(self) -> None:
        self.report(EngineCleared())
        self.held.clear()

    def check(self) -> None:
        expected = {(canonical, tier) for (_, tier), canonical in self.held.items()}
        assert self.index == expected
        digest = sum(block_digest(block_hash, tier) for block_hash, tier in expected) % 2**64
        assert held(self.normaliser) == (len(expected), digest)


operations = st.one_of(
    st.tuples(
        st.just("store"),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(0, 4),
        st.sampled_from([0, 1]),
        st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST]),
        st.booleans(),
        st.sampled_from([0, 0, 1]),
    ),
    st.tuples(st.just("remove"), st.integers(0, 100)),
    st.tuples(st.just("remove"), st.integers(0, 100)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=300)
@given(st.lists(operations, max_size=40))
def test_what_is_published_adds_up_to_what_the_engine_holds(history):
    engine = ModelEngine()
    for name, *arguments in history:
        getattr(engine, name)(*arguments)
        engine.check()
