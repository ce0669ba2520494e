from __future__ import annotations

import pytest

from kvist.events import FULL
from kvist.kvcache import ScratchPolicy, SequenceStep, can_resume, slots_for_batch

SCRATCH = ScratchPolicy()


def test_four_prompts_take_the_written_number_of_slots() -> None:
    prompts = [SequenceStep(0, 512)] * 4
    layers = {"scale": 32, "buffers_per_layer": 2}
    assert slots_for_batch(prompts, 128, 32, sink=32, **layers) == 64
    assert slots_for_batch(prompts, 128, 32, scratch=SCRATCH, sink=32, **layers) == 24
    assert slots_for_batch(prompts, FULL, 32, scratch=SCRATCH, **layers) == 64


@pytest.mark.parametrize(
    ("step", "window", "num_layers", "rewind", "expected"),
    [
        (SequenceStep(0, 1024), 128, 32, 0, 5),
        (SequenceStep(0, 1000), 128, 32, 0, 6),
        (SequenceStep(0, 1024), 128, 32, 8, 6),
        (SequenceStep(0, 256), 32, 8, 0, 2),
        (SequenceStep(0, 256), 32, 8, 64, 4),
        (SequenceStep(0, 256), 64, 8, 0, 3),
        (SequenceStep(256, 352), 64, 8, 0, 5),
        (SequenceStep(256, 352), 64, 8, 32, 5),
        (SequenceStep(0, 256), 256, 8, 0, 8),
        (SequenceStep(256, 352), 256, 8, 0, 11),
    ],
)
def test_one_prompt_takes_the_written_number_of_slots(
    step: SequenceStep, window: int, num_layers: int, rewind: int, expected: int
) -> None:
    assert slots_for_batch([step], window, 32, num_layers, ScratchPolicy(rewind)) == expected


def test_scratch_never_costs_a_slot() -> None:
    for window in (1, 5, 16):
        for history in range(30):
            for capacity in range(history + 1, history + 30):
                for num_layers in (1, 2, 5):
                    step = [SequenceStep(history, capacity)]
                    without = slots_for_batch(step, window, 4, num_layers)
                    assert slots_for_batch(step, window, 4, num_layers, SCRATCH) <= without


def test_a_shared_prompt_counts_once_and_only_what_somebody_still_needs_of_it() -> None:
    decodes = [SequenceStep(100 + 32 * i, 101 + 32 * i) for i in range(4)]
    assert slots_for_batch(decodes, FULL, 32, 8, num_shared_tokens=96) == 3 + 1 + 2 + 3 + 4
    assert slots_for_batch(decodes, 64, 32, 8, num_shared_tokens=96) == 2 + 1 + 2 + 3 + 3
    assert slots_for_batch(decodes[3:], 64, 32, 8, num_shared_tokens=96) == 3


def test_a_group_without_sequences_plans_for_one_slot() -> None:
    assert slots_for_batch([], 64, 32, 8) == 1


def test_a_preempted_sequence_comes_back_only_below_ninety_seven_percent() -> None:
    assert can_resume(90, 7, 100)
    assert not can_resume(90, 8, 100)
