"""The epoch of engines' streams: the same process goes on, or a new one uses its numbers again."""

from __future__ import annotations

import pytest

from kvist.events.restarts import RestartDetector


def test_an_engine_that_goes_on_keeps_its_epoch():
    detector = RestartDetector()
    assert [detector.observe(sequence, b"%d" % sequence) for sequence in (0, 1, 1, 5)] == [0, 0, 0, 0]
    assert detector.observe_answer([(1, b"1"), (2, b"2"), (5, b"5")], last_sequence=1) == 0


@pytest.mark.parametrize(
    ("answer", "last_sequence"),
    [
        pytest.param([(1, b"other"), (2, b"2")], 1, id="other bytes under the last number"),
        pytest.param([(1, b"1"), (2, b"other")], 1, id="other bytes under a later number"),
        pytest.param([(2, b"2")], 1, id="the last one is forgotten"),
        pytest.param([], 1, id="nothing is known"),
    ],
)
def test_an_answer_that_does_not_prove_continuity_is_a_new_epoch(answer, last_sequence):
    detector = RestartDetector()
    for sequence in (0, 1, 2):
        detector.observe(sequence, b"%d" % sequence)
    assert detector.observe_answer(answer, last_sequence) == 1


def test_a_number_used_again_for_other_bytes_is_a_new_epoch():
    detector = RestartDetector()
    for sequence in range(10):
        detector.observe(sequence, b"%d" % sequence)
    assert detector.observe(0, b"again") == 1
    assert detector.observe(1, b"and on") == 1


def test_the_first_answer_of_all_needs_no_proof():
    assert RestartDetector().observe_answer([(40, b"x")], last_sequence=None) == 0


def test_fingerprints_are_bounded_and_a_forgotten_number_counts_as_reused():
    detector = RestartDetector(capacity=10)
    for sequence in range(100):
        detector.observe(sequence, b"%d" % sequence)
    assert detector.observe(95, b"95") == 0
    assert detector.observe(5, b"5") == 1


def test_another_detector_goes_on_from_what_was_remembered():
    before, after = RestartDetector(capacity=4), RestartDetector(capacity=4)
    for sequence in range(10):
        before.observe(sequence, b"%d" % sequence)
    assert [sequence for sequence, _ in before.remembered()] == [6, 7, 8, 9]
    after.resume(before.remembered(), 9)
    assert after.observe(9, b"9") == 0
    assert after.observe(10, b"10") == 0
    assert after.observe(8, b"other") == 1
