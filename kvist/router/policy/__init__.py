"""Routing policies: pure functions from what is known about a prompt and the fleet to a probability per candidate.

A policy never draws, keeps no state and reads no clock: `decide` takes the randomness, and `turn` (how many requests
were dispatched so far) is what round robin counts with. So a decision can be explained without being taken.
"""

from kvist.router.policy.baselines import LeastLoadedPolicy, PowerOfTwoPolicy, RandomPolicy, RoundRobinPolicy
from kvist.router.policy.cost import (
    DEFAULT_DECODE_SCALE,
    DEFAULT_RECENT_SCALE,
    DEFAULT_TIER_CREDITS,
    KvPolicy,
    softmax_of_costs,
)
from kvist.router.policy.decision import (
    Candidate,
    Decision,
    Load,
    Policy,
    Prompt,
    Role,
    Weighing,
    decide,
    usable_blocks,
)

__all__ = [
    "DEFAULT_DECODE_SCALE",
    "DEFAULT_RECENT_SCALE",
    "DEFAULT_TIER_CREDITS",
    "Candidate",
    "Decision",
    "KvPolicy",
    "LeastLoadedPolicy",
    "Load",
    "Policy",
    "PowerOfTwoPolicy",
    "Prompt",
    "RandomPolicy",
    "Role",
    "RoundRobinPolicy",
    "Weighing",
    "decide",
    "softmax_of_costs",
    "usable_blocks",
]
