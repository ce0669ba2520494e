"""A plan of what a fleet lives through; everything in it follows from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvist.publisher import PublisherLimits

STEPS = {
    "live": 30,
    "wait": 8,
    "weather": 8,
    "clear_up": 4,
    "lose_the_last": 4,
    "cut": 4,
    "mend": 4,
    "stall": 3,
    "go_on": 3,
    "jam": 2,
    "answer_badly": 6,
    "answer_well": 3,
    "resend": 3,
    "kill_publisher": 4,
    "stop_publisher": 1,
    "start_publisher": 5,
    "turn_back_the_clock": 1,
    "kill_router": 2,
    "take_over_a_dump": 3,
    "lose_a_rank": 2,
}


class Step(NamedTuple):
    """One thing that happens, to one worker; `number` decides the rest."""

    kind: str
    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one history is: everything random in it follows from the numbers here."""

    seed: int
    kinds: tuple[str, ...]
    settings: dict[str, Any]
    steps: tuple[Step, ...]


def plan_of(seed: int, kinds: tuple[str, ...] = ("embedded",)) -> Plan:
    """Return the plan of a seed; each worker is of one of these kinds."""
    rng = random.Random(seed)
    num_ranks, has_groups, has_created = rng.choice((1, 1, 2)), rng.random() < 0.3, rng.random() < 0.7
    rng.random()  # was a setting's: a seed stays the history that it was
    settings = {
        "num_ranks": num_ranks,
        "has_groups": has_groups,
        "has_created": has_created,
        "in_blocks": rng.random() < 0.5,
        "tells_departure": rng.random() < 0.3,
        "queue_capacity": rng.choice((3, 20, 10_000)),
        "num_kept": rng.choice((None, None, 1000, 20, 3, 0)),
        "limits": PublisherLimits(
            replay_max_batches=rng.choice((1, 3, 20, 1000)), outbox_capacity=rng.choice((1, 5, 10_000))
        ),
        "has_state": rng.random() < 0.4,
        "max_part_blocks": rng.choice((3, 20, 8192)),
        "slice_blocks": rng.choice((3, 512)),
        "batch_bytes": rng.choice((64, 1 << 16)),
    }
    names, weights = list(STEPS), list(STEPS.values())
    steps = tuple(
        Step(kind, rng.randrange(8), rng.getrandbits(16)) for kind in rng.choices(names, weights, k=rng.randint(5, 60))
    )
    return Plan(seed, tuple(rng.choice(kinds) for _ in range(rng.randint(1, 3))), settings, steps)
