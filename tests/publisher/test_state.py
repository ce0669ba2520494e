"""A sidecar's state comes back as it was, or is refused: cut, altered, foreign or of another version."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events import Tier
from kvist.events.engine_events import FULL
from kvist.publisher.filter import FilterState
from kvist.publisher.residency import Chain, Residency, Scope
from kvist.publisher.state import SidecarState, StateStore, StreamProgress, pack, unpack
from kvist.publisher.stream import RankState

FILTER = FilterState(False, FULL, 1, True, frozenset({(1,), 512, FULL}), True, False)
STREAM = StreamProgress("tcp://127.0.0.1:5557", 7, True, ((5, 55), (6, 1 << 63)), (0, 3))
U64 = st.integers(0, 2**64 - 1)


def state_of(**residencies: Residency) -> SidecarState:
    ranks = {int(name[1:]): RankState(FILTER, residency) for name, residency in residencies.items()}
    return SidecarState(16, "settings", (STREAM,), ranks)


def small_state() -> SidecarState:
    residency = Residency()
    residency.hold(Chain([1, 2], [11, 22], None, Tier.GPU))
    return state_of(r0=residency)


def contents(residency: Residency) -> tuple[object, ...]:
    names = {tier: dict(residency.names(tier)) for tier in Tier}
    more = dict(residency.copies), dict(residency.places), dict(residency.scopes)
    return names, *more, residency.num_blocks, residency.digest


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(U64, min_size=1, max_size=4, unique=True),
            st.sampled_from(Tier),
            st.sampled_from([Scope(None, None), Scope("sql", None), Scope(None, "salt"), Scope("sql", "salt")]),
        ),
        max_size=8,
    ),
    st.data(),
)
def test_whatever_was_held_is_held_again_and_goes_on_alike(chains, data):
    residency, blocks = Residency(), []
    residency.counts_copies = True
    for names, tier, scope in chains:
        parent = data.draw(st.sampled_from(blocks)) if blocks else None
        hashes = data.draw(st.lists(U64 | st.sampled_from(blocks or [9]), min_size=len(names), max_size=len(names)))
        residency.hold(Chain(names, hashes, parent, tier, scope))
        blocks += [block_hash for block_hash in hashes if residency.holds(block_hash)]
        blocks = [block_hash for block_hash in blocks if residency.holds(block_hash)]
    read = unpack(pack(state_of(r0=residency, r3=Residency())))
    assert (read.block_size, read.settings, read.streams) == (16, "settings", (STREAM,))
    assert {rank: each.filter for rank, each in read.ranks.items()} == {0: FILTER, 3: FILTER}
    again = read.ranks[0].residency
    again.counts_copies = True
    assert contents(again) == contents(residency)
    for names, tier, _ in chains:
        assert again.release(names, tier) == residency.release(names, tier)
    assert contents(again) == contents(residency)


def test_a_state_of_many_blocks_comes_back():
    residency = Residency()
    residency.hold(Chain(range(50_000), range(100_000, 150_000), None, Tier.GPU))
    assert contents(unpack(pack(state_of(r0=residency))).ranks[0].residency) == contents(residency)


def test_a_state_cut_anywhere_is_refused():
    data = pack(small_state())
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"begins|checksum"):
            unpack(data[:end])


def test_a_state_with_any_byte_altered_is_refused():
    data = pack(small_state())
    for place in range(len(data)):
        with pytest.raises(ValueError, match=r"begins|checksum"):
            unpack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def test_a_later_version_is_refused_by_its_number():
    data = pack(small_state())
    with pytest.raises(ValueError, match=r"begins with .*kvist-sidecar-state 6.* expected .*state 5"):
        unpack(data.replace(b"state 5", b"state 6"))


def test_the_store_returns_what_was_saved_last(tmp_path):
    store = StateStore(tmp_path / "new" / "folder", "pod-1")
    assert store.load() is None
    store.save(state_of())
    store.save(small_state())
    read = store.load()
    assert read is not None
    assert contents(read.ranks[0].residency) == contents(small_state().ranks[0].residency)
    store.close()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 somebody's archive", pack(small_state())[:-1]])
def test_what_cannot_be_read_is_kept_aside_and_said(tmp_path, caplog, data):
    store = StateStore(tmp_path, "pod-1")
    store.path.write_bytes(data)
    assert store.load() is None
    assert "state cannot be used, starting empty" in caplog.text
    assert not store.path.exists()
    assert (tmp_path / "sidecar-pod-1.unreadable").read_bytes() == data
    store.close()


def test_one_sidecar_of_a_worker_has_the_file_at_a_time(tmp_path):
    store = StateStore(tmp_path, "pod-1")
    other = StateStore(tmp_path, "pod-2")
    with pytest.raises(InvalidValueError, match="no other sidecar of worker pod-1"):
        StateStore(tmp_path, "pod-1")
    store.close()
    StateStore(tmp_path, "pod-1").close()
    other.close()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match="state_dir"):
        StateStore(tmp_path / "file" / "folder", "pod-1")
