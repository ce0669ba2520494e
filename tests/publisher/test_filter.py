"""The window filter: exactly one group is published, however its window becomes known."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

import kvist.publisher.filter as filter_module
from kvist.events.engine_events import (
    FULL,
    STATE,
    UNKNOWN,
    EngineCleared,
    EngineCreated,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Window,
)
from kvist.publisher.filter import WindowFilter, block_size_of, largest_windows_first


def created(window: Window, group: int | None = None) -> EngineCreated:
    return EngineCreated(window, group)


def stored(window: Window = UNKNOWN, group: int | None = None, block_hash: int = 1) -> EngineStored:
    return EngineStored([block_hash], [1, 2, 3, 4], 4, window=window, group=group)


def removed(window: Window = UNKNOWN, group: int | None = None, block_hash: int = 1) -> EngineRemoved:
    return EngineRemoved([block_hash], window, group)


CLEARED = EngineCleared()


def admit_all(window_filter: WindowFilter, *events: EngineEvent) -> list[EngineEvent]:
    return [passed for event in events for passed in window_filter.admit(event)]


def test_only_the_largest_created_window_is_published():
    window_filter = WindowFilter()
    b, removed_b = stored(32768, block_hash=2), removed(32768, block_hash=2)
    passed = admit_all(window_filter, created(512), created(32768), stored(512), b, removed(512), removed_b)
    assert passed == [b, removed_b]
    assert window_filter.num_filtered == 2
    assert window_filter.num_passed == 2


def test_the_very_first_stored_event_is_filtered_too():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(512), created(4096), stored(512), removed(512)) == []


def test_windows_may_be_created_in_any_order():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(4096), created(512), stored(512), stored(4096)) == [stored(4096)]


def test_full_attention_is_larger_than_any_number():
    window_filter = WindowFilter()
    events = (created(10**9, 0), created(FULL, 1), stored(10**9, 0), stored(FULL, 1))
    assert admit_all(window_filter, *events) == [stored(FULL, 1)]


def test_a_larger_window_created_late_is_ignored_and_warned_of(caplog, logged):
    window_filter = WindowFilter(rank=3)
    admit_all(window_filter, created(512), created(32768), stored(32768))
    with caplog.at_level(logging.WARNING):
        assert admit_all(window_filter, created(65536), stored(32768), created(65536)) == [stored(32768)]
    assert [text.split("rank=")[1] for text in logged("kvist.publisher.filter")] == [
        "3 window=65536 published_window=32768"
    ]


def test_a_window_larger_than_every_created_one_is_dropped_with_a_warning(caplog, logged):
    window_filter = WindowFilter()
    with caplog.at_level(logging.WARNING):
        assert admit_all(window_filter, created(512), stored(4096), stored(4096), stored(512)) == [stored(512)]
    assert len(logged("kvist.publisher.filter")) == 1


def test_without_created_events_the_largest_window_is_learnt():
    window_filter = WindowFilter()
    assert admit_all(window_filter, stored(512), removed(512)) == [stored(512), removed(512)]
    assert admit_all(window_filter, stored(4096), removed(4096)) == [CLEARED, stored(4096), removed(4096)]
    assert admit_all(window_filter, stored(512), removed(512)) == []


def test_a_learnt_window_that_grows_is_warned_of_once(caplog, logged):
    window_filter = WindowFilter()
    with caplog.at_level(logging.WARNING):
        passed = admit_all(window_filter, stored(256), stored(512), stored(FULL))
    assert passed == [stored(256), CLEARED, stored(512), CLEARED, stored(FULL)]
    assert len(logged("kvist.publisher.filter")) == 1


def test_groups_that_do_not_say_their_windows_are_warned_of_once_however_often_the_rank_is_cleared(caplog, logged):
    window_filter = WindowFilter()
    with caplog.at_level(logging.WARNING):
        admit_all(window_filter, stored(512))  # a group without a number
        for _ in range(3):
            assert CLEARED in admit_all(window_filter, stored(512, group=0), stored(group=0), stored(512, group=1))
    assert len(logged("kvist.publisher.filter")) == 1


def test_a_group_whose_window_grows_is_cleared_too():
    window_filter = WindowFilter()
    passed = admit_all(window_filter, stored(512, group=0), stored(4096, group=0))
    assert passed == [stored(512, group=0), CLEARED, stored(4096, group=0)]


def test_learning_from_a_removal_clears_nothing_because_nothing_was_published():
    window_filter = WindowFilter()
    passed = admit_all(window_filter, removed(512), stored(4096), stored(512))
    assert passed == [removed(512), stored(4096)]


def test_of_two_created_groups_with_the_largest_window_exactly_one_is_published():
    window_filter = WindowFilter()
    events = (created(32768, 0), created(32768, 1), stored(32768, 1), stored(32768, 0), removed(32768, 1))
    assert admit_all(window_filter, *events) == [stored(32768, 0)]


def test_of_two_groups_with_the_largest_window_the_first_one_named_is_published():
    window_filter = WindowFilter()
    events = (stored(4096, 7), stored(4096, 8), removed(4096, 8), removed(4096, 7), stored(512, 7))
    assert admit_all(window_filter, *events) == [stored(4096, 7), removed(4096, 7)]


def test_a_removal_is_known_by_its_group_alone():
    window_filter = WindowFilter()
    events = (stored(FULL, 0), stored(512, 1), removed(group=1), removed(group=0))
    assert admit_all(window_filter, *events) == [stored(FULL, 0), removed(group=0)]


def test_a_removal_seen_before_its_group_is_known_costs_nothing():
    window_filter = WindowFilter()
    events = (removed(group=1), stored(FULL, 0), removed(group=1), removed(group=0))
    assert admit_all(window_filter, *events) == [removed(group=1), stored(FULL, 0), removed(group=0)]


def test_a_removal_without_a_group_is_of_the_only_one():
    window_filter = WindowFilter()
    assert admit_all(window_filter, stored(FULL, 0), removed()) == [stored(FULL, 0), removed()]


def test_a_removal_without_a_group_among_several_is_applied():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(512), created(FULL), removed()) == [removed()]


def test_an_unknown_window_passes_while_the_rank_has_shown_one_group():
    window_filter = WindowFilter()
    events = (stored(), removed(), stored(group=0), removed(group=0), stored())
    assert admit_all(window_filter, *events) == list(events)


def test_an_unknown_window_is_cleared_once_and_dropped_when_a_second_group_shows(caplog, logged):
    window_filter = WindowFilter()
    with caplog.at_level(logging.WARNING):
        passed = admit_all(window_filter, stored(group=0), stored(group=1), stored(group=0), removed(group=0))
    assert passed == [stored(group=0), CLEARED]
    assert len(logged("kvist.publisher.filter")) == 1


def test_an_unknown_window_gives_way_to_the_first_known_one():
    window_filter = WindowFilter()
    events = (stored(group=0), stored(FULL, 1), stored(group=0), removed(group=0), stored(group=1))
    assert admit_all(window_filter, *events) == [stored(group=0), CLEARED, stored(FULL, 1), stored(group=1)]


def test_a_groups_number_is_not_taken_for_a_window():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(512), stored(512, 4096), stored(group=512)) == [stored(512, 4096)]


def test_a_group_that_says_its_window_later_is_not_cleared():
    window_filter = WindowFilter()
    events = (stored(group=0), stored(FULL, 0), stored(512, 1), stored(group=0))
    assert admit_all(window_filter, *events) == [stored(group=0), stored(FULL, 0), stored(group=0)]


def test_created_groups_without_a_window_leave_it_to_be_learnt():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(UNKNOWN), stored()) == [stored()]


def test_a_larger_window_is_learnt_with_the_group_that_has_it():
    window_filter = WindowFilter()
    events = (stored(512, 0), stored(4096, 1), stored(4096, 0))
    assert admit_all(window_filter, *events) == [stored(512, 0), CLEARED, stored(4096, 1)]


def test_a_rank_that_was_cleared_is_cleared_again_for_a_larger_window():
    window_filter = WindowFilter()
    assert admit_all(window_filter, stored(512), CLEARED, stored(4096)) == [stored(512), CLEARED, CLEARED, stored(4096)]


def test_what_was_published_without_window_is_cleared_once():
    window_filter = WindowFilter()
    assert admit_all(window_filter, stored(group=0), CLEARED, stored(group=1)) == [stored(group=0), CLEARED]
    window_filter = WindowFilter()
    events = (stored(group=0), stored(group=1), stored(4096, 0))
    assert admit_all(window_filter, *events) == [stored(group=0), CLEARED, stored(4096, 0)]


def test_what_was_stored_without_window_and_group_is_cleared_when_a_second_group_shows():
    window_filter = WindowFilter()
    known = stored(512, 0)
    assert admit_all(window_filter, known, stored(), known, stored(512, 1)) == [known, stored(), known, CLEARED]


def test_an_event_with_the_largest_window_and_no_group_is_published():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(4096, 7), stored(4096), removed(4096)) == [stored(4096), removed(4096)]


def test_a_clearing_is_of_the_rank_whose_event_brought_it():
    window_filter, of_rank = WindowFilter(rank=2), {"block_size": 4, "rank": 2}
    small, unknown = EngineStored([1], [1, 2, 3, 4], window=512, **of_rank), EngineStored([1], [1, 2, 3, 4], **of_rank)
    large = EngineStored([2], [1, 2, 3, 4], window=4096, **of_rank)
    assert admit_all(window_filter, small, large) == [small, EngineCleared(rank=2), large]
    window_filter = WindowFilter(rank=2)
    other = EngineStored([2], [1, 2, 3, 4], group=1, **of_rank)
    first = EngineStored([1], [1, 2, 3, 4], group=0, **of_rank)
    assert admit_all(window_filter, unknown, first, other) == [unknown, first, EngineCleared(rank=2)]


def test_a_cleared_event_always_passes_and_ends_the_created_phase():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(512), CLEARED, created(4096), stored(512)) == [CLEARED, stored(512)]


def test_an_engine_of_sliding_windows_only_publishes_the_largest_and_says_what_scores_then_mean():
    window_filter = WindowFilter()
    assert admit_all(window_filter, created(512), created(1024), stored(512), stored(1024)) == [stored(1024)]
    assert "upper bounds" in (filter_module.__doc__ or "")


windows = st.sampled_from([UNKNOWN, FULL, 512, 4096])
groups = st.sampled_from([None, 0, 1, 2])
any_event = st.one_of(
    st.builds(created, windows, groups),
    st.builds(stored, windows, groups),
    st.builds(removed, windows, groups),
    st.just(CLEARED),
)


@given(st.lists(any_event, max_size=30))
def test_between_two_clearings_one_group_at_most_is_published(events):
    window_filter = WindowFilter()
    published: set[tuple[Window, int | None]] = set()
    for event in events:
        for passed in window_filter.admit(event):
            if isinstance(passed, EngineCleared):
                published.clear()
            elif isinstance(passed, EngineStored):
                published.add((passed.window, passed.group))
        assert len({window for window, _ in published} - {UNKNOWN}) <= 1
        assert len({group for _, group in published} - {None}) <= 1
    num_judged = window_filter.num_passed + window_filter.num_filtered
    assert num_judged == sum(not isinstance(event, EngineCreated) for event in events)


@given(st.lists(any_event, max_size=20), st.lists(any_event, max_size=20))
def test_a_filter_that_resumes_from_a_state_goes_on_as_that_filter_would(before, after):
    window_filter = WindowFilter()
    admit_all(window_filter, *before)
    resumed = WindowFilter()
    resumed.state = window_filter.state
    for event in after:
        assert resumed.admit(event) == window_filter.admit(event)
        assert resumed.state == window_filter.state


def test_the_block_size_of_the_largest_window_is_that_of_what_is_published():
    windows = {0: FULL, 16: 64, 8: STATE, 4: 9}
    of = {size: EngineStored([1], [1], size, window=window) for size, window in windows.items()}
    assert block_size_of([of[8], of[4], of[16], EngineCleared()]) == 16
    assert block_size_of([of[8], of[0]]) == 8
    assert block_size_of([of[0], EngineCleared()]) is None


def test_the_stores_of_a_batch_come_with_the_largest_windows_first_and_as_they_are_beside_other_events():
    first, second = stored(FULL, 5, 1), stored(FULL, 5, 2)
    events = [stored(64, 0), stored(STATE, 3), first, stored(64, 1), second, stored(128, 2)]
    ordered = [first, second, stored(128, 2), stored(64, 0), stored(64, 1), stored(STATE, 3)]
    assert [*largest_windows_first(events)] == ordered
    assert [*largest_windows_first([removed(group=5), *events])] == [removed(group=5), *events]
