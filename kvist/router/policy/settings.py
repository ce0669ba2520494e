"""What the priced cost depends on, apart from the code that computes it, which reading flags should not load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

DEFAULT_ALPHA = 2.9e-5
"""For an 8B model: its token at position 34,000 costs twice as much as the first one."""

DEFAULT_TIER_CREDITS = (1.0, 0.75, 0.25, 0.0)
"""The share of its computation that a cached block saves: on GPU, in host memory, on disk; in external storage 0, as
that serves all workers alike."""

FETCH_SCALE = 0.05
"""The cost of fetching a block relative to computing it: 2 MB (16 tokens of an 8B model) cross a 200 Gbit/s link in
0.1 ms and take 1 to 2 ms to compute. Estimated, not measured."""

PULL_LATENCY_S = 0.01
"""The time to fetch a prefix from another worker, without its bytes: one more exchange with each of the two."""

DEFAULT_MAX_LOCAL_PREFILL_TOKENS = 256
"""A GPU computes so many tokens in 10 to 30 ms, about one step of a full batch of decodes: they ride along. Handing
them over costs as much again, in two more exchanges and a wait for the blocks. Estimated, not measured."""


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """What the cost of `kvist.router.policy.priced` depends on for a model; `tier_credits` has one for each `Tier`."""

    name: ClassVar[str] = "kv"
    alpha: float = DEFAULT_ALPHA
    tier_credits: tuple[float, ...] = DEFAULT_TIER_CREDITS

    def work_of(self, num_tokens: Any) -> Any:
        """Return the work of a prompt's first tokens, of one number or many."""
        return num_tokens * (1.0 + self.alpha / 2 * num_tokens)
