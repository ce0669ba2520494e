from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.states import Tombstones, TransferLimits, TransferState


def test_only_completed_and_failed_are_ends() -> None:
    ended = {state for state in TransferState if state.is_ended}
    assert ended == {TransferState.COMPLETED, TransferState.FAILED}


@pytest.mark.parametrize("name", ["transfer_timeout_s", "hold_timeout_s", "cancel_retry_s", "max_tombstones"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_is_not_positive_or_endless_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=name):
        TransferLimits(**{name: value})


def test_the_oldest_of_the_ended_are_forgotten_and_counted() -> None:
    tombstones: Tombstones[int, str] = Tombstones(2)
    for key, outcome in ((1, "a"), (2, "b"), (1, "not the first word"), (3, "c")):
        tombstones.bury(key, outcome)
    assert [tombstones.outcome(key) for key in (1, 2, 3)] == [None, "b", "c"]
    assert [key in tombstones for key in (1, 2, 3)] == [False, True, True]
    assert (len(tombstones), tombstones.num_forgotten) == (2, 1)
