"""What the priced cost weighs; apart from it, as who only reads flags should not load what computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

DEFAULT_ALPHA = 2.9e-5
"""Of an 8B model: a token at position 34,000 costs twice what the first one does."""

DEFAULT_TIER_CREDITS = (1.0, 0.75, 0.25, 0.0)
"""What a cached block spares of computing it: GPU, host, disk; external storage serves every worker alike, so 0."""

FETCH_SCALE = 0.05
"""What fetching a block costs against computing it: 2 MB (16 tokens of an 8B model) cross a 200 Gbit/s link in 0.1 ms
and take 1 to 2 ms to compute. Estimated, not measured."""

PULL_LATENCY_S = 0.01
"""What fetching a prefix that another worker holds takes beside its bytes: one more exchange with each of the two."""

DEFAULT_MAX_LOCAL_PREFILL_TOKENS = 256
"""A GPU computes so many tokens in 10 to 30 ms, about one step of a full batch of decodes: they ride along. Handing
them over costs as much again, in two more exchanges and a wait for the blocks. Estimated, not measured."""


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """The terms of `kvist.router.policy.priced`; `tier_credits` has one for each `Tier`."""

    name: ClassVar[str] = "kv"
    alpha: float = DEFAULT_ALPHA
    tier_credits: tuple[float, ...] = DEFAULT_TIER_CREDITS
    price_scale: float = 2.5
    max_price: float = 40.0
    context_scale: float = 0.02
    spread_scale: float = 0.03
    recent_scale: float = 0.03

    def work_of(self, num_tokens: Any) -> Any:
        """Return the work of a prompt's first tokens, of one number or many."""
        return num_tokens * (1.0 + self.alpha / 2 * num_tokens)
